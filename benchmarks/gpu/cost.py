"""The cost of tiers that save nothing: prompts that share nothing and short answers, with a host tier and a log, and without.

Two engines take turns. Each turn begins when nothing is copied or stored any more. How long that takes is reported too, and how
long the device had nothing queued after passes with prompts in one turn.
"""

from __future__ import annotations

import shutil
import statistics
import time

from engine.driving import run, settle
from gpu.bench import Bench
from gpu.requests import warm_up
from gpu.shapes import QWEN
from gpu.watched import Watched
from report import Goal, Row
from stepwell.engine import Engine, GenerateRequest, Sampling

BATCH, LENGTH, ANSWER = 8, 4096, 64
ROUNDS = 3
MOST_COST = 0.02


def measure(bench: Bench) -> list[Row]:
    made, length, directory = bench.make(QWEN), bench.tokens(LENGTH), bench.directory / "cost"
    memory = bench.bytes_of(made, 2 * BATCH * (length + ANSWER + 64))
    options = {"budget": str(max(3 * memory, 1 << 30))}
    engines = {
        "off": bench.engine(made, device_bytes=memory),
        "on": bench.engine(made, device_bytes=memory, host_bytes=memory, store=f"log:{directory}", store_options=options),
    }
    del made
    bench.clean()
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    waited: dict[str, list[float]] = {"off": [], "on": []}
    stored_s = 0.0
    try:
        for engine in engines.values():
            warm_up(bench, engine)
        watched = {kind: Watched(engine) for kind, engine in engines.items()}
        for each in range(ROUNDS + 1):
            for kind, engine in engines.items():
                watched[kind].passes.clear()
                took_s = _round_s(bench, engine, length)
                stored_s = max(stored_s, _settled_s(engine))
                if each:  # the first one only warms up
                    seconds[kind].append(took_s)
                    waited[kind].append(watched[kind].waited_s() * 1e3)
            if each and bench.budget.left_s <= 0:
                break
    finally:
        for engine in engines.values():
            engine.close()
        shutil.rmtree(directory, ignore_errors=True)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    cost = statistics.median(ratios) - 1
    figures: dict[str, float | str] = {
        "device only, s": statistics.median(seconds["off"]), "all tiers, s": statistics.median(seconds["on"]),
        "cost, %": cost * 100, "of each round": " ".join(f"{each:.3f}" for each in ratios), "stored after, s": stored_s,
        "waited between prompts, ms": statistics.median(waited["off"]), "with tiers": statistics.median(waited["on"]),
    }  # fmt: skip
    what = f"{BATCH} x ({length:,} + {ANSWER}) tokens"
    return [Row(what=what, figures=figures, goal=Goal(value=cost, limit=MOST_COST, most=True))]


def _round_s(bench: Bench, engine: Engine, length: int) -> float:
    sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
    asks = [GenerateRequest(tokens=prompt, sampling=sampling) for prompt in bench.prompts(BATCH, length, engine.vocab_size)]
    bench.wait()
    started = time.perf_counter()
    run(engine, asks)
    return time.perf_counter() - started


def _settled_s(engine: Engine) -> float:
    started = time.perf_counter()
    settle(engine)
    return time.perf_counter() - started
