"""Hybrid models of random weights with the state of well-known ones: heads of 128 by 128 in fp32, windows with heads of 64.

Matrices keep the size of what goes through them, so that every state counts for what comes out. Heads of recurrences remember
from a few tokens to a thousand: as they are drawn by default they forget at once, and no error of theirs would show.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.models import held
from stepwell.engine.loading.checkpoint import Checkpoint, open_checkpoint

_SMALL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 65_536, "tie_word_embeddings": False,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip
_MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-shaped": ("Qwen3_5TextConfig", _SMALL),
    "qwen3-next-shaped": ("Qwen3NextConfig", _SMALL | _EXPERTS),
}
_LOG_DECAYS = (-7.0, -1.0)
NAMES = (*_MADE, "random-hybrid")


@cache
def checkpoint_of(name: str) -> Checkpoint:
    """One of ours, or whatever the engine opens by this name or path."""
    if name not in _MADE:
        return open_checkpoint(name)
    import transformers

    kind, values = _MADE[name]
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if key.endswith("A_log"):
                weight.uniform_(*_LOG_DECAYS, generator=generator)
            elif weight.ndim > 1:  # other vectors are norms and biases, and stay as they are
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return held(name, made.eval().requires_grad_(False))
