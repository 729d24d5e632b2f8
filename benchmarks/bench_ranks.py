"""The time that messages to ranks add to a step: passes over two worker processes that compute nothing, at batch 32.

    make bench-ranks        prints the table (a minute)

In one process a pass is a call. With ranks it is packed, sent to each, read and handed to the thread for passes, and the chosen
tokens come back the same way. The benchmark does all of that and nothing else, so the whole round is what messages add. Requests
go on token by token and get a page now and then, as in a server. `processor` is the time that the scheduler's thread and the
busiest rank compute, which is steadier than the clock on a busy machine. Rows take turns, for the same reason.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.engine.ops.drawing import Draw
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.sampling.choices import Choosing
from stepwell.engine.workers.pass_arrays import Pass
from stepwell.engine.workers.rank_workers import RankWorkers
from stepwell.engine.workers.worker_setup import WorkerLimits, WorkerSetup

RANKS, BATCH, ROUNDS, STEPS, WARM = 2, 32, 10, 200, 20
PAGE_TOKENS = 64
GOAL_MS = 0.3


@dataclass(slots=True, eq=False)
class Row:
    """A line of the table and its measurements."""

    name: str
    context: int
    draw: Draw | None = None
    took_ms: list[float] = field(default_factory=list)
    processor_s: float = 0.0


def rows() -> list[Row]:
    drawn = Draw(temperature=0.8, top_k=None, top_p=0.95, number=0.25)
    return [Row("8,192 tokens each", 8192), Row("32,768 tokens each", 32_768), Row("8,192 tokens each, drawn", 8192, drawn)]


def decode_steps(row: Row, count: int) -> list[Pass]:
    """`count` steps of one token for each request. Lengths differ, so that one step in two adds a page to some request."""
    tables: list[Any] = [np.arange(row.context // PAGE_TOKENS, dtype=np.int32) + at for at in range(BATCH)]
    steps = []
    for step in range(count):
        positions = [row.context - 1 - at * PAGE_TOKENS // BATCH + step for at in range(BATCH)]
        for at, position in enumerate(positions):
            if position >= len(tables[at]) * PAGE_TOKENS:
                tables[at] = np.append(tables[at], np.int32(step))
        requests = [
            RequestRows(tokens=(7,), position=position, prefix_pages=table, num_logits=1)
            for position, table in zip(positions, tables, strict=True)
        ]
        steps.append(Pass(rows=requests, choosing=[Choosing(draw=row.draw) for _ in range(BATCH)]))
    return steps


@contextmanager
def idle_ranks() -> Iterator[RankWorkers]:
    """Worker processes without a model: they read each pass, and choose token 0 for every row."""
    setup = WorkerSetup(
        model="", digest="idle", dtype="fp32", kv_dtype=None, kernels="torch", page_tokens=PAGE_TOKENS, devices=("cpu",) * RANKS,
        backend="gloo", host=None, alignment=64, device_bytes=lambda free: 1, module="idle_worker",
    )  # fmt: skip
    workers = RankWorkers(setup, WorkerLimits(), restart=False)
    try:
        workers.start()
        yield workers
    finally:
        workers.close()


def measure(workers: RankWorkers, row: Row) -> None:
    steps = decode_steps(row, WARM + STEPS)
    for step in steps[:WARM]:
        workers.compute(step)
    used_s, ranks_s = time.thread_time(), [_used_s(pid) for pid in workers.pids]
    for step in steps[WARM:]:
        began_s = time.perf_counter()
        chosen = workers.compute(step)
        for at in range(BATCH):
            chosen.of(at)
        row.took_ms.append((time.perf_counter() - began_s) * 1000)
    row.processor_s += time.thread_time() - used_s
    row.processor_s += max(_used_s(pid) - before_s for pid, before_s in zip(workers.pids, ranks_s, strict=True))


def run() -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": RANKS, "batch": BATCH, "load": os.getloadavg()[0]}
    lines = rows()
    with idle_ranks() as workers:
        for _ in range(ROUNDS):
            for row in lines:
                measure(workers, row)
    found |= {row.name: _figures(row) for row in lines}
    found["added ms"] = found[lines[0].name]["p50 ms"]
    return found


def _figures(row: Row) -> dict[str, float]:
    cuts = statistics.quantiles(row.took_ms, n=100)
    processor_ms = row.processor_s / len(row.took_ms) * 1000
    return {"processor ms": processor_ms, "lowest ms": min(row.took_ms), "p50 ms": cuts[49], "p99 ms": cuts[98]}


def _used_s(pid: int) -> float:
    """Processor time of a process."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def table(found: dict[str, Any], names: Sequence[str]) -> list[str]:
    lines = [f"{found['ranks']} ranks, batch {found['batch']}, load {found['load']:.1f}"]
    lines += [f"{name:>26}  " + "  ".join(f"{what} {value:,.3f}" for what, value in found[name].items()) for name in names]
    return [*lines, f"added to a step: {found['added ms']:.3f} ms (goal: at most {GOAL_MS})"]


def main() -> None:
    sys.stdout.write("\n".join(table(run(), [row.name for row in rows()])) + "\n")


if __name__ == "__main__":
    main()
