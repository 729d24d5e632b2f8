"""Blocks of experts: their routes, their weights, and the whole against that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.side_by_side import draw
from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.presets import preset
from stepwell.engine.loading.weights import HeldTensors, Weights
from stepwell.engine.models.layers import Parts
from stepwell.engine.models.moe import Experts, MixtureOfExperts, softmax_then_top

COUNT, CHANNELS, INNER = 6, 16, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def test_shares_of_the_most_likely_experts() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    plain, whole = softmax_then_top(2, sum_to_one=False)(logits), softmax_then_top(2, sum_to_one=True)(logits)
    assert plain.expert_NK.tolist() == whole.expert_NK.tolist() == [[1, 3]]
    assert torch.allclose(plain.share_NK, torch.tensor([[0.4, 0.3]]))
    assert torch.allclose(whole.share_NK, torch.tensor([[4 / 7, 3 / 7]]))


def reference_block(*, sum_to_one: bool) -> Any:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=CHANNELS, moe_intermediate_size=INNER, num_experts=COUNT, num_experts_per_tok=3, norm_topk_prob=sum_to_one
    )
    block = modeling.Qwen3MoeSparseMoeBlock(config)
    draw(block)
    return block


def as_on_disk(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of each expert apart, as Qwen's checkpoints hold them; transformers joins them while loading."""
    apart = {name: tensor for name, tensor in tensors.items() if not name.startswith("experts.")}
    for index in range(COUNT):
        gate, up = tensors["experts.gate_up_proj"][index].chunk(2)
        apart |= {f"experts.{index}.gate_proj.weight": gate, f"experts.{index}.up_proj.weight": up}
        apart[f"experts.{index}.down_proj.weight"] = tensors["experts.down_proj"][index]
    return apart


def parts_of(tensors: dict[str, torch.Tensor]) -> Parts:
    """A layer's tensors as those of `mlp`, with a config that says no more than it must."""
    held = HeldTensors({f"mlp.{name}": tensor for name, tensor in tensors.items()})
    config = Fields(values={"hidden_size": CHANNELS, "hidden_act": "silu"})
    return Parts(config=config, spec=preset("qwen3-8b"), weights=Weights(held, dtype=torch.float32, device="cpu"))


@pytest.mark.parametrize("sum_to_one", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_block_beside_qwen3_moe(sum_to_one: bool, apart: bool) -> None:
    reference = reference_block(sum_to_one=sum_to_one)
    tensors = dict(reference.state_dict())
    parts = parts_of(as_on_disk(tensors) if apart else tensors)
    block = MixtureOfExperts.load(parts, "mlp", COUNT, softmax_then_top(3, sum_to_one=sum_to_one))
    parts.weights.finish()
    x = random(30, CHANNELS, seed=7)
    with torch.no_grad():
        assert torch.allclose(block(x), reference(x[None])[0], atol=1e-6)


def test_a_wrong_number_of_experts_is_named() -> None:
    parts = parts_of(dict(reference_block(sum_to_one=True).state_dict()))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj. has shape \[6, .* says \[5, "):
        Experts.load(parts, "mlp.experts", 5)
