"""A checkpoint that does not fit its config is refused, and the tensor that does not fit is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.engine.loading.eight_bits import block_in
from stepwell.engine.loading.safetensors_files import SafetensorsFiles
from stepwell.engine.loading.weights import HeldTensors, Weights
from stepwell.engine.models.registry import build_model
from stepwell.engine.ranks import Ranks


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


# ---- eight bits and their scales ------------------------------------------------------------------

EIGHT = torch.float8_e4m3fn


def eight(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(EIGHT)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5


def scaled_by_hand(tensor: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Number by number, as the format says."""
    expected = torch.empty(tensor.shape)
    for row in range(tensor.shape[0]):
        for column in range(tensor.shape[1]):
            expected[row, column] = tensor[row, column].float() * scale[row // rows, column // columns].float()
    return expected


def taken(
    tensor: torch.Tensor, scale: torch.Tensor, *, block: tuple[int, int] | None = None, name: str = "a.weight",
    scale_name: str = "a.weight_scale_inv", dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    weights = Weights(HeldTensors({name: tensor, scale_name: scale}), dtype=dtype, device="cpu", block=block)
    made = weights.take(name, *tensor.shape)
    weights.finish()  # the scale counts as used
    return made


@pytest.mark.parametrize("scale_name", ["a.weight_scale_inv", "a.weight_scale", "a.scale"])
def test_eight_bits_are_multiplied_by_their_scales(scale_name: str) -> None:
    tensor, scale = eight(6, 8), scales(3, 2)
    assert taken(tensor, scale, block=(2, 4), scale_name=scale_name).equal(scaled_by_hand(tensor, scale, 2, 4))


@pytest.mark.parametrize("block", [(128, 128), None])
def test_blocks_at_the_edges_are_cut_short(block: tuple[int, int] | None) -> None:
    tensor, scale = eight(130, 257), scales(2, 3)
    assert taken(tensor, scale, block=block).equal(scaled_by_hand(tensor, scale, 128, 128))


def test_shapes_say_the_block_size_when_the_config_does_not() -> None:
    tensor = eight(6, 64)
    assert taken(tensor, scale := scales(3, 2)).equal(scaled_by_hand(tensor, scale, 2, 32))
    assert taken(tensor, scale := scales(6, 1)).equal(scaled_by_hand(tensor, scale, 1, 64))  # one scale for each row


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_can_be_for_the_whole_tensor(shape: tuple[int, ...]) -> None:
    tensor = eight(6, 8)
    assert taken(tensor, torch.full(shape, 0.25), block=(2, 4)).equal(tensor.float() * 0.25)


def test_scales_may_be_powers_of_two_in_a_byte() -> None:
    tensor, powers = eight(4, 4), torch.tensor([[-3.0, 0.0], [5.0, -20.0]])
    expected = scaled_by_hand(tensor, powers.exp2(), 2, 2)
    assert taken(tensor, (powers + 127).to(torch.uint8)).equal(expected)
    if "float8_e8m0fnu" in vars(torch):  # since torch 2.7
        assert taken(tensor, powers.exp2().to(torch.float8_e8m0fnu)).equal(expected)


def test_experts_in_one_tensor_have_their_scales_in_one() -> None:
    tensor, scale = eight(3, 5, 6), scales(3, 3, 2)
    made = taken(tensor, scale, block=(2, 4), name="experts.gate_up_proj", scale_name="experts.gate_up_proj_scale_inv")
    assert made.equal(torch.stack([scaled_by_hand(tensor[each], scale[each], 2, 4) for each in range(3)]))


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_takes_its_share_of_an_axis_and_of_each_of_its_pieces(rank: int) -> None:
    ranks, tensor = Ranks(rank=rank, size=3), torch.arange(14 * 6.0).view(14, 6)
    weights = Weights(HeldTensors({"a": tensor, "b": tensor, "c": tensor}), dtype=torch.float32, device="cpu", ranks=ranks)
    two, three = ranks.share(6, "rows") * 1, ranks.share(3, "columns") * 2
    assert weights.take("a", 14, three).equal(tensor[:, 2 * rank : 2 * rank + 2])
    pieces = [tensor[2 * rank : 2 * rank + 2], tensor[6:8], tensor[8 + 2 * rank : 10 + 2 * rank]]
    assert weights.take("b", (two, 2, two), 6).equal(torch.cat(pieces))
    assert weights.shared(None, "rows", of="c", axis=1) == 2
    with pytest.raises(ConfigError, match=r"'c' has shape \[14, 6\], but its config says \[6, 6\]"):
        weights.take("c", two, 6)


@pytest.mark.parametrize("shape", [(2, 3), (1, 1)])
def test_a_share_of_eight_bits_has_the_scales_of_its_place(shape: tuple[int, int]) -> None:
    tensor, scale = eight(10, 9), scales(*shape)
    whole = taken(tensor, scale, block=None if shape == (1, 1) else (8, 4))
    for rank in range(2):
        ranks = Ranks(rank=rank, size=2)
        source = HeldTensors({"a.weight": tensor, "a.weight_scale_inv": scale})
        weights = Weights(source, dtype=torch.float32, device="cpu", block=None if shape == (1, 1) else (8, 4), ranks=ranks)
        made = weights.take("a.weight", (ranks.share(4, "rows"), 2, ranks.share(4, "rows")), 9)
        weights.finish()
        rows = [*range(2 * rank, 2 * rank + 2), 4, 5, *range(6 + 2 * rank, 8 + 2 * rank)]
        assert made.equal(whole[rows])


def test_a_region_of_a_file_is_that_of_the_tensor(tmp_path: Path) -> None:
    tensors = {"plain": torch.randn(6, 4), "eight": eight(6, 4), "bytes": torch.arange(24, dtype=torch.uint8).view(2, 3, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsFiles([tmp_path / "model.safetensors"])
    for name, tensor in tensors.items():
        region = (slice(None), slice(1, 3)) if tensor.ndim == 2 else (slice(None), slice(1, 3), slice(None))
        assert source.shape(name) == tuple(tensor.shape)
        assert source.read(name, region).view(torch.uint8).equal(tensor[region].contiguous().view(torch.uint8))


def test_the_product_is_rounded_once() -> None:
    tensor, scale = eight(4, 4), scales(2, 2)
    assert taken(tensor, scale, dtype=torch.bfloat16).equal(scaled_by_hand(tensor, scale, 2, 2).bfloat16())


def test_eight_bits_without_a_scale_are_refused() -> None:
    with pytest.raises(ConfigError, match="'one' is in eight bits, and the checkpoint has no 'one_scale_inv'"):
        weights_of(one=eight(2, 2)).take("one")


@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 2), (2,), (0, 2), (6, 8)])
def test_a_scale_of_another_size_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'a\.weight' of shape \[6, 8\] has a scale of shape .* blocks of 2 x 4"):
        taken(eight(6, 8), scales(*shape), block=(2, 4))


@pytest.mark.parametrize("shape", [(4, 3), (7, 8), (0, 0), (2, 6, 8)])
def test_a_scale_that_makes_no_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'a\.weight' of shape \[6, 8\] has a scale of shape .* blocks of one size"):
        taken(eight(6, 8), scales(*shape))


def test_a_scale_beside_a_tensor_that_needs_none_is_left_over() -> None:
    with pytest.raises(ConfigError, match=r"a\.weight_scale_inv"):
        taken(torch.zeros(2, 2), scales(1, 1))


def test_four_bits_packed_in_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\.weight' is packed as torch\.int8"):
        taken(torch.zeros(4, 4, dtype=torch.int8), scales(4, 1))


@pytest.mark.parametrize("size", [128, [128], [128, 0], [128, 128.0], "128", [True, 128]])
def test_a_block_size_that_is_none_is_refused_by_name(size: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config\.weight_block_size must be two sizes"):
        block_in(Fields(values={}), Fields(values={"quantization_config": {"weight_block_size": size}}))


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
