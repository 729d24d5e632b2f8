"""Checkpoints in eight bits with a scale for each block, on disk as DeepSeek and Kimi publish theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file

from engine.loading.tiny import expected, logits_of, reference
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.checkpoint import open_checkpoint
from stepwell.engine.loading.weights import Weights

LARGEST = 448.0
BLOCK = (48, 40)  # which cuts neither 64 nor 96 channels evenly
SHARDS = 3

Tensors = dict[str, torch.Tensor]


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix in eight bits, its scales, and what both stand for."""
    rows, columns = BLOCK
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    eight, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for down in range(scale.shape[0]):
        for across in range(scale.shape[1]):
            at = slice(down * rows, (down + 1) * rows), slice(across * columns, (across + 1) * columns)
            scale[down, across] = weight[at].abs().max() / LARGEST
            eight[at] = (weight[at] / scale[down, across]).to(torch.float8_e4m3fn)
            meant[at] = eight[at].float() * scale[down, across]
    return eight, scale, meant


@pytest.fixture(scope="module")
def model() -> Any:
    """Its weights are those that the quantised ones stand for."""
    made = reference("Llama", tie_word_embeddings=False)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            if is_quantized(name):
                tensor.copy_(quantized(tensor)[2])
    return made


@pytest.fixture
def tensors(model: Any) -> Tensors:
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        found[name] = tensor.clone()
        if is_quantized(name):
            found[name], found[f"{name}_scale_inv"], meant = quantized(tensor)
            assert meant.equal(tensor), "quantising twice changes nothing"
    return found


def is_quantized(name: str) -> bool:
    return "_proj.weight" in name


def write(path: Path, model: Any, tensors: Tensors, **quantization: object) -> Path:
    """Shards in which a tensor and its scale are seldom together."""
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **quantization}
    (path / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": settings}))
    places = {name: f"model-{number % SHARDS + 1:05}-of-{SHARDS:05}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def test_every_tensor_is_what_its_bits_stand_for(model: Any, tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path, model, tensors, weight_block_size=list(BLOCK))))
    weights = Weights(checkpoint.source, dtype=torch.float32, device="cpu", block=BLOCK)
    for name, tensor in model.state_dict().items():
        assert weights.take(name, *tensor.shape).equal(tensor), name
    weights.finish()


def test_such_a_model_gives_the_logits_of_what_it_stands_for(model: Any, tensors: Tensors, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path, model, tensors, weight_block_size=list(BLOCK))))
    assert (logits_of(checkpoint) - expected(model)).abs().max() <= 1e-4


def test_a_missing_scale_is_named(model: Any, tensors: Tensors, tmp_path: Path) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight_scale_inv"]
    path = write(tmp_path, model, tensors, weight_block_size=list(BLOCK))
    with pytest.raises(ConfigError, match=r"no 'model\.layers\.1\.mlp\.down_proj\.weight_scale_inv'"):
        logits_of(open_checkpoint(str(path)))


def test_a_block_size_that_the_scales_do_not_have_is_refused(model: Any, tensors: Tensors, tmp_path: Path) -> None:
    path = write(tmp_path, model, tensors, weight_block_size=[16, 16])
    with pytest.raises(ConfigError, match=r"q_proj\.weight' of shape \[64, 64\] .* scale of shape \[2, 2\].* 16 x 16"):
        logits_of(open_checkpoint(str(path)))


def test_what_transformers_quantizes_can_be_opened(model: Any, tmp_path: Path) -> None:
    """Through its own quantiser, for the names and the sense of its scales."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=(32, 16))

    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        found |= Fp8Quantize(Quantizer()).convert({name: tensor}) if is_quantized(name) else {name: tensor}
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in found
    checkpoint = open_checkpoint(str(write(tmp_path, model, found, weight_block_size=[32, 16])))
    assert (logits_of(checkpoint) - expected(model)).abs().mean() < 0.1 * expected(model).std()
