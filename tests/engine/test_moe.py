"""Blocks of experts: against a plain loop, and against those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from engine.side_by_side import draw
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.weights import HeldTensors, Weights
from stepwell.engine.models.layers import Linear
from stepwell.engine.models.moe import Experts, MixtureOfExperts, Routing, gated, softmax_then_top

COUNT, CHANNELS, INNER = 6, 16, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def some_experts(*, biases: bool) -> Experts:
    return Experts(
        gate_up_EIC=random(COUNT, 2 * INNER, CHANNELS),
        down_ECI=random(COUNT, CHANNELS, INNER, seed=1),
        combine=gated(silu),
        gate_up_bias_EI=random(COUNT, 2 * INNER, seed=2) if biases else None,
        down_bias_EC=random(COUNT, CHANNELS, seed=3) if biases else None,
    )


def one_by_one(experts: Experts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Each visit on its own."""
    out = torch.zeros_like(x)
    no_bias = torch.zeros(())
    for n, (chosen, shares) in enumerate(zip(routing.expert_NK.tolist(), routing.share_NK, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            up_bias = no_bias if experts.gate_up_bias_EI is None else experts.gate_up_bias_EI[e]
            down_bias = no_bias if experts.down_bias_EC is None else experts.down_bias_EC[e]
            gate, up = (linear(x[n], experts.gate_up_EIC[e]) + up_bias).chunk(2)
            out[n] += share * (linear(experts.combine(gate, up), experts.down_ECI[e]) + down_bias)
    return out


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_equal_a_plain_loop(tokens: int, biases: bool) -> None:
    experts, x = some_experts(biases=biases), random(tokens, CHANNELS, seed=4)
    routing = softmax_then_top(2, sum_to_one=True)(random(tokens, COUNT, seed=5))
    assert torch.allclose(experts(x, routing), one_by_one(experts, x, routing), atol=1e-6)


def test_experts_that_nobody_visits_are_skipped_at_both_ends() -> None:
    experts, x = some_experts(biases=True), random(5, CHANNELS, seed=4)
    routing = Routing(expert_NK=torch.tensor([[3, 2]] * 5), share_NK=torch.full((5, 2), 0.5))
    assert torch.allclose(experts(x, routing), one_by_one(experts, x, routing), atol=1e-6)


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


@pytest.mark.parametrize("sum_to_one", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_block_beside_qwen3_moe(sum_to_one: bool, apart: bool) -> None:
    reference = reference_block(sum_to_one=sum_to_one)
    tensors = dict(reference.state_dict())
    weights = Weights(HeldTensors(as_on_disk(tensors) if apart else tensors), dtype=torch.float32, device="cpu")
    block = MixtureOfExperts(
        router=Linear.load(weights, {"gate": COUNT}, CHANNELS),
        route=softmax_then_top(3, sum_to_one=sum_to_one),
        experts=Experts.load(weights, "experts", count=COUNT, hidden=CHANNELS, inner=None, combine=gated(silu)),
    )
    weights.finish()
    x = random(30, CHANNELS, seed=7)
    with torch.no_grad():
        assert torch.allclose(block(x), reference(x[None])[0], atol=1e-6)


def test_a_wrong_number_of_experts_is_named() -> None:
    weights = Weights(HeldTensors(dict(reference_block(sum_to_one=True).state_dict())), dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj. has shape \[6, .* says \[5, "):
        Experts.load(weights, "experts", count=5, hidden=CHANNELS, inner=None, combine=gated(silu))
