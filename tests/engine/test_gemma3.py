"""Gemma 3 compared with transformers: both kinds of layers, both ways to write a config, three ways to name tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from engine.side_by_side import TOLERANCE, Pair, check_pair
from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.presets import preset
from stepwell.engine.loading.weights import HeldTensors, Weights
from stepwell.engine.models.layers import Parts
from stepwell.engine.models.registry import build_model

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")

# A root of 96 is no round number, the window (21) no multiple of the page (16), and the scale is not that of the head.
SMALL = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512, "sliding_window": 21, "query_pre_attn_scalar": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip

# transformers fills these in when a config leaves them out; those of the 4b model do.
LEFT_OUT = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar", "rope_parameters", "layer_types",
    "rms_norm_eps", "hidden_activation", "tie_word_embeddings", "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip


def gemma3(**more: object) -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL | more))


def rebuilt(pair: Pair, config: dict[str, object], tensors: dict[str, torch.Tensor] | None = None) -> Pair:
    """The same pair with our model read from another config, or from other names."""
    held = HeldTensors(dict(pair.reference.state_dict()) if tensors is None else tensors)
    pair.model = build_model(config, held, page_tokens=16)
    return pair


def check_one_shot(pair: Pair) -> None:
    tokens = pair.tokens(90)
    assert (pair.one_shot(tokens) - pair.expected(tokens)).abs().max() <= TOLERANCE


def test_gemma3_looks_at_windows_and_at_everything() -> None:
    check_pair(Pair(gemma3()))


def test_gemma3_with_a_window_of_whole_pages_and_biases() -> None:
    check_pair(Pair(gemma3(sliding_window=32, attention_bias=True)))


def test_gemma3_with_a_window_shorter_than_a_page() -> None:
    check_pair(Pair(gemma3(sliding_window=5)))


def test_gemma3_scales_the_rotation_of_full_layers_only() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    check_pair(Pair(gemma3(rope_parameters=rope)))


def test_gemma3_reads_rotations_in_the_older_way() -> None:
    older = {"rope_theta": 50000.0, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    pair = Pair(gemma3(**older))
    config = {name: value for name, value in pair.reference.config.to_dict().items() if name != "rope_parameters"}
    check_one_shot(rebuilt(pair, config | older))


def test_gemma3_refuses_one_rotation_for_both_kinds() -> None:
    """transformers takes such a config, ignores what it says, and rotates with its defaults."""
    flat = {"rope_type": "default", "rope_theta": 123.0}
    config = transformers.Gemma3TextConfig(**SMALL, rope_parameters=dict(flat))
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    with pytest.raises(ConfigError, match="rope_parameters"):
        build_model(config.to_dict() | {"rope_parameters": flat}, HeldTensors(gemma3().state_dict()))


def test_gemma3_finds_layers_by_pattern_and_fills_in_what_configs_leave_out() -> None:
    shape = {
        name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    }
    pair = Pair(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape, sliding_window_pattern=3)))
    config = {name: value for name, value in pair.reference.config.to_dict().items() if name not in LEFT_OUT}
    rebuilt(pair, config | {"sliding_window_pattern": 3})
    assert [(state.name, state.layers) for state in pair.spec.states] == [("kv", 1), ("swa", 4)]
    check_one_shot(pair)


def test_gemma3_caps_logits() -> None:
    check_pair(Pair(gemma3(final_logit_softcapping=1.5)))


def test_gemma3_caps_scores_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has this field, and an eager function that could cap, but never hands the one to the other."""
    pair = Pair(gemma3(attn_logit_softcapping=0.7, attn_implementation="eager"))
    tokens = pair.tokens(90)
    ignored = pair.expected(tokens)
    monkeypatch.setattr(modeling, "eager_attention_forward", partial(modeling.eager_attention_forward, softcap=0.7))
    assert (pair.expected(tokens) - ignored).abs().max() > 100 * TOLERANCE
    check_pair(pair)


def test_gemma3_with_an_output_matrix_of_its_own() -> None:
    check_one_shot(Pair(gemma3(tie_word_embeddings=False)))


# ---- multimodal checkpoints -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def multimodal() -> Pair:
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "vision_use_head": False, "model_type": "siglip_vision_model",
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=dict(SMALL), vision_config=vision, mm_tokens_per_image=4, image_token_index=127, boi_token_index=126,
        eoi_token_index=125,
    )  # fmt: skip
    return Pair(transformers.Gemma3ForConditionalGeneration(config))


def text_tokens(pair: Pair) -> list[int]:
    return [token % 125 for token in pair.tokens(90)]  # the others stand for images


def test_gemma3_takes_the_text_model_of_a_multimodal_checkpoint(multimodal: Pair) -> None:
    names = multimodal.reference.state_dict()
    assert any(name.startswith("model.vision_tower.") for name in names) and "model.language_model.norm.weight" in names
    tokens = text_tokens(multimodal)
    assert (multimodal.in_chunks(tokens, [40, 1]) - multimodal.expected(tokens)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("with_head", [False, True])
def test_gemma3_knows_the_older_names_of_a_multimodal_checkpoint(multimodal: Pair, with_head: bool) -> None:
    older = {
        name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision").replace(
            "model.multi_modal_projector", "multi_modal_projector"
        ).replace("lm_head", "language_model.lm_head"): tensor
        for name, tensor in multimodal.reference.state_dict().items()
        if with_head or name != "lm_head.weight"
    }  # fmt: skip
    assert "language_model.model.norm.weight" in older and not any(name.startswith("model.") for name in older)
    model = build_model(multimodal.reference.config.to_dict(), HeldTensors(older), page_tokens=16)
    assert torch.equal(model.layers[0].attention.qkv.weight, multimodal.model.layers[0].attention.qkv.weight)
    assert torch.equal(model.head, multimodal.model.head)


def test_gemma3_names_what_is_missing_when_no_text_model_is_there() -> None:
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight"):
        build_model(transformers.Gemma3TextConfig(**SMALL).to_dict(), HeldTensors({}))


def test_gemma3_refuses_attention_in_both_directions() -> None:
    config = transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True).to_dict()
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        build_model(config, HeldTensors({}))


# ---- bf16 rounds where the reference rounds ---------------------------------------------------------


def test_gemma3_rounds_its_embedding_scale() -> None:
    reference = gemma3()
    assert build_model(reference.config.to_dict(), HeldTensors(reference.state_dict()), dtype="bf16").embed_scale == 9.8125
    assert build_model(reference.config.to_dict(), HeldTensors(reference.state_dict())).embed_scale == pytest.approx(96**0.5)


def test_norms_around_one_give_the_bits_of_the_reference_in_bf16() -> None:
    reference = modeling.Gemma3RMSNorm(96).bfloat16()
    with torch.no_grad():
        reference.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    weights = Weights(HeldTensors({"norm.weight": reference.weight.detach()}), dtype=torch.bfloat16, device="cpu")
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    parts = Parts(config=Fields(values={}), spec=preset("gemma-3-27b"), weights=weights, eps=1e-6, around_one=True)
    assert torch.equal(parts.norm("norm", 96)(x), reference(x))
