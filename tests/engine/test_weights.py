"""A checkpoint that does not fit its config is refused, and the tensor that does not fit is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.weights import HeldTensors, Weights
from stepwell.engine.models.registry import build_model


def weights_of(**tensors: torch.Tensor) -> Weights:
    return Weights(HeldTensors(tensors), dtype=torch.float32, device="cpu")


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match="no tensor 'missing'"):
        weights_of(other=torch.zeros(2)).take("missing")


def test_a_tensor_is_handed_out_once() -> None:
    weights = weights_of(one=torch.zeros(2))
    weights.take("one")
    assert not weights.has("one")
    with pytest.raises(ConfigError, match="'one', or it was used twice"):
        weights.take("one")


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    with pytest.raises(ConfigError, match=r"'one' has shape \[2, 3\], but its config says \[3, 2\]"):
        weights_of(one=torch.zeros(2, 3)).take("one", 3, 2)


def test_a_tensor_too_many_is_named() -> None:
    weights = weights_of(one=torch.zeros(2), extra=torch.zeros(1))
    weights.take("one")
    with pytest.raises(ConfigError, match=r"1 tensor\(s\).*extra"):
        weights.finish()


def test_what_is_skipped_is_not_too_many() -> None:
    weights = weights_of(vision_a=torch.zeros(1), text_a=torch.zeros(1))
    weights.skip("vision_")
    weights.take("text_a")
    weights.finish()


def test_tensors_come_in_the_type_asked_for() -> None:
    weights = Weights(
        HeldTensors({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.uint8)}), dtype=torch.bfloat16, device="cpu"
    )
    assert weights.take("a").dtype is torch.bfloat16
    assert weights.take("b", dtype=torch.uint8).dtype is torch.uint8


# ---- whole models ---------------------------------------------------------------------------------


def gemma3() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, sliding_window=8, sliding_window_pattern=2,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def gpt_oss() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


@pytest.mark.parametrize("family", [gemma3, gpt_oss])
def test_every_tensor_of_a_model_is_needed(family: Any) -> None:
    reference = family()
    tensors = dict(reference.state_dict())
    tied = {"lm_head.weight"} if reference.config.tie_word_embeddings else set()
    for name in tensors.keys() - tied:
        with pytest.raises(ConfigError, match=name.removeprefix("model.").replace(".", r"\.")):
            build_model(reference.config.to_dict(), HeldTensors({kept: tensors[kept] for kept in tensors if kept != name}))


@pytest.mark.parametrize("family", [gemma3, gpt_oss])
def test_a_model_does_not_ignore_a_tensor(family: Any) -> None:
    reference = family()
    name = "model.layers.2.input_layernorm.weight"
    with pytest.raises(ConfigError, match=name):
        build_model(reference.config.to_dict(), HeldTensors(dict(reference.state_dict()) | {name: torch.zeros(16)}))


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "layers.0.self_attn.sinks",
        "layers.1.mlp.experts.down_proj",
        "layers.1.mlp.experts.gate_up_proj_bias",
    ],
)
def test_a_tensor_of_another_size_is_refused_while_loading(name: str) -> None:
    reference = gpt_oss()
    tensors = dict(reference.state_dict())
    tensors[f"model.{name}"] = tensors[f"model.{name}"][..., 1:]
    with pytest.raises(ConfigError, match=rf"model\.{name}.*but its config says"):
        build_model(reference.config.to_dict(), HeldTensors(tensors))
