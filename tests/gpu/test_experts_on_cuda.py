"""Experts on a GPU, in sixteen bits: near the reference in fp32, never waiting for the device, and the same from a CUDA graph.

Near: the difference is less than 1 % of the result, as lengths of all rows together. Rounding to bf16 alone (inner channels, each
expert's result, and the sum) makes about 0.4 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn.functional import silu  # noqa: E402

from engine.some_experts import random, some_routing, some_weights  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine.models.deepseek_v4 import _SCORES, Expert, TokenExperts  # noqa: E402
from stepwell.engine.models.gpt_oss import clamped_swiglu, top_then_softmax  # noqa: E402
from stepwell.engine.models.layers import Linear  # noqa: E402
from stepwell.engine.models.moe import Experts, MixtureOfExperts, gated, sigmoid_in_groups, softmax_then_top  # noqa: E402
from stepwell.engine.ops.experts import ExpertWeights, Routing, run_experts  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # it says that it is a prototype
]
NEAR = 0.01
SILU = gated(silu)


@pytest.fixture
def grouped() -> Any:
    from stepwell.engine.ops.on_triton.experts import run_experts_grouped

    return run_experts_grouped


def on_cuda(held: Any, dtype: torch.dtype) -> Any:
    """Weights or a routing, with all but whole numbers in another type."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to("cuda", dtype if tensor.is_floating_point() else None)

    return replace(held, **{each.name: moved(getattr(held, each.name)) for each in fields(held)})


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def in_fp32(x_NC: torch.Tensor, routing: Routing, weights: ExpertWeights, combine: Any) -> torch.Tensor:
    """The reference, from the same sixteen-bit numbers."""
    return run_experts(x_NC.float(), on_cuda(routing, torch.float32), on_cuda(weights, torch.float32), combine)


