"""Decode steps of dense models as a caller sees them, compared with the time to read weights and contexts once from memory.

Every request has pages of its own. Contexts of 8K begin with those of 2K, and so on, so that each prompt is computed once.
"""

from __future__ import annotations

import statistics
from functools import partial

from engine.driving import settle
from gpu.bench import Bench
from gpu.limits import step_limit_s, weight_bytes
from gpu.requests import SPARE_TOKENS, Steady, prefill_s, warm_up
from gpu.shapes import LLAMA, QWEN
from report import Goal, Row
from stepwell.base.ids import Tier
from stepwell.engine import Engine

CONTEXTS, BATCHES = (2048, 8192, 32_768), (1, 8, 32, 64)
GOALS = {LLAMA: 0.5, QWEN: 0.7}
STEPS = 40


def measure(bench: Bench) -> list[Row]:
    return bench.each(tuple(GOALS), lambda name: _model(bench, name))


def _model(bench: Bench, name: str) -> list[Row]:
    made = bench.make(name)
    spec, picked, vocab = bench.spec(made), made.picked, made.config.vocab_size
    weights = weight_bytes(made, 1)
    engine = bench.engine(made, device_bytes=None)
    del made
    bench.clean()
    rows: list[Row] = []
    try:
        warm_up(bench, engine)
        batches = bench.batches(BATCHES)
        longest = bench.prompts(max(batches), bench.tokens(max(CONTEXTS)), vocab)
        for context in map(bench.tokens, CONTEXTS):
            for batch in batches:
                what, note = f"{name}, {batch} x {context:,}", _why_not(engine, batch, context)
                if note:
                    rows.append(Row(what=what, note=note))
                    continue
                prompts = [prompt[:context] for prompt in longest[:batch]]
                limit_s = step_limit_s(weights, spec, picked, batch=batch, context=context)
                rows += bench.guarded(what, partial(_cell, bench, engine, what, prompts, limit_s, GOALS[name]))
    finally:
        engine.close()
    return rows


def _why_not(engine: Engine, batch: int, context: int) -> str:
    needed = batch * (context + SPARE_TOKENS + engine.cache.spec.page_tokens) * float(engine.footprint.bytes_per_token)
    there = engine.cache.stats().tier(Tier.DEVICE).size_bytes
    return f"does not fit: {needed / 1e9:.0f} GB in {there / 1e9:.0f}" if needed > there else ""


def _cell(bench: Bench, engine: Engine, what: str, prompts: list[list[int]], limit_s: float, goal: float) -> list[Row]:
    filled_s = prefill_s(bench, engine, prompts)
    settle(engine)
    steps = bench.steps(STEPS)
    with Steady(bench, engine, prompts, steps=steps) as steady:
        times = steady.times(steps)
    step_s = statistics.median(times)
    bench.say(f"{what}: {step_s * 1e3:.2f} ms a step, limit {limit_s * 1e3:.2f} (prompts took {filled_s:.1f} s)")
    figures = {
        "step, ms": step_s * 1e3, "mean, ms": statistics.mean(times) * 1e3, "limit, ms": limit_s * 1e3,
        "of the limit": limit_s / step_s, "tokens/s": len(prompts) / step_s,
    }  # fmt: skip
    return [Row(what=what, figures=figures, goal=Goal(value=limit_s / step_s, limit=goal))]
