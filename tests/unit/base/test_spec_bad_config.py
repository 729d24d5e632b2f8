"""Configs that are wrong: each gets a SpecError that names what to change."""

from __future__ import annotations

import pytest

from stepwell.base.errors import SpecError
from stepwell.base.spec.families import from_config

QWEN = {"model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "head_dim": 512, "compress_ratios": [0, 4, 128]}
KIMI = {"model_type": "kimi_linear", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
LINEAR = {"num_heads": 8, "head_dim": 64, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
FALCON = {**QWEN, "model_type": "falcon_h1", "mamba_d_ssm": 100, "mamba_n_heads": 24, "mamba_d_state": 128}
DELTA = {"linear_num_key_heads": 3, "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 8}


def test_unknown_architecture_is_named_beside_what_is_known() -> None:
    with pytest.raises(
        SpecError, match=r"recurrent_gemma, RecurrentGemmaForCausalLM; known model types are: .*deepseek_v4.*qwen3"
    ):
        from_config({"model_type": "recurrent_gemma", "architectures": ["RecurrentGemmaForCausalLM"]})


@pytest.mark.parametrize("config", [{}, {"model_type": 5, "architectures": "LlamaForCausalLM"}, {"architectures": [None, 3]}])
def test_config_without_a_name_says_so(config: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="none named in model_type or architectures"):
        from_config(config)


@pytest.mark.parametrize("config", [None, [], "llama", 5])
def test_config_must_be_an_object(config: object) -> None:
    with pytest.raises(SpecError, match="must be a JSON object"):
        from_config(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ids=lambda value: type(value).__name__, argvalues=[None, 0, -3, 2.5, "4", True, [4], 10**9, 10**5000, float("nan")]
)
@pytest.mark.parametrize("field", ["num_hidden_layers", "head_dim"])
def test_size_that_is_no_size_names_its_field(field: str, value: object) -> None:
    if value is None and field == "head_dim":
        field, config = "hidden_size", {**QWEN, "head_dim": None}
    else:
        config = {**QWEN, field: value}
    with pytest.raises(SpecError, match=field):
        from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN, "head_dim": None, "hidden_size": 100}, "hidden_size 100 is no multiple of 8"),
        ({**QWEN, "use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": -1}, "sliding_window"),
        ({**QWEN, "model_type": "gpt_oss"}, "sliding_window"),
        ({**QWEN, "model_type": "llama", "layer_types": ["full_attention"] * 3}, "layer_types must have 4 entries"),
        ({**QWEN, "model_type": "llama", "layer_types": ["full_attention"] * 5}, "layer_types must have 4 entries"),
        ({**QWEN, "model_type": "llama", "layer_types": ["full_attention", "dream", {}, []]}, "entry 'dream'"),
        ({**QWEN, "model_type": "llama", "layer_types": [{}] * 4}, "known entries are"),
        ({**QWEN, "model_type": "llama", "layer_types": 7}, "layer_types must be a list"),
        ({**QWEN, "model_type": "llama", "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({**QWEN, "model_type": "mimo_v2", "v_head_dim": 64}, "hybrid_layer_pattern must be a list"),
        ({**QWEN, "model_type": "mimo_v2", "v_head_dim": 64, "hybrid_layer_pattern": [0, 1, True, 0]}, "entry True"),
        ({"model_type": "gemma3", "text_config": 5}, "text_config must be an object"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": -1}}, "text_config.num_hidden_layers"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({**KIMI, "model_type": "deepseek_v32"}, "index_head_dim is missing"),
        ({**KIMI, "model_type": "glm_moe_dsa", "index_head_dim": 128, "indexer_types": ["full"]}, "indexer_types must have 4"),
        ({**V4, "compress_ratios": [0, 4]}, "compress_ratios must have 3 entries"),
        ({**V4, "compress_ratios": [0, 4, 16]}, "entry 16; known entries are: 0, 4, 128"),
        ({**V4, "compress_ratios": None}, "compress_ratios is missing"),
        ({**V4, "qk_rope_head_dim": 1024}, "qk_rope_head_dim"),
        ({**V4, "partial_rotary_factor": 1.5}, "partial_rotary_factor must be a share of 512 channels"),
        ({**KIMI, "linear_attn_config": {**LINEAR, "full_attn_layers": [3]}}, "must name each of the 4 layers once"),
        ({**KIMI, "linear_attn_config": {**LINEAR, "kda_layers": [1, 1, 2]}}, "linear_attn_config.kda_layers"),
        ({**KIMI, "linear_attn_config": {**LINEAR, "num_heads": 0}}, "linear_attn_config.num_heads"),
        ({**KIMI, "layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({**FALCON}, "mamba_n_heads 24"),
        ({**FALCON, "mamba_d_ssm": 1536, "mamba_n_groups": 5}, "5 groups"),
        ({**QWEN, "model_type": "qwen3_next", **DELTA}, "linear_num_value_heads 4 must be a multiple of 3"),
    ],
)
def test_contradiction_is_explained(config: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        from_config(config)


def test_unknown_kv_dtype_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="'int4'; choose one of: fp32, bf16, fp16, fp8"):
        from_config(QWEN, kv_dtype="int4")


@pytest.mark.parametrize("config", [QWEN, V4, {**KIMI, "model_type": "deepseek_v3"}])
def test_draft_of_a_model_without_one_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="draft"):
        from_config(config, draft=True)


@pytest.mark.parametrize("page_tokens", [0, -64, 3, 48, 192, 100])
def test_page_that_does_not_fit_says_what_would(page_tokens: int) -> None:
    with pytest.raises(SpecError, match="page_tokens"):
        from_config(V4, page_tokens=page_tokens)


@pytest.mark.parametrize("page_tokens", [64.0, "64", True])
def test_page_that_is_no_whole_number_is_refused(page_tokens: object) -> None:
    with pytest.raises(SpecError, match="whole number of tokens"):
        from_config(QWEN, page_tokens=page_tokens)  # type: ignore[arg-type]


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(SpecError) as caught:
        from_config({**QWEN, "head_dim": "x" * 10_000})
    assert len(str(caught.value)) < 200
