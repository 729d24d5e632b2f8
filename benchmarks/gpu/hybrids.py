"""Decode steps of hybrid and sparse models, cut to fit: with the kernels of the engine, and with plain torch in the same run."""

from __future__ import annotations

import statistics

from gpu.bench import Bench
from gpu.limits import step_limit_s, weight_bytes
from gpu.report import Goal, Row
from gpu.requests import Steady, prefill_s, warm_up
from gpu.shapes import HYBRIDS, Made
from stepwell.engine import EngineConfig

BATCH, CONTEXT = 8, 8192
STEPS = 32
GOAL = 3.0
PLAIN = "torch"


def measure(bench: Bench) -> list[Row]:
    rows = []
    for name in HYBRIDS:
        if bench.budget.left_s <= 0:
            rows.append(Row(what=name, note="no time left"))
            continue
        try:
            rows.append(_model(bench, name))
        except Exception as error:  # one family must not end the others
            rows.append(Row(what=name, note=f"{type(error).__name__}: {error}"[:200]))
            bench.say(f"{name}: {rows[-1].note}")
        bench.clean()
    return rows


def _model(bench: Bench, name: str) -> Row:
    bench.say(f"{name}: making it")
    made, context = bench.make(name), bench.tokens(CONTEXT)
    limit_s = step_limit_s(weight_bytes(made, BATCH), bench.spec(made), made.picked, batch=BATCH, context=context)
    what = f"{name}, {BATCH} x {context:,}"
    step_s = _step_s(bench, made, what, bench.kernels)
    figures = {"step, ms": step_s * 1e3, "limit, ms": limit_s * 1e3, "of the limit": limit_s / step_s}
    if "kernels" not in EngineConfig.__dataclass_fields__ or bench.kernels == PLAIN:
        return Row(what=what, figures=figures, note="nothing to compare with: only plain torch ran")
    plain_s = _step_s(bench, made, what, PLAIN)
    figures |= {"plain torch, ms": plain_s * 1e3, "times as fast": plain_s / step_s}
    return Row(what=what, figures=figures, goal=Goal(value=plain_s / step_s, limit=GOAL))


def _step_s(bench: Bench, made: Made, what: str, kernels: str) -> float:
    tokens = BATCH * (bench.tokens(CONTEXT) + 1024)
    engine = bench.engine(made, device_bytes=2 * bench.bytes_of(made, tokens), kernels=kernels)
    try:
        warm_up(bench, engine)
        prompts = bench.prompts(BATCH, bench.tokens(CONTEXT), engine.vocab_size)
        filled_s = prefill_s(bench, engine, prompts)
        with Steady(bench, engine, prompts, steps=bench.steps(STEPS)) as steady:
            step_s = statistics.median(steady.times(bench.steps(STEPS)))
    finally:
        engine.close()
        bench.clean()
    bench.say(f"{what}, {kernels}: {step_s * 1e3:.2f} ms a step (prompts took {filled_s:.1f} s)")
    return step_s
