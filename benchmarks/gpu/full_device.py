"""First tokens of new prompts on a full device: the cost of evicting first.

Under `through` what leaves the device is on the host already, and leaves at once. Under `exclusive` it is saved first, and a
request may have to wait for that copy. Prompts come in turns to both, so that what else the machine does hits both.
"""

from __future__ import annotations

import statistics

from engine.driving import first_token, settle
from gpu.bench import Bench
from gpu.requests import warm_up
from gpu.shapes import LLAMA
from report import Row
from stepwell.base.config import WritePolicy
from stepwell.base.ids import Tier
from stepwell.engine.engine import Engine

MODELS = (LLAMA, "qwen3-next-shaped")
LENGTHS, TIMES = (1024, 8192, 32_768), (24, 12, 4)
DEVICE_TOKENS = 262_144  # and as many again on the host, so that it is full too
FILLING = 16_384
WRITES = (WritePolicy.THROUGH, WritePolicy.EXCLUSIVE)


def measure(bench: Bench) -> list[Row]:
    return bench.each(MODELS, lambda name: _model(bench, name))


def _model(bench: Bench, name: str) -> list[Row]:
    made = bench.make(name)
    size = bench.bytes_of(made, bench.tokens(DEVICE_TOKENS))
    engines = {write: bench.engine(made, device_bytes=size, host_bytes=size, write=write) for write in WRITES}
    del made
    rows: list[Row] = []
    try:
        for engine in engines.values():
            warm_up(bench, engine)
            _fill(bench, engine)
        for length, times in zip(LENGTHS, TIMES, strict=True):
            rows += bench.guarded(
                f"{length:,} tokens", lambda length=length, times=times: [_row(bench, name, engines, length, times)]
            )  # type: ignore[misc]
    finally:
        for engine in engines.values():
            engine.close()
    bench.clean()
    return rows


def _row(bench: Bench, name: str, engines: dict[WritePolicy, Engine], length: int, times: int) -> Row:
    found: dict[WritePolicy, list[float]] = {write: [] for write in engines}
    for _ in range(times):
        for write, engine in engines.items():
            (prompt,) = bench.prompts(1, bench.tokens(length), engine.vocab_size)
            found[write].append(first_token(engine, prompt).seconds)
            settle(engine)
    through_ms, exclusive_ms = (statistics.median(found[write]) * 1e3 for write in WRITES)
    bench.say(f"{name}, {length}: {through_ms:.1f} ms, exclusive {exclusive_ms:.1f}")
    figures = {"through, ms": through_ms, "exclusive, ms": exclusive_ms, "times": exclusive_ms / through_ms}
    return Row(what=f"{name}, {length:,} tokens", figures=figures)


def _fill(bench: Bench, engine: Engine) -> None:
    """Until the device and the host are full, and something had to leave both."""
    with bench.budget.uncounted():
        while not engine.cache.counters["evicted_device_pages"] or not engine.cache.counters["evicted_host_pages"]:
            (prompt,) = bench.prompts(1, bench.tokens(FILLING), engine.vocab_size)
            first_token(engine, prompt)
            settle(engine)
        bench.say(f"full: {engine.cache.stats().tier(Tier.DEVICE).used_bytes / 1e9:.1f} GB of the device")
