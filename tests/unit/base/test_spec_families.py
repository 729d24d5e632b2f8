"""Each family of models, from a small `config.json` as Hugging Face writes it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec, Point, Prefix, StateSpec, Window
from stepwell.base.spec.families import from_config, known_model_types

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
MLA: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
    "hidden_size": 7168,
}
DSA = {**MLA, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128}
GLM = {**DSA, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 78}
V4: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
}
DELTA_NET: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
KIMI: dict[str, object] = {
    **MLA,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 5,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4, 5],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
}
MIMO: dict[str, object] = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1],
}
FALCON: dict[str, object] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}


def states_of(config: Mapping[str, object], **options: object) -> dict[str, StateSpec]:
    spec = from_config(config, **options)  # type: ignore[arg-type]
    return {state.name: state for state in spec.states}


def facts(state: StateSpec) -> tuple[object, int, int, str, int]:
    return state.shape, state.layers, state.row_bytes, state.dtype, state.shards


def test_llama_keeps_keys_and_values_of_every_layer() -> None:
    spec = from_config(LLAMA)
    assert [facts(state) for state in spec.states] == [(Prefix(), 4, 2 * 2 * 16 * 2, "bf16", 2)]
    assert (spec.name, spec.page_tokens, spec.needs_checkpoint) == ("llama", 64, False)


def test_kv_heads_default_to_attention_heads() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert states_of(config)["kv"].shards == 8


@pytest.mark.parametrize(("dtype", "row_bytes"), [("fp32", 256), ("bf16", 128), ("fp16", 128), ("fp8", 64)])
def test_kv_dtype_sets_the_bytes_of_a_row(dtype: str, row_bytes: int) -> None:
    state = states_of(LLAMA, kv_dtype=dtype)["kv"]
    assert (state.row_bytes, state.dtype) == (row_bytes, dtype)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float32"}, "fp32"),
        ({"torch_dtype": None, "dtype": "float16"}, "fp16"),
        ({"torch_dtype": "torch.float16"}, "fp16"),
        ({"torch_dtype": "float8_e4m3fn"}, "bf16"),  # how weights are stored says nothing about the cache
        ({"torch_dtype": 7}, "bf16"),
        ({"torch_dtype": None}, "bf16"),
    ],
)
def test_dtype_of_the_config_counts_where_it_is_sensible(fields: dict[str, object], dtype: str) -> None:
    assert states_of(LLAMA | fields)["kv"].dtype == dtype


def test_architectures_are_enough_without_a_model_type() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert from_config(config).states == from_config(LLAMA).states
    assert from_config({**LLAMA, "model_type": "my_own", "architectures": ["Qwen3MoeForCausalLM"]}).states


def test_qwen_window_counts_only_when_switched_on() -> None:
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 96, "max_window_layers": 3, "use_sliding_window": False}
    assert list(states_of(config)) == ["kv"]
    on = states_of({**config, "use_sliding_window": True})
    assert (on["kv"].layers, on["swa"].layers, on["swa"].shape) == (3, 1, Window(tokens=96))


@pytest.mark.parametrize(("window", "names"), [(4096, ["swa"]), (None, ["kv"])])
def test_mistral_slides_only_with_a_window(window: int | None, names: list[str]) -> None:
    assert list(states_of({**LLAMA, "model_type": "mistral", "sliding_window": window})) == names


def test_gemma3_by_pattern_by_layer_types_and_nested_agree() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512}
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    by_pattern = from_config({**text, "sliding_window_pattern": 6})
    nested = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
    }
    assert by_pattern.states == from_config({**text, "layer_types": kinds}).states == from_config(nested).states
    assert [(state.name, state.layers) for state in by_pattern.states] == [("kv", 1), ("swa", 6)]


def test_gemma3_leaves_out_fields_equal_to_its_defaults() -> None:
    state = states_of({"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 1024})["swa"]
    assert (state.shards, state.row_bytes) == (4, 4 * 2 * 256 * 2)


def test_gpt_oss_alternates_windows_and_full_layers() -> None:
    config = {**LLAMA, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "sliding_window": 128}
    kinds = ["sliding_attention", "full_attention"] * 2
    assert from_config(config).states == from_config({**config, "layer_types": kinds}).states
    assert {name: state.layers for name, state in states_of(config).items()} == {"kv": 2, "swa": 2}


def test_mimo_windows_have_their_own_heads_and_narrow_values() -> None:
    states = states_of(MIMO)
    assert facts(states["kv"]) == (Prefix(), 1, 4 * (192 + 128) * 2, "bf16", 4)
    assert facts(states["swa"]) == (Window(tokens=128), 3, 8 * (192 + 128) * 2, "bf16", 8)
    named = {key: value for key, value in MIMO.items() if key != "hybrid_layer_pattern"}
    assert states_of({**named, "layer_types": ["full_attention"] + ["sliding_attention"] * 3}) == states


@pytest.mark.parametrize(("dtype", "latent", "index"), [("bf16", 1152, 256), ("fp32", 2304, 512), ("fp8", 656, 132)])
def test_latents_and_index_keys_are_replicated(dtype: str, latent: int, index: int) -> None:
    assert [facts(s) for s in from_config(MLA, kv_dtype=dtype).states] == [(Prefix(), 3, latent, dtype, 1)]
    states = states_of(DSA, kv_dtype=dtype)
    assert facts(states["index"]) == (Prefix(), 3, index, dtype, 1)
    assert states["kv"].row_bytes == latent


def test_glm_layers_that_share_an_index_store_none() -> None:
    own = [0, 1, 2, *range(6, 78, 4)]
    assert len(own) == 21
    types = ["full" if layer in own else "shared" for layer in range(78)]
    pattern = "".join("F" if layer in own else "S" for layer in range(78))
    by_rule = from_config({**GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert by_rule.state("index").layers == 21
    assert by_rule.states == from_config({**GLM, "indexer_types": types}).states
    assert by_rule.states == from_config({**GLM, "index_topk_pattern": pattern}).states
    assert from_config(GLM).state("index").layers == 78


def test_draft_states_are_optional_and_only_on_request() -> None:
    assert "draft" not in states_of(DSA)
    states = {name: state for name, state in states_of(DSA, draft=True, page_tokens=32).items() if name.startswith("draft")}
    assert {name: facts(state)[:3] for name, state in states.items()} == {
        "draft": (Prefix(), 1, 1152),
        "draft_index": (Prefix(), 1, 256),
        "draft_hidden": (Prefix(ratio=32), 1, 2 * 7168),  # one row a page
    }
    assert not any(state.required for state in states.values())
    states = states_of(MLA, draft=True, kv_dtype="fp8")
    assert (states["draft"].row_bytes, states["draft_hidden"].dtype) == (656, "bf16")


def test_v4_states_and_the_entry_past_the_last_layer() -> None:
    states = states_of(V4, kv_dtype="fp8")
    assert {name: facts(state) for name, state in states.items()} == {
        "swa": (Window(tokens=128), 5, 584, "fp8", 1),
        "c4": (Prefix(ratio=4), 2, 584, "fp8", 1),
        "c4_index": (Prefix(ratio=4), 2, 132, "fp8", 1),
        "c4_overlap": (Point(), 2, 4 * (512 + 128) * (2 + 4), "bf16+fp32", 1),
        "c4_buffer": (Point(period=4), 2, 2 * (1024 + 256) * 2, "bf16", 1),
        "c128": (Prefix(ratio=128), 1, 584, "fp8", 1),
        "c128_buffer": (Point(period=128), 1, 2 * 512 * 2, "bf16", 1),
    }
    bf16 = states_of(V4)
    assert [bf16[name].row_bytes for name in ("swa", "c4", "c4_index", "c128")] == [1024, 1024, 256, 1024]


def test_v4_by_layer_types_equals_v4_by_ratios() -> None:
    kinds = ["sliding_attention"] * 2 + [f"{kind}_attention" for kind in ("compressed_sparse", "heavily_compressed")]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    config = {key: value for key, value in V4.items() if key != "compress_ratios"}
    by_name = from_config({**config, "layer_types": [*kinds, "compressed_sparse_attention"], "compress_rates": rates})
    assert by_name.states == from_config(V4).states


def needed(spec: ModelSpec, boundary: int) -> set[str]:
    return {state.name for state in spec.needed_at(boundary)}


@pytest.mark.parametrize("page_tokens", [64, 128, 256])
def test_v4_needs_the_c128_buffer_only_off_multiples_of_128_and_the_overlap_always(page_tokens: int) -> None:
    spec = from_config(V4, page_tokens=page_tokens)
    for boundary in range(page_tokens, 1024 + 1, page_tokens):
        assert ("c128_buffer" in needed(spec, boundary)) == (boundary % 128 != 0)
        assert "c4_overlap" in needed(spec, boundary)
        assert "c4_buffer" not in needed(spec, boundary)
    in_points = {part.state for part in spec.parts(Kind.POINT)}
    assert in_points == ({"c4_overlap", "c128_buffer"} if page_tokens == 64 else {"c4_overlap"})


def test_v4_pages_of_two_tokens_bring_the_c4_buffer_back() -> None:
    spec = from_config(V4, page_tokens=2)
    assert "c4_buffer" in needed(spec, 6) and "c4_buffer" not in needed(spec, 8)
    assert {part.state: part.rows for part in spec.parts(Kind.POINT)} == {"c4_overlap": 1, "c4_buffer": 2, "c128_buffer": 126}


def test_delta_net_keeps_recurrent_state_in_fp32_and_its_convolution_in_the_model_dtype() -> None:
    states = states_of(DELTA_NET, kv_dtype="fp8")
    assert facts(states["kv"]) == (Prefix(), 2, 2 * 2 * 256, "fp8", 2)
    assert facts(states["ssm"]) == (Point(), 6, 32 * 128 * 64 * 4, "fp32", 32)
    assert facts(states["conv"]) == (Point(), 6, (2 * 16 * 128 + 32 * 64) * 4 * 2, "bf16", 16)
    assert states_of({**DELTA_NET, "mamba_ssm_dtype": "bfloat16"})["ssm"].row_bytes == 32 * 128 * 64 * 2


def test_qwen35_is_found_under_text_config() -> None:
    text = {**DELTA_NET, "model_type": "qwen3_5_moe_text", "architectures": None}
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 2
    nested = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    assert from_config(nested).states == from_config(DELTA_NET).states
    assert from_config({**nested, "text_config": {**text, "layer_types": kinds}}).states == from_config(DELTA_NET).states


def test_kimi_delta_attention_beside_latents() -> None:
    states = states_of(KIMI)
    assert facts(states["kv"]) == (Prefix(), 2, 1152, "bf16", 1)
    assert facts(states["ssm"]) == (Point(), 3, 8 * 64 * 64 * 4, "fp32", 8)
    assert facts(states["conv"]) == (Point(), 3, 3 * 8 * 64 * 4 * 2, "bf16", 8)
    k3 = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": KIMI}
    assert states_of(k3) == states


def test_kimi_as_transformers_saves_it() -> None:
    config = {key: value for key, value in KIMI.items() if key != "linear_attn_config"}
    sizes = {"linear_num_heads": 8, "linear_head_dim": 64, "linear_conv_kernel_dim": 4}
    kinds = ["linear_attention"] * 3 + ["full_attention"] * 2
    assert states_of({**config, **sizes, "layer_types": kinds}) == states_of(KIMI)


def test_falcon_h1_keeps_everything_in_every_layer() -> None:
    states = states_of(FALCON)
    assert facts(states["kv"]) == (Prefix(), 3, 2 * 2 * 64 * 2, "bf16", 2)
    assert facts(states["ssm"]) == (Point(), 3, 24 * 64 * 128 * 4, "fp32", 24)
    assert facts(states["conv"]) == (Point(), 3, (1536 + 2 * 128) * 4 * 2, "bf16", 1)
    without = {key: value for key, value in FALCON.items() if key != "mamba_d_ssm"}
    assert states_of({**without, "hidden_size": 768, "mamba_expand": 2}) == states


def test_mamba2_is_points_only() -> None:
    sizes = {"num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4}
    spec = from_config({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 2, **sizes})
    assert [state.name for state in spec.states] == ["ssm", "conv"]
    assert spec.bytes_per_token == 0 and spec.object_bytes(Kind.PREFIX) == 0
    assert spec.checkpoint_bytes() == 2 * (80 * 64 * 128 * 4 + (5120 + 256) * 4 * 2)


def test_shards_cut_rows_over_ranks_and_replicated_rows_stay_whole() -> None:
    spec = from_config(KIMI).for_ranks(4)
    assert spec.state("kv").row_bytes == 1152
    assert spec.state("ssm").row_bytes == 2 * 64 * 64 * 4


def test_ranks_that_share_a_group_of_a_mixer_all_keep_its_projections() -> None:
    sizes = {"num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4}
    spec = from_config({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 2, **sizes})
    assert spec.for_ranks(4).state("ssm").row_bytes == 20 * 64 * 128 * 4
    assert spec.for_ranks(4).state("conv").row_bytes == (20 * 64 + 256) * 4 * 2
    assert not spec.state("conv").replicated


def test_every_known_model_type_is_listed_once() -> None:
    names = known_model_types()
    assert len(set(names)) == len(names) and {"llama", "deepseek_v4", "mamba2", "qwen3_5_moe_text"} <= set(names)
