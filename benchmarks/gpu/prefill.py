"""Prompts until their first tokens, compared with transformers with sdpa on weights of the same shape. Nothing is reused."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu.bench import Bench
from gpu.requests import prefill_s, warm_up
from gpu.shapes import DENSE, Made
from report import Goal, Row
from stepwell.engine import Engine

LENGTHS, BATCHES = (8192, 32_768), (1, 8)
GOAL = 1.0
REPEATS, REPEAT_BELOW_S = 3, 5.0  # a case is measured again while all of it took less

Cell = tuple[int, int]  # batch, length


def measure(bench: Bench) -> list[Row]:
    return bench.each(DENSE, lambda name: _model(bench, name))


def _model(bench: Bench, name: str) -> list[Row]:
    made = bench.make(name)
    cells = [(batch, bench.tokens(length)) for length in LENGTHS for batch in BATCHES]
    theirs = {cell: _theirs(bench, made, *cell) for cell in cells}
    bench.clean()
    most = max(batch * length for batch, length in cells)
    engine = bench.engine(made, device_bytes=bench.bytes_of(made, int(most * 1.1) + 4096))
    del made
    bench.clean()
    rows: list[Row] = []
    try:
        warm_up(bench, engine)
        for batch, length in cells:
            cell = partial(_cell, bench, engine, name, batch, length, theirs[batch, length])
            rows += bench.guarded(_what(name, batch, length), cell)
    finally:
        engine.close()
    return rows


def _cell(bench: Bench, engine: Engine, name: str, batch: int, length: int, theirs: tuple[float, str]) -> list[Row]:
    ours = _median(bench, partial(_ours, bench, engine, batch, length))
    bench.say(f"{_what(name, batch, length)}: {batch * length / ours:,.0f} tokens/s")
    return [_row(name, batch, length, ours, theirs)]


def _ours(bench: Bench, engine: Engine, batch: int, length: int) -> float:
    return prefill_s(bench, engine, bench.prompts(batch, length, engine.vocab_size))


def _row(name: str, batch: int, length: int, ours: float, theirs: tuple[float, str]) -> Row:
    seconds, note = theirs
    figures: dict[str, float | str] = {"tokens/s": batch * length / ours, "seconds": ours}
    if not seconds:
        return Row(what=_what(name, batch, length), figures=figures, note=note)
    figures |= {"transformers": batch * length / seconds, "ratio": seconds / ours}
    return Row(
        what=_what(name, batch, length), figures=figures, note=note, goal=Goal(value=seconds / ours, limit=GOAL)
    )  # fmt: skip


def _what(name: str, batch: int, length: int) -> str:
    return f"{name}, {batch} x {length:,}"


def _theirs(bench: Bench, made: Made, batch: int, length: int) -> tuple[float, str]:
    """Seconds, 0 where there are none, and how. Halves the batch for as long as memory does not suffice."""
    if bench.budget.left_s <= 0:
        return 0.0, "no time left for transformers"
    tokens = torch.tensor(bench.prompts(batch, length, made.config.vocab_size), device=bench.device)
    size = batch
    while size:
        try:
            _call(bench, made.model, tokens[:1, : bench.tokens(2048)], 1)  # whatever is slow only once
            seconds = _median(bench, partial(_call, bench, made.model, tokens, size))
            bench.say(f"{_what(made.name, batch, length)}: transformers {batch * length / seconds:,.0f} tokens/s")
            return seconds, "" if size == batch else f"transformers in {batch // size} calls, for memory"
        except torch.OutOfMemoryError:
            size //= 2
        bench.clean()
    return 0.0, "transformers has not memory enough"


@torch.inference_mode()
def _call(bench: Bench, model: Any, tokens: torch.Tensor, size: int) -> float:
    bench.wait()
    started = time.perf_counter()
    for part in tokens.split(size):
        model(part, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
    return time.perf_counter() - started


def _median(bench: Bench, work: Callable[[], float]) -> float:
    times = [work()]
    while not bench.tiny and len(times) < REPEATS and sum(times) < REPEAT_BELOW_S:
        times.append(work())
    return statistics.median(times)
