"""Experts over packed tokens: the reference against each visit on its own, and Triton's kernels against the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear, silu

from engine.some_experts import random, some_routing, some_weights
from stepwell.engine.models.gpt_oss import clamped_swiglu
from stepwell.engine.models.moe import gated
from stepwell.engine.ops.experts import Combine, ExpertWeights, Routing, RunExperts, run_experts

COUNT, CHANNELS, INNER = 6, 16, 8
BY_INTERPRETER = "Triton's interpreter is for machines without a GPU: tests/gpu/test_experts_on_cuda.py runs its kernels"


def one_by_one(x: torch.Tensor, routing: Routing, weights: ExpertWeights, combine: Combine) -> torch.Tensor:
    """Each visit on its own."""
    out = torch.zeros_like(x)
    no_bias = torch.zeros(())
    for n, (chosen, shares) in enumerate(zip(routing.expert_NK.tolist(), routing.share_NK, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            up_bias = no_bias if weights.gate_up_bias_EI is None else weights.gate_up_bias_EI[e]
            down_bias = no_bias if weights.down_bias_EC is None else weights.down_bias_EC[e]
            gate, up = (linear(x[n], weights.gate_up_EIC[e]) + up_bias).chunk(2)
            out[n] += share * (linear(combine(gate, up), weights.down_ECI[e]) + down_bias)
    return out


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_equal_a_plain_loop(tokens: int, biases: bool) -> None:
    given_ = random(tokens, CHANNELS, seed=4), some_routing(tokens, COUNT, 2), some_weights(COUNT, CHANNELS, INNER, biases=biases)
    assert torch.allclose(run_experts(*given_, gated(silu)), one_by_one(*given_, gated(silu)), atol=1e-6)


def test_experts_that_nobody_visits_are_skipped_at_both_ends() -> None:
    routing = Routing(expert_NK=torch.tensor([[3, 2]] * 5), share_NK=torch.full((5, 2), 0.5))
    given_ = random(5, CHANNELS, seed=4), routing, some_weights(COUNT, CHANNELS, INNER, biases=True)
    assert torch.allclose(run_experts(*given_, gated(silu)), one_by_one(*given_, gated(silu)), atol=1e-6)


# ---- kernels, in Triton's interpreter -------------------------------------------------------------


@pytest.fixture(scope="module")
def grouped() -> RunExperts:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(BY_INTERPRETER)
    from stepwell.engine.ops.on_triton.experts import run_experts_grouped

    return run_experts_grouped


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 12))
    among = draw(st.integers(1, count))  # experts that are visited at all
    return {
        "tokens": draw(st.integers(1, 70)),
        "count": count,
        "among": among,
        "top": draw(st.integers(1, min(8, among))),
        "channels": draw(st.sampled_from([8, 33, 64, 72])),
        "inner": draw(st.sampled_from([1, 24, 32, 50])),
        "biases": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=max(settings.default.max_examples // 3, 1))  # the interpreter is slow
@given(case=cases())
def test_kernels_equal_the_reference(grouped: RunExperts, case: dict[str, Any]) -> None:
    seed, count = case["seed"], case["count"]
    x_NC = random(case["tokens"], case["channels"], seed=seed, scale=1.0)
    routing = some_routing(case["tokens"], count, case["top"], among=case["among"], seed=seed)
    weights = some_weights(count, case["channels"], case["inner"], biases=case["biases"], seed=seed)
    combine = clamped_swiglu(1.702, 7.0) if case["biases"] else gated(silu)
    assert torch.allclose(grouped(x_NC, routing, weights, combine), run_experts(x_NC, routing, weights, combine), atol=1e-5)


@pytest.mark.parametrize(("tokens", "count", "top"), [(60, 8, 2), (90, 8, 4), (100, 3, 2), (300, 2, 2)])
def test_tiles_of_every_size_equal_the_reference(grouped: RunExperts, tokens: int, count: int, top: int) -> None:
    """Tiles have 16 to 128 rows, for as many visits as experts have on average: 15, 45, 67 and 300 here."""
    x_NC, weights = random(tokens, 40, scale=1.0), some_weights(count, 40, 24, biases=True)
    routing = some_routing(tokens, count, top)
    assert torch.allclose(
        grouped(x_NC, routing, weights, gated(silu)), run_experts(x_NC, routing, weights, gated(silu)), atol=1e-5
    )


def test_visits_of_several_blocks_are_sorted(grouped: RunExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.engine.ops.on_triton import experts as triton_experts

    monkeypatch.setattr(triton_experts, "_VISITS", 128)
    x_NC, weights, routing = random(150, 16, scale=1.0), some_weights(5, 16, 8, biases=False), some_routing(150, 5, 3)
    assert torch.allclose(
        grouped(x_NC, routing, weights, gated(silu)), run_experts(x_NC, routing, weights, gated(silu)), atol=1e-5
    )


def test_matrices_and_rows_may_be_views(grouped: RunExperts) -> None:
    whole = some_weights(4, 24, 10, biases=True)
    weights = ExpertWeights(
        gate_up_EIC=whole.gate_up_EIC.mT.contiguous().mT,
        down_ECI=whole.down_ECI.mT.contiguous().mT,
        gate_up_bias_EI=whole.gate_up_bias_EI,
        down_bias_EC=whole.down_bias_EC,
    )
    routing, wide = some_routing(9, 4, 2), random(9, 60, scale=1.0)
    expected = run_experts(wide[:, 7:31], routing, whole, gated(silu))
    assert torch.allclose(grouped(wide[:, 7:31], routing, weights, gated(silu)), expected, atol=1e-5)


def test_a_token_does_not_depend_on_where_its_neighbours_go(grouped: RunExperts) -> None:
    """Not a single bit."""
    x_NC, weights = random(20, 40, scale=1.0), some_weights(6, 40, 24, biases=False)
    here, there = some_routing(20, 6, 3, seed=1), some_routing(20, 6, 3, seed=2)
    for each in ("expert_NK", "share_NK"):
        getattr(there, each)[11] = getattr(here, each)[11]
    first, second = (grouped(x_NC, routing, weights, gated(silu)) for routing in (here, there))
    assert torch.equal(first[11], second[11]) and not torch.equal(first, second)
