"""gpt-oss compared with transformers, and its experts read from MXFP4.

The reference must run eagerly: its sinks exist in no other implementation that runs without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.side_by_side import TOLERANCE, Pair, check_pair
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.gpt_oss import clamped_swiglu, unpack_mxfp4
from stepwell.engine.models.registry import build_model

transformers = pytest.importorskip("transformers")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512, "sliding_window": 21, "num_local_experts": 8,
    "num_experts_per_tok": 3, "rope_parameters": YARN,
}  # fmt: skip


def gpt_oss(**more: object) -> Any:
    config = transformers.GptOssConfig(**SMALL | more, attn_implementation="eager")
    return transformers.GptOssForCausalLM(config)


def check_one_shot(pair: Pair) -> None:
    tokens = pair.tokens(90)
    assert (pair.one_shot(tokens) - pair.expected(tokens)).abs().max() <= TOLERANCE


def test_gpt_oss() -> None:
    check_pair(Pair(gpt_oss()))


def test_gpt_oss_with_a_window_of_whole_pages_and_one_full_layer_first() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    check_pair(Pair(gpt_oss(sliding_window=32, layer_types=kinds)))


def test_gpt_oss_clamps_gates_and_ups() -> None:
    pair = Pair(gpt_oss(swiglu_limit=0.4, swiglu_alpha=1.3))
    tokens = pair.tokens(90)
    clamped = pair.one_shot(tokens)
    check_pair(pair)
    config = pair.reference.config.to_dict() | {"swiglu_limit": 7.0}
    pair.model = build_model(config, HeldTensors(dict(pair.reference.state_dict())), page_tokens=16)
    assert (pair.one_shot(tokens) - clamped).abs().max() > 100 * TOLERANCE, "a limit that is never reached proves nothing"


def test_swiglu_clamps_gates_from_above_only() -> None:
    gate, up = torch.tensor([-9.0, 9.0, 1.0]), torch.tensor([1.0, -9.0, 9.0])
    expected = torch.stack(
        [-9 * torch.tensor(-18.0).sigmoid() * 2, 3 * torch.tensor(6.0).sigmoid() * -2, torch.tensor(2.0).sigmoid() * 4]
    )
    assert torch.allclose(clamped_swiglu(2.0, 3.0)(gate, up), expected)


def test_gpt_oss_sinks_take_weight() -> None:
    pair = Pair(gpt_oss())
    tokens = pair.tokens(90)
    before = pair.expected(tokens)
    tensors = {name: tensor - 50.0 if name.endswith("sinks") else tensor for name, tensor in pair.reference.state_dict().items()}
    pair.model = build_model(pair.reference.config.to_dict(), HeldTensors(tensors), page_tokens=16)
    assert (pair.one_shot(tokens) - before).abs().max() > 100 * TOLERANCE


def test_gpt_oss_reads_its_rotation_in_the_older_way() -> None:
    pair = Pair(gpt_oss())
    config = pair.reference.config.to_dict()
    scaling = {name: value for name, value in config.pop("rope_parameters").items() if name != "rope_theta"}
    older = config | {"rope_theta": YARN["rope_theta"], "rope_scaling": scaling}
    pair.model = build_model(older, HeldTensors(dict(pair.reference.state_dict())), page_tokens=16)
    check_one_shot(pair)


def test_gpt_oss_rotates_with_yarn_when_its_config_says_nothing() -> None:
    """A surprise of the reference: no rope fields do not mean a plain rotation."""
    pair = Pair(gpt_oss(rope_parameters=None))
    assert pair.reference.config.rope_parameters["rope_type"] == "yarn"
    config = pair.reference.config.to_dict()
    del config["rope_parameters"]
    pair.model = build_model(config, HeldTensors(dict(pair.reference.state_dict())), page_tokens=16)
    check_one_shot(pair)


# ---- MXFP4 ----------------------------------------------------------------------------------------


def pack(numbers_EIC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales as checkpoints hold them, and the numbers they stand for: each group of 32 scaled to 6 at most."""
    values = torch.tensor(mxfp4.FP4_VALUES)
    groups = numbers_EIC.unflatten(-1, (-1, 32))
    power = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6))
    code = (groups / 2**power)[..., None].sub(values).abs().argmin(-1)
    blocks = code[..., ::2] + 16 * code[..., 1::2]
    return blocks.to(torch.uint8), (power[..., 0] + 127).to(torch.uint8), (values[code] * 2**power).flatten(-2)


def packed_checkpoint(reference: Any) -> dict[str, torch.Tensor]:
    """The reference's tensors with experts packed; the reference itself is given the numbers that they unpack to."""
    tensors = {}
    for name, tensor in reference.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], numbers = pack(tensor.mT)
            tensor.copy_(numbers.mT)
        else:
            tensors[name] = tensor
    return tensors


def test_mxfp4_known_bytes() -> None:
    halves = torch.arange(16, dtype=torch.uint8)  # low half of byte i is i, high half 15 - i
    blocks = (halves + 16 * (15 - halves)).view(1, 1, 1, 16).repeat(1, 2, 1, 1)
    scales = torch.tensor([[[127], [130]]], dtype=torch.uint8)
    unpacked = unpack_mxfp4(blocks, scales, torch.float32)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    expected = [half for low, high in zip(values, reversed(values), strict=True) for half in (low, high)]
    assert unpacked[0].tolist() == [expected, [8 * value for value in expected]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_unpacks_as_the_reference_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 6, 2), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(unpack_mxfp4(blocks, scales, dtype), theirs.mT)


def test_gpt_oss_from_an_mxfp4_checkpoint() -> None:
    pair = Pair(gpt_oss())
    tensors = packed_checkpoint(pair.reference)
    pair.model = build_model(pair.reference.config.to_dict(), HeldTensors(tensors), page_tokens=16)
    assert torch.equal(pair.model.layers[0].mlp.experts.weights.down_ECI, pair.reference.model.layers[0].mlp.experts.down_proj.mT)
    check_one_shot(pair)


def test_mxfp4_tensors_of_a_wrong_shape_are_named() -> None:
    reference = gpt_oss()
    tensors = packed_checkpoint(reference)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    with pytest.raises(ConfigError, match=name):
        build_model(reference.config.to_dict(), HeldTensors(tensors | {name: tensors[name][..., :0]}))
    del tensors[name]
    with pytest.raises(ConfigError, match=name):
        build_model(reference.config.to_dict(), HeldTensors(tensors))


def test_mxfp4_rows_must_be_whole_groups() -> None:
    reference = gpt_oss(intermediate_size=40)
    blocks = {"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(0, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match=r"down_proj_blocks.*multiples of 32"):
        build_model(reference.config.to_dict(), HeldTensors(dict(reference.state_dict()) | blocks))
