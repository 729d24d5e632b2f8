"""Odd configs: what transformers ignores in one is ignored, what it reads is read alike, and what it cannot run is refused.

Spec and model read one schedule (`ModelSpec.layers`), so a config that is accepted also runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.families import COMPRESSED, DELTA, INDEX, KIMI, LATENT, MOE
from engine.side_by_side import TOLERANCE, Ours, draw
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.registry import build_model

transformers = pytest.importorskip("transformers")

WINDOW = 24
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DSA = {**LATENT, **INDEX, "num_hidden_layers": 3}
ON = {"use_sliding_window": True, "sliding_window": WINDOW}
OFF = {"use_sliding_window": False, "sliding_window": WINDOW}
MIXED = {"layer_types": [FULL, SLIDING] * 2}
GPT = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"index_topk_freq": 2, "indexer_types": ["full", "shared", "full"]}
SCHEDULE = (  # what transformers has worked out of a config, and is left to ours to work out
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "indexer_types",
    "full_attention_interval",
)  # fmt: skip
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
KIMI_SHORT = {name: value for name, value in KIMI.items() if name not in ("linear_num_heads", "linear_head_dim")}
LISTS = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}

SAME = {
    "llama, a window switched on": ("llama", {**ON, "max_window_layers": 2}),
    "llama, a window": ("llama", {"sliding_window": WINDOW}),
    "mistral, a window": ("mistral", {"sliding_window": WINDOW}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, nothing said of a window": ("mistral", {}),
    "mistral, a switch it does not have": ("mistral", {"sliding_window": WINDOW, "use_sliding_window": False}),
    "qwen2, switched on for upper layers": ("qwen2", {**ON, "max_window_layers": 2}),
    "qwen2, switched on, first layers by default": ("qwen2", {**ON}),
    "qwen2, switched off": ("qwen2", {**OFF, "max_window_layers": 0}),
    "qwen2, switched on without a length": ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen3, switched on, layers listed": (
        "qwen3", {**ON, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
    ),
    "qwen3, switched on, all listed full": (
        "qwen3", {**ON, "max_window_layers": 0, "layer_types": [FULL] * 4},
    ),
    "qwen3, switched on with null": ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    "qwen3-moe, switched on": ("qwen3_moe", {**EXPERTS, **ON, "max_window_layers": 3}),
    "qwen3-moe, switched off": ("qwen3_moe", {**EXPERTS, **OFF}),
    "gemma3, a pattern of its own": (
        "gemma3_text", {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    ),
    "gpt-oss, layers listed": (
        "gpt_oss", {**GPT, "sliding_window": WINDOW, **MIXED},
    ),
    "qwen3-next, an interval": ("qwen3_next", {**MOE, **DELTA, "full_attention_interval": 2}),
    "kimi, listed from 1 on": (
        "kimi_linear", {**KIMI_SHORT, "linear_attn_config": {**LISTS, "kda_layers": [1, 2, 4], "full_attn_layers": [3, 5]}},
    ),
    "deepseek-v3.2, fields of GLM-5": ("deepseek_v32", {**DSA, **SHARED}),
    "deepseek-v4, listed in both ways": ("deepseek_v4", {**COMPRESSED, "compress_ratios": [0, 0, 0, 0]}),
}  # fmt: skip
REFUSED = {
    "llama, windows listed": ("llama", {"sliding_window": WINDOW, **MIXED}, "layer_types"),
    "mistral, windows listed in some layers": ("mistral", {"sliding_window": WINDOW, **MIXED}, "layer_types"),
    "mistral, full layers listed and a window": ("mistral", {"sliding_window": WINDOW, "layer_types": [FULL] * 4}, "layer_types"),
    "qwen2, windows listed and switched off": (
        "qwen2", {**OFF, **MIXED}, "use_sliding_window",
    ),
    "qwen3, windows listed and null": (
        "qwen3", {"use_sliding_window": True, "sliding_window": None, **MIXED}, "sliding_window",
    ),
    "qwen3, delta nets listed": ("qwen3", {"layer_types": [FULL, LINEAR] * 2}, "linear_attention"),
    "qwen3, too few listed": ("qwen3", {"layer_types": [FULL] * 3}, "4 entries"),
    "qwen3-moe, windows listed and switched off": ("qwen3_moe", {**EXPERTS, **MIXED}, "layer_types"),
    "gemma3, no window": ("gemma3_text", {"sliding_window": None}, "sliding_window"),
    "gpt-oss, no window": ("gpt_oss", {**GPT, "sliding_window": None}, "sliding_window"),
    "qwen3-next, windows listed": ("qwen3_next", {**MOE, **DELTA, "layer_types": [SLIDING] * 4}, "sliding_attention"),
    "kimi, listed from 0 on": (
        "kimi_linear", {**KIMI, "linear_attn_config": {**LISTS, "kda_layers": [0, 1, 3], "full_attn_layers": [2, 4]}},
        "from 1 on",
    ),
    "glm-5, a first layer without an index": ("glm_moe_dsa", {**DSA, "indexer_types": ["shared", "full", "full"]}, "first layer"),
}  # fmt: skip


def raw(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    own = {} if kind in ("kimi_linear", "deepseek_v32", "glm_moe_dsa", "deepseek_v4") else DENSE
    return {**own, **more, **NO_TOKENS}


@pytest.mark.parametrize("case", SAME)
def test_ours_computes_what_transformers_does(case: str) -> None:
    kind, more = SAME[case]
    config = raw(kind, more)
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    draw(reference)
    reference = reference.eval().float()
    saved = {name: value for name, value in reference.config.to_dict().items() if name not in SCHEDULE}
    ours = Ours(build_model({**saved, **config}, HeldTensors(dict(reference.state_dict())), page_tokens=16))
    tokens = ours.tokens(3 * WINDOW)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].float()
    assert expected.std() > 0.3, f"a dead model proves nothing: {expected.std()=}"
    assert (ours.in_chunks(tokens, [40, 7]) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_before_a_tensor_is_read(case: str) -> None:
    kind, more, why = REFUSED[case]
    with pytest.raises(ConfigError, match=why):
        build_model({**raw(kind, more), "model_type": kind}, HeldTensors({}), page_tokens=16)
