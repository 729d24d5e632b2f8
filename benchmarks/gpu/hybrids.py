"""Decode steps of hybrid and sparse models, cut to fit: with the kernels of the engine, and with plain torch in the same run."""

from __future__ import annotations

import statistics

from gpu.bench import Bench
from gpu.device_time import longest, profiled
from gpu.limits import step_limit_s, weight_bytes
from gpu.requests import Steady, prefill_s, warm_up
from gpu.shapes import HYBRIDS, Made
from report import Goal, KernelTime, Row

BATCH, CONTEXT = 8, 8192
STEPS = 32
PROFILED = 6  # steps behind those that are timed
GOAL = 3.0
LEAST_BYTES = 4 << 30  # windows of a whole chunk are many times those of a request at rest
PLAIN = "torch"
CASES = (*HYBRIDS, *(f"{name}, rows in eight bits" for name in HYBRIDS if name.startswith("deepseek")))


def measure(bench: Bench) -> list[Row]:
    return bench.each(CASES, lambda case: _model(bench, case))


def _model(bench: Bench, case: str) -> list[Row]:
    name, _, rows = case.partition(", ")
    kv_dtype = "fp8" if rows else None
    made, context = bench.make(name), bench.tokens(CONTEXT)
    spec = bench.spec(made, kv_dtype)
    limit_s = step_limit_s(weight_bytes(made, BATCH), spec, made.picked, batch=BATCH, context=context)
    what = f"{case}, {BATCH} x {context:,}"
    step_s, kernels = _step(bench, made, what, "auto", kv_dtype)
    figures = {"step, ms": step_s * 1e3, "limit, ms": limit_s * 1e3, "of the limit": limit_s / step_s}
    plain_s, _ = _step(bench, made, what, PLAIN, kv_dtype)
    figures |= {"plain torch, ms": plain_s * 1e3, "times as fast": plain_s / step_s}
    return [Row(what=what, figures=figures, goal=Goal(value=plain_s / step_s, limit=GOAL), kernels=kernels)]


def _step(
    bench: Bench, made: Made, what: str, kernels: str, kv_dtype: str | None
) -> tuple[float, tuple[KernelTime, ...]]:  # fmt: skip
    """Seconds, and the kernels that took longest."""
    needed = 2 * bench.bytes_of(made, BATCH * (bench.tokens(CONTEXT) + 1024))
    engine = bench.engine(
        made, device_bytes=needed if bench.tiny else max(needed, LEAST_BYTES), kernels=kernels, kv_dtype=kv_dtype
    )
    try:
        warm_up(bench, engine)
        prompts = bench.prompts(BATCH, bench.tokens(CONTEXT), engine.vocab_size)
        filled_s = prefill_s(bench, engine, prompts)
        with Steady(bench, engine, prompts, steps=bench.steps(STEPS)) as steady:
            step_s = statistics.median(steady.times(bench.steps(STEPS)))
            spans = profiled(lambda: steady.times(PROFILED)) if engine.on_cuda else []
    finally:
        engine.close()
        bench.clean()
    bench.say(f"{what}, {kernels}: {step_s * 1e3:.2f} ms a step (prompts took {filled_s:.1f} s)")
    return step_s, longest(spans, steps=PROFILED)
