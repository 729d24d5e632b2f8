"""Passes while pages are copied both ways, beside the same passes alone, in turns; and the copies themselves.

Plain copies of torch say how much of it is the hardware's: they take memory bandwidth from a pass as well.
"""

from __future__ import annotations

import statistics
from typing import Any

import bench_copies
from gpu.bench import Bench
from gpu.report import Goal, Row
from gpu.requests import Steady, prefill_s, warm_up
from gpu.shapes import QWEN
from gpu.traffic import Traffic, page_traffic, plain_traffic
from stepwell import Kind
from stepwell.engine import Engine

BATCH, CONTEXT = 8, 8192
STEPS, ROUNDS = 30, 3
MOST_SLOWER = 0.03
COPIED_BYTES, SMALL_PAGE_BYTES = 2 << 30, 36 << 10  # each way, again and again; small pages are copied otherwise


def measure(bench: Bench) -> list[Row]:
    made, context = bench.make(QWEN), bench.tokens(CONTEXT)
    page_bytes = bench.spec(made).object_bytes(Kind.PREFIX)
    engine = bench.engine(made, device_bytes=bench.bytes_of(made, (BATCH + 2) * (context + 1024)))
    del made
    bench.clean()
    rows: list[Row] = []
    try:
        warm_up(bench, engine)
        prompts = bench.prompts(BATCH, context, engine.vocab_size)
        prefill_s(bench, engine, prompts)
        copied_bytes = (1 << 20) if bench.tiny else COPIED_BYTES
        for size in (None, page_bytes, SMALL_PAGE_BYTES):
            traffic = (
                plain_traffic(copied_bytes, bench.device) if size is None else page_traffic(size, copied_bytes, bench.device)
            )
            rows += bench.guarded(traffic.what, lambda traffic=traffic, goal=size is not None: [  # type: ignore[misc]
                _decode(bench, engine, traffic, prompts, goal), _prefill(bench, engine, traffic, context, goal)
            ])  # fmt: skip
    finally:
        engine.close()
    return rows


def _decode(bench: Bench, engine: Engine, traffic: Traffic, prompts: list[list[int]], goal: bool) -> Row:
    alone: list[float] = []
    beside: list[float] = []
    with Steady(bench, engine, prompts, steps=2 * ROUNDS * STEPS) as steady:
        for _ in range(ROUNDS):
            alone += steady.times(bench.steps(STEPS))
            with traffic.running():
                beside += steady.times(bench.steps(STEPS))
    return _row(f"decode, {len(prompts)} x {len(prompts[0]):,}", alone, beside, traffic, goal)


def _prefill(bench: Bench, engine: Engine, traffic: Traffic, context: int, goal: bool) -> Row:
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        alone.append(prefill_s(bench, engine, bench.prompts(1, context, engine.vocab_size)))
        with traffic.running():
            beside.append(prefill_s(bench, engine, bench.prompts(1, context, engine.vocab_size)))
    return _row(f"prefill, 1 x {context:,}", alone, beside, traffic, goal)


def _row(what: str, alone: list[float], beside: list[float], traffic: Traffic, goal: bool) -> Row:
    slower = statistics.median(beside) / statistics.median(alone) - 1
    up, down = traffic.take_bytes_per_s()
    figures = {
        "alone, ms": statistics.median(alone) * 1e3, "while copying, ms": statistics.median(beside) * 1e3,
        "slower by, %": slower * 100, "up, GB/s": up / 1e9, "down, GB/s": down / 1e9,
    }  # fmt: skip
    aim = Goal(value=slower, limit=MOST_SLOWER, most=True) if goal else None
    return Row(what=f"{what}, {traffic.what}", figures=figures, goal=aim)


# ---- copies ---------------------------------------------------------------------------------------


def measure_copies(bench: Bench) -> list[Row]:
    """What `bench_copies` measures of page copies, where it can be called."""
    run: Any = vars(bench_copies).get("run")
    if run is None:
        return [Row(what="page copies", note="bench_copies has nothing to call yet: run make bench-copies")]
    return [_copy_row(each) for each in run()]


def _copy_row(found: dict[str, Any]) -> Row:
    """`found` has what, figures, and where there is a goal value, limit and perhaps most."""
    goal = {name: found[name] for name in ("value", "limit", "most") if name in found}
    figures = found.get("figures") or {name: each for name, each in found.items() if isinstance(each, int | float)}
    return Row(
        what=str(found.get("what", "copies")),
        figures=figures,
        goal=Goal(**goal) if "value" in goal and "limit" in goal else None,
        note=str(found.get("note", "")),
    )
