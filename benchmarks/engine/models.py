"""Checkpoints to measure with: any that the engine can open, or a random one of a usual size, and the same in transformers.

Random weights compute as fast as trained ones. They are for machines that have no weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.checkpoint import Checkpoint, open_checkpoint
from stepwell.engine.loading.weights import HeldTensors

_LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_1B = {
    "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 131_072, "sliding_window": 512,
}  # fmt: skip
RANDOM = {"random-llama-1b": ("LlamaConfig", _LLAMA_1B), "random-gemma-1b": ("Gemma3TextConfig", _GEMMA_1B)}


@cache
def checkpoint_of(name: str) -> Checkpoint:
    if name not in RANDOM:
        return open_checkpoint(name)
    return held(name, reference_of(name, "cpu"))


def held(name: str, model: Any) -> Checkpoint:
    """A model of transformers as a checkpoint without a tokenizer. Shares its tensors."""
    return Checkpoint(
        name=name,
        config=model.config.to_dict(),
        source=HeldTensors({key: tensor.detach() for key, tensor in model.state_dict().items()}),
        text=None,
        digest=name,
        eos_ids=frozenset(),
        defaults={},
        chat=ChatTemplate(None),
    )


def reference_of(name: str, device: str) -> Any:
    """The same weights in transformers: fp32 on a CPU, bf16 elsewhere."""
    import transformers

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if name in RANDOM:
        kind, values = RANDOM[name]
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values), dtype=dtype)
        return made.eval().to(device)
    checkpoint = open_checkpoint(name)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = {key: checkpoint.source.read(key).to(dtype) for key in checkpoint.source.names()}
    missing, unexpected = made.load_state_dict(tensors, strict=False)
    assert not unexpected and all(key.startswith("lm_head") for key in missing), f"{missing=} {unexpected=}"
    made.tie_weights()
    return made.eval().to(device)