@contextmanager
def without_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dtype", "count", "top", "channels", "inner"),
    [
        (torch.bfloat16, 16, 4, 256, 192),
        (torch.bfloat16, 128, 8, 512, 96),
        (torch.bfloat16, 5, 5, 200, 72),
        (torch.bfloat16, 3, 1, 37, 21),
        (torch.float16, 16, 4, 256, 192),
        (torch.float32, 16, 4, 256, 192),
    ],
)
@pytest.mark.parametrize("tokens", [1, 50, 1500])
def test_near_the_reference(
    grouped: Any, tokens: int, dtype: torch.dtype, count: int, top: int, channels: int, inner: int
) -> None:  # fmt: skip
    biases = count == 16
    combine = clamped_swiglu(1.702, 7.0) if biases else SILU
    weights = on_cuda(some_weights(count, channels, inner, biases=biases), dtype)
    x_NC = random(tokens, channels, scale=1.0).to("cuda", dtype)
    for among in (count, max(top, count // 2)):  # all experts, and half of them
        routing = on_cuda(some_routing(tokens, count, top, among=among, seed=among), dtype)
        got = grouped(x_NC, routing, weights, combine)
        assert got.dtype == dtype and got.shape == x_NC.shape
        assert distance(got, in_fp32(x_NC, routing, weights, combine)) < (1e-5 if dtype == torch.float32 else NEAR)


@pytest.mark.parametrize("tokens", [2, 500])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"])
def test_matrices_of_real_models(grouped: Any, name: str, tokens: int) -> None:
    shapes = {"qwen3-30b-a3b": (32, 8, 2048, 768), "deepseek-v3": (10, 8, 7168, 2048), "gpt-oss-20b": (8, 4, 2880, 2880)}
    count, top, channels, inner = shapes[name]
    weights = on_cuda(some_weights(count, channels, inner, biases=name == "gpt-oss-20b", device="cuda"), torch.bfloat16)
    x_NC = random(tokens, channels, scale=1.0).to("cuda", torch.bfloat16)
    routing = on_cuda(some_routing(tokens, count, top), torch.float32)  # shares may be in fp32
    got = grouped(x_NC, routing, weights, SILU)
    assert got.dtype == torch.bfloat16 and distance(got, in_fp32(x_NC, routing, weights, SILU)) < NEAR


@pytest.mark.parametrize("rows", [0, 1_000_000], ids=["torch's grouped product", "tiles"])
@pytest.mark.parametrize("tokens", [1, 40, 2000])
def test_both_products_are_near_the_reference(grouped: Any, monkeypatch: Any, tokens: int, rows: int) -> None:
    """Each of the products, whichever this number of rows would get. Half of the experts have no rows."""
    from stepwell.engine.ops.on_triton import experts as triton_experts

    monkeypatch.setattr(triton_experts, "MANY_ROWS", rows)
    weights = on_cuda(some_weights(16, 256, 192, biases=True), torch.bfloat16)
    x_NC, routing = random(tokens, 256, scale=1.0).to("cuda", torch.bfloat16), some_routing(tokens, 16, 4, among=8)
    routing = on_cuda(routing, torch.bfloat16)
    with without_waiting():
        got = grouped(x_NC, routing, weights, SILU)
    assert distance(got, in_fp32(x_NC, routing, weights, SILU)) < NEAR


def test_a_token_does_not_depend_on_where_its_neighbours_go(grouped: Any) -> None:
    """Not a single bit."""
    weights = on_cuda(some_weights(16, 256, 192, biases=False), torch.bfloat16)
    x_NC = random(24, 256, scale=1.0).to("cuda", torch.bfloat16)
    here, there = (on_cuda(some_routing(24, 16, 4, seed=seed), torch.bfloat16) for seed in (1, 2))
    for each in ("expert_NK", "share_NK"):
        getattr(there, each)[11] = getattr(here, each)[11]
    first, again, other = (grouped(x_NC, routing, weights, SILU) for routing in (here, here, there))
    assert torch.equal(first, again)
    assert torch.equal(first[11], other[11]) and not torch.equal(first, other)


def recorded(compute: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph, out


@pytest.mark.parametrize("tokens", [1, 8, 64, 700])
def test_a_recording_plays_any_routing(grouped: Any, tokens: int) -> None:
    weights = on_cuda(some_weights(16, 256, 192, biases=True), torch.bfloat16)
    x_NC = random(tokens, 256, scale=1.0).to("cuda", torch.bfloat16)
    routing = on_cuda(some_routing(tokens, 16, 4), torch.bfloat16)
    graph, out_NC = recorded(lambda: grouped(x_NC, routing, weights, SILU))
    for seed, among in ((1, 16), (2, 4), (3, 9)):  # spread, and as narrow as can be: other numbers of tiles
        other = on_cuda(some_routing(tokens, 16, 4, among=among, seed=seed), torch.bfloat16)
        routing.expert_NK.copy_(other.expert_NK)
        routing.share_NK.copy_(other.share_NK)
        x_NC.copy_(random(tokens, 256, seed=seed, scale=1.0))
        graph.replay()
        assert torch.equal(out_NC, grouped(x_NC, other, weights, SILU))


COUNT, TOP, CHANNELS, INNER = 16, 4, 256, 64


def blocks(grouped: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A block for each way of choosing experts."""
    bias_E = random(COUNT, scale=0.1).cuda()
    routes = {
        "softmax, then top": softmax_then_top(TOP, sum_to_one=True),
        "top, then softmax": top_then_softmax(TOP),
        "sigmoid in groups": sigmoid_in_groups(TOP, bias_E=bias_E, groups=4, top_groups=2, sum_to_one=True, scale=2.5),
    }
    weights = on_cuda(some_weights(COUNT, CHANNELS, INNER, biases=False), torch.bfloat16)
    experts = Experts(weights=weights, combine=SILU, run=grouped)
    router, table_VK = (
        random(COUNT, CHANNELS, scale=1.0).to("cuda", torch.bfloat16),
        some_routing(99, COUNT, TOP).expert_NK.cuda(),
    )
    shared = Expert(gate_up=Linear(weights.gate_up_EIC[0]), down=Linear(weights.down_ECI[0]), combine=SILU)
    tokens_N = torch.arange(7, device="cuda")
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        name: MixtureOfExperts(router=Linear(router.float() if "sigmoid" in name else router), route=route, experts=experts)
        for name, route in routes.items()
    }
    for name, table in (("by token", table_VK), ("by score", None)):
        chosen = TokenExperts(
            router=Linear(router), score=_SCORES["sqrtsoftplus"], count=TOP, scale=1.5, table_VK=table,
            bias_E=None if table is not None else bias_E, experts=experts, shared=shared,
        )  # fmt: skip
        made[name] = lambda x_NC, chosen=chosen: chosen(x_NC, tokens_N)  # type: ignore[misc]
    return made


@pytest.mark.parametrize("name", ["softmax, then top", "top, then softmax", "sigmoid in groups", "by token", "by score"])
def test_no_route_waits_for_the_device(grouped: Any, name: str) -> None:
    block, other = blocks(grouped)[name], blocks(run_experts)[name]
    x_NC = random(7, CHANNELS, scale=1.0).to("cuda", torch.bfloat16)
    block(x_NC)  # compiles
    with without_waiting():
        block(x_NC)
    graph, out_NC = recorded(lambda: block(x_NC))
    x_NC.copy_(random(7, CHANNELS, seed=5, scale=1.0))
    graph.replay()
    assert torch.equal(out_NC, block(x_NC)) and distance(out_NC, other(x_NC)) < 2 * NEAR
