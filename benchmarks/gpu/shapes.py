"""Models of well-known shapes with random weights, made on the device itself, in full and tiny.

Cut ones have fewer layers and experts than the model they are named for, and its true widths. Random weights compute as fast as
trained ones, but for which experts are visited: here all alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.models import RANDOM

LONGEST = 262_144
LLAMA, QWEN, SHALLOW = "random-llama-1b", "qwen3-8b-shaped", "12-layers-shaped"
DENSE = (LLAMA, QWEN, SHALLOW)
HYBRIDS = ("deepseek-v3.2-shaped", "deepseek-v4-shaped", "qwen3-next-shaped", "kimi-linear-shaped")

Values = dict[str, Any]

_V4_KINDS = ["sliding"] * 2 + ["compressed_sparse", "heavily_compressed"] * 2 + ["compressed_sparse"]
_V4_LAYERS = {
    "num_hidden_layers": len(_V4_KINDS), "layer_types": [f"{kind}_attention" for kind in _V4_KINDS],
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * (len(_V4_KINDS) - 2),
}  # fmt: skip
_QWEN = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
_FULL: dict[str, tuple[str, Values]] = {
    LLAMA: RANDOM[LLAMA],
    QWEN: ("Qwen3Config", _QWEN),
    SHALLOW: ("Qwen3Config", _QWEN | {"num_hidden_layers": 12}),  # 49,152 bytes a token: sooner computed than most disks read
    "deepseek-v3.2-shaped": ("DeepseekV32Config", {
        "num_hidden_layers": 6, "first_k_dense_replace": 1, "n_routed_experts": 32,
    }),
    "deepseek-v4-shaped": ("DeepseekV4Config", {**_V4_LAYERS, "n_routed_experts": 32}),
    "qwen3-next-shaped": ("Qwen3NextConfig", {"num_hidden_layers": 12, "num_experts": 128}),
    "kimi-linear-shaped": ("KimiLinearConfig", {"num_hidden_layers": 13, "num_experts": 64}),
}  # fmt: skip
_SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SMALL_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
}  # fmt: skip
_TINY: dict[str, Values] = {
    LLAMA: {**_SMALL, "num_hidden_layers": 2, "head_dim": 16},
    QWEN: {**_SMALL, "num_hidden_layers": 3, "head_dim": 16},
    SHALLOW: {**_SMALL, "num_hidden_layers": 3, "head_dim": 16},
    "deepseek-v3.2-shaped": {
        **_SMALL, **_SMALL_MOE, **_SMALL_LATENT, "num_hidden_layers": 2, "n_routed_experts": 8, "q_lora_rank": 24, "n_group": 4,
        "topk_group": 2, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 24,
    },
    "deepseek-v4-shaped": {
        "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, **_SMALL_MOE, "head_dim": 24,
        "partial_rotary_factor": 1 / 3, "q_lora_rank": 24, "o_groups": 4, "o_lora_rank": 16, "n_routed_experts": 8,
        "sliding_window": 24, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 6,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    },
    "qwen3-next-shaped": {
        **_SMALL, **_SMALL_MOE, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 8, "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "kimi-linear-shaped": {
        **_SMALL, **_SMALL_LATENT, "num_hidden_layers": 5, "num_experts": 8, "num_experts_per_token": 2,
        "moe_intermediate_size": 32, "linear_num_heads": 4, "linear_head_dim": 16,
    },
}  # fmt: skip
_NO_TEXT = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model of transformers, and what of it a decode step reads selectively."""

    name: str
    model: Any
    picked: dict[str, int]  # rows a query looks at, by state, where an index picks them

    @property
    def config(self) -> Any:
        return self.model.config


def make(name: str, device: str, *, tiny: bool) -> Made:
    """On the device at once: bf16 on CUDA, fp32 on a CPU."""
    import transformers

    kind, values = _FULL[name]
    values = values | (_TINY[name] if tiny else {}) | _NO_TEXT
    values["model_max_length" if kind == "KimiLinearConfig" else "max_position_embeddings"] = LONGEST
    config = getattr(transformers, kind)(**values)
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            attn_implementation="sdpa" if name in DENSE else "eager",
        )
        _draw_tables(model)
    return Made(name=name, model=model.eval().requires_grad_(False), picked=_picked(config))


def _picked(config: Any) -> dict[str, int]:
    state = {"deepseek_v32": "kv", "deepseek_v4": "c4"}.get(config.model_type)
    return {} if state is None else {state: config.index_topk}


def _draw_tables(model: Any) -> None:
    """Tables that send tokens to experts: random, where they start with one expert for all."""
    for name, tensor in model.named_buffers():
        if name.endswith("tid2eid"):
            scores = torch.rand(len(tensor), model.config.n_routed_experts, device=tensor.device)
            tensor.copy_(scores.topk(tensor.shape[1], dim=-1).indices)
