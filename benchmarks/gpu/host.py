"""First tokens of prompts whose state is on the host, compared with the bus; and the share of a load hidden by computing.

A prompt has one token more than whole pages, so that all but one token are loaded.
"""

from __future__ import annotations

import statistics
from functools import partial

from engine.driving import First, first_token, leave_in, settle
from gpu.bench import Bench
from gpu.limits import bus_bytes_per_s
from gpu.requests import Steady, warm_up
from gpu.shapes import QWEN
from report import Goal, Row
from stepwell.engine import Engine

LENGTHS = (32_768, 131_072)
PREFIX, NEW = 32_768, 2048
ROUNDS = 3
MOST_OVER_LIMIT, LEAST_SOONER, LEAST_HIDDEN = 1.3, 15.0, 0.8
BUS_BYTES = 1 << 30


def measure(bench: Bench) -> list[Row]:
    """First tokens from the host."""
    engine, bus = _engine(bench, sum(LENGTHS)), _bus(bench)
    try:
        warm_up(bench, engine)
        rows: list[Row] = []
        for length in map(bench.tokens, LENGTHS):
            rows += bench.guarded(f"{length:,} tokens", partial(_first, bench, engine, length, bus))
        return rows
    finally:
        engine.close()


def measure_hidden(bench: Bench) -> list[Row]:
    """A load followed by new tokens, compared with the load alone and the new tokens alone."""
    prefix, new = bench.tokens(PREFIX), max(bench.tokens(NEW), 2)
    engine = _engine(bench, PREFIX + 4 * ROUNDS * NEW)
    try:
        warm_up(bench, engine)
        (known,) = bench.prompts(1, prefix, engine.vocab_size)
        first_token(engine, known)
        settle(engine)
        times: dict[str, list[float]] = {"load alone": [], "new alone": [], "both": []}
        for _ in range(ROUNDS):
            resident = _ask(bench, engine, known, 1, from_host=False)
            times["load alone"].append(_ask(bench, engine, known, 1, from_host=True).seconds - resident.seconds)
            times["new alone"].append(_ask(bench, engine, known, new, from_host=False).seconds)
            times["both"].append(_ask(bench, engine, known, new, from_host=True).seconds)
    finally:
        engine.close()
    return [_hidden(f"{prefix:,} + {new:,} tokens", {name: statistics.median(each) for name, each in times.items()})]


def _hidden(what: str, seconds: dict[str, float]) -> Row:
    load_s = seconds["load alone"]
    figures = {f"{name}, ms": each * 1e3 for name, each in seconds.items()}
    if load_s <= 0:
        return Row(what=what, figures=figures, note="the load takes no time that can be measured")
    hidden = 1 - (seconds["both"] - seconds["new alone"]) / load_s
    return Row(what=what, figures=figures | {"hidden": hidden}, goal=Goal(value=hidden, limit=LEAST_HIDDEN))


def _engine(bench: Bench, tokens: int) -> Engine:
    made = bench.make(QWEN)
    memory = bench.bytes_of(made, bench.tokens(tokens) + 4096)
    engine = bench.engine(made, device_bytes=memory, host_bytes=memory)
    del made
    bench.clean()
    return engine


def _bus(bench: Bench) -> float:
    bus = bus_bytes_per_s(bench.device, (1 << 20) if bench.tiny else BUS_BYTES)
    bench.say(f"the bus gives {bus / 1e9:.1f} GB/s from pinned memory")
    return bus


def _first(bench: Bench, engine: Engine, length: int, bus: float) -> list[Row]:
    (prompt,) = bench.prompts(1, length + 1, engine.vocab_size)
    cold = first_token(engine, prompt)
    bench.say(f"{length:,} tokens: computed in {cold.seconds:.2f} s")
    found = _from_host(engine, prompt)
    with Steady(bench, engine, [prompt], steps=ROUNDS * 8) as steady:
        step_s = statistics.median(steady.times(ROUNDS * 8))
    took_s = statistics.median(each.seconds for each in found)
    size = length * float(engine.footprint.bytes_per_token)
    limit_s = size / bus + step_s
    figures = {
        "first token, ms": took_s * 1e3, "bus + a step, ms": limit_s * 1e3, "a step, ms": step_s * 1e3, "GB": size / 1e9,
        "GB/s": size / took_s / 1e9, "cold, s": cold.seconds, "x the limit": took_s / limit_s,
        "sooner than cold": cold.seconds / took_s,
    }  # fmt: skip
    note = _note(found[-1], cold, length)
    rows = [Row(what=f"{length:,} tokens", figures=figures, note=note,
                goal=Goal(value=took_s / limit_s, limit=MOST_OVER_LIMIT, most=True))]  # fmt: skip
    if length == bench.tokens(max(LENGTHS)):
        sooner = cold.seconds / took_s
        rows.append(Row(what=f"{length:,} tokens, sooner than cold", figures={}, goal=Goal(value=sooner, limit=LEAST_SOONER)))
    return rows


def _from_host(engine: Engine, prompt: list[int]) -> list[First]:
    found = []
    for _ in range(ROUNDS):
        settle(engine)
        leave_in(engine, "host")
        found.append(first_token(engine, prompt))
    return found


def _note(found: First, cold: First, length: int) -> str:
    said = [] if found.sources.host == length else [f"only {found.sources.host:,} tokens came from the host"]
    said += [] if found.tokens == cold.tokens else ["another answer than the computed one (rounding)"]
    return "; ".join(said)


def _ask(bench: Bench, engine: Engine, known: list[int], new: int, *, from_host: bool) -> First:
    """The first token of a known prefix and `new` tokens after it."""
    settle(engine)
    if from_host:
        leave_in(engine, "host")
    return first_token(engine, known + bench.prompts(1, new, engine.vocab_size)[0], max_tokens=1)
