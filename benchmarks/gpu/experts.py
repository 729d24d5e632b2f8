"""Experts of three models on a GPU: microseconds of one layer, beside the time in which memory gives the visited weights once.

    cd benchmarks && python -m gpu.experts

`grouped` is what the engine would run, played from a CUDA graph; `tiles` and `torch's` are its two products, whichever it takes;
`reference` is the loop over experts, which waits for the device. Routings are random, eight of them in turn, so that weights do
not stay in the GPU's cache. A share of the limit above 1 means that they did.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import silu

from gpu.device_time import median_us, played_us
from stepwell.engine.models.gpt_oss import clamped_swiglu
from stepwell.engine.models.moe import gated
from stepwell.engine.ops.experts import Combine, ExpertWeights, Routing, run_experts
from stepwell.engine.ops.on_triton import experts as triton_experts

MEMORY_BYTES_PER_S = 4.0e12  # of an H200, as far as kernels reach
TOKENS = (1, 8, 64, 2048)
ROUTINGS, ROUNDS = 8, 10
NEVER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    count: int
    top: int
    channels: int
    inner: int
    biased: bool = False


SHAPES = (
    Shape(name="Qwen3-30B-A3B", count=128, top=8, channels=2048, inner=768),
    Shape(name="DeepSeek-V3, 64 of 256", count=64, top=8, channels=7168, inner=2048),
    Shape(name="gpt-oss-20b", count=32, top=4, channels=2880, inner=2880, biased=True),
)


def run(console: Console | None = None) -> None:
    """Prints the table."""
    table = Table(title=f"one layer of experts, bf16, {torch.cuda.get_device_name()}: microseconds")
    for name in ("model", "tokens", "limit", "grouped", "of limit", "TFLOP/s", "tiles", "torch's", "reference"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for shape in SHAPES:
        weights, combine = _weights(shape), clamped_swiglu(1.702, 7.0) if shape.biased else gated(silu)
        for tokens in TOKENS:
            table.add_row(*_row(shape, weights, combine, tokens))
        del weights
        torch.cuda.empty_cache()
    (console or Console(width=140)).print(table)


@torch.inference_mode()
def _row(shape: Shape, weights: ExpertWeights, combine: Combine, tokens: int) -> list[str]:
    x_NC = torch.randn(tokens, shape.channels, device="cuda", dtype=torch.bfloat16)
    routings = [_routing(shape, tokens) for _ in range(ROUTINGS)]
    expert_bytes = 3 * shape.channels * shape.inner * 2
    visited = statistics.mean(len(routing.expert_NK.unique()) for routing in routings)
    flops = 2 * tokens * shape.top * 3 * shape.channels * shape.inner

    def grouped() -> None:
        for routing in routings:
            triton_experts.run_experts_grouped(x_NC, routing, weights, combine)

    def reference() -> None:
        for routing in routings:
            run_experts(x_NC, routing, weights, combine)

    limit_us, took_us = visited * expert_bytes / MEMORY_BYTES_PER_S * 1e6, _played_us(grouped)
    products = [_played_us(grouped, many_rows=rows) for rows in (NEVER, 0)]
    numbers = [f"{each:,.1f}" for each in (*products, median_us(reference, rounds=ROUNDS, parts=ROUTINGS))]
    return [shape.name, f"{tokens:,}", f"{limit_us:,.1f}", f"{took_us:,.1f}", f"{limit_us / took_us:.2f}",
            f"{flops / took_us / 1e6:,.0f}", *numbers]  # fmt: skip


def _weights(shape: Shape) -> ExpertWeights:
    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16).mul_(sizes[-1] ** -0.5)

    return ExpertWeights(
        gate_up_EIC=some(shape.count, 2 * shape.inner, shape.channels),
        down_ECI=some(shape.count, shape.channels, shape.inner),
        gate_up_bias_EI=some(shape.count, 2 * shape.inner) if shape.biased else None,
        down_bias_EC=some(shape.count, shape.channels) if shape.biased else None,
    )


def _routing(shape: Shape, tokens: int) -> Routing:
    share_NK, expert_NK = torch.randn(tokens, shape.count, device="cuda").softmax(dim=-1).topk(shape.top, dim=-1)
    return Routing(expert_NK=expert_NK, share_NK=share_NK.to(torch.bfloat16))


def _played_us(compute: Callable[[], None], *, many_rows: int | None = None) -> float:
    """Of one routing, from a recording of all. `many_rows` in place of the bound between the two products."""
    before = triton_experts.MANY_ROWS
    triton_experts.MANY_ROWS = before if many_rows is None else many_rows
    try:
        return played_us(compute, rounds=ROUNDS, parts=ROUTINGS)
    finally:
        triton_experts.MANY_ROWS = before


if __name__ == "__main__":
    run()
