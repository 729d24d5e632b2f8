"""A config and tensors of two models: refused when they are loaded, by name, whichever tensor it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from engine.families import FAMILIES, checkpoint
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.registry import build_model


def tensors_of(family: str) -> dict[str, torch.Tensor]:
    source = checkpoint(family).source
    return {name: source.read(name) for name in source.names()}


def one_of_each(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, int]]:
    """Every axis of the first tensor of each name, whatever numbers stand in it."""
    for name in {re.sub(r"\d+", "#", name): name for name in reversed(tensors)}.values():
        yield from ((name, axis) for axis in range(tensors[name].ndim))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_another_size_is_refused_by_name(family: str) -> None:
    config, tensors = checkpoint(family).config, tensors_of(family)
    for name, axis in one_of_each(tensors):
        shape = [size + (number == axis) for number, size in enumerate(tensors[name].shape)]
        with pytest.raises(ConfigError, match=re.escape(repr(name))) as caught:
            build_model(config, HeldTensors({**tensors, name: tensors[name].new_zeros(shape)}), page_tokens=16)
        assert str(shape) in str(caught.value) and str(list(tensors[name].shape)) in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("field", ["intermediate_size", "vocab_size", "num_key_value_heads"])
def test_the_field_that_says_otherwise_is_named(family: str, field: str) -> None:
    config, tensors = checkpoint(family).config, tensors_of(family)
    if family == "deepseek_v3" and field == "num_key_value_heads":
        field = "kv_lora_rank"
    value = config[field]
    assert isinstance(value, int)
    expected = "tensor .* has shape" if field in ("num_key_value_heads", "kv_lora_rank") else rf"has shape .*see .*{field}"
    with pytest.raises(ConfigError, match=expected):
        build_model({**config, field: value + 8}, HeldTensors(tensors), page_tokens=16)
