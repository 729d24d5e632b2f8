"""What messages to ranks add to a step: passes over two worker processes that compute nothing, at batch 32.

    make bench-ranks        prints the table, and bytes per token (some minutes)

In one process a pass is a call. With ranks it is packed, sent to each, read, handed to the thread for passes, and what was chosen
comes back the same way: all of that is here as it is in a server, and nothing else. So the whole round is what messages add.
Whole page tables travel with every pass; the row without them says what sending changes alone could save at most. `processor` is
the time that the scheduler's thread and the busiest rank compute, which tells more than the clock on a machine that is not quiet.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.engine.passes.batch import RequestRows
from stepwell.engine.sampling import Choosing
from stepwell.engine.workers import rank_workers
from stepwell.engine.workers.messages import Pass, pack_pass
from stepwell.engine.workers.rank_workers import RankWorkers, WorkerLimits, WorkerSetup
from stepwell.jobs.channel import packed

RANKS, BATCH, STEPS, WARM = 2, 32, 2000, 200
PAGE_TOKENS = 64
CONTEXTS = {"8,192 tokens each": 8192, "32,768 tokens each": 32_768, "no page tables": 0}
GOAL_MS = 0.3
_BEGIN = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); sys.path.insert(0, {folder!r}); "
    "from cluster.idle_worker import main; main()"
)


def a_step(context: int) -> Pass:
    """A decode step: one token and the pages of each request."""
    pages = max(context // PAGE_TOKENS, 1)
    rows = [
        RequestRows(
            tokens=(7,), position=max(context - 1, 0), prefix_pages=np.arange(at * pages, (at + 1) * pages, dtype=np.int32),
            num_logits=1,
        )
        for at in range(BATCH)
    ]  # fmt: skip
    return Pass(rows=rows, choosing=[Choosing()] * BATCH)


@contextmanager
def idle_ranks() -> Iterator[RankWorkers]:
    """Worker processes without a model: they read each pass, and choose token 0 for every row."""
    began = rank_workers._BEGIN
    rank_workers._BEGIN = _BEGIN.format(folder=str(Path(__file__).parents[1]))
    setup = WorkerSetup(
        model="", digest="idle", dtype="fp32", kv_dtype=None, kernels="torch", page_tokens=PAGE_TOKENS, devices=("cpu",) * RANKS,
        backend="gloo", host=None, alignment=64, device_bytes=lambda free: 1,
    )  # fmt: skip
    workers = RankWorkers(setup, WorkerLimits(), restart=False)
    try:
        workers.start()
        yield workers
    finally:
        workers.close()
        rank_workers._BEGIN = began


def run() -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": RANKS, "batch": BATCH, "load": os.getloadavg()[0]}
    with idle_ranks() as workers:
        for name, context in CONTEXTS.items():
            step = a_step(context)
            for _ in range(WARM):
                workers.compute(step)
            took_ms, used_s, ranks_s = [], time.thread_time(), [_used_s(pid) for pid in workers.pids]
            for _ in range(STEPS):
                began_s = time.perf_counter()
                workers.compute(step)
                took_ms.append((time.perf_counter() - began_s) * 1000)
            used_s = time.thread_time() - used_s
            used_s += max(_used_s(pid) - before_s for pid, before_s in zip(workers.pids, ranks_s, strict=True))
            cuts = statistics.quantiles(took_ms, n=100)
            found[name] = {
                "bytes to each rank": len(packed(pack_pass(step, 1))), "processor ms": used_s / STEPS * 1000,
                "p50 ms": cuts[49], "p99 ms": cuts[98], "lowest ms": min(took_ms),
            }  # fmt: skip
    found["added ms"] = found["8,192 tokens each"]["p50 ms"]
    return found


def _used_s(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    found = run()
    lines = [f"{RANKS} ranks, batch {BATCH}, load {found['load']:.1f}"]
    lines += [f"{name:>20}  " + "  ".join(f"{what} {value:,.3f}" for what, value in found[name].items()) for name in CONTEXTS]
    lines.append(f"added to a step: {found['added ms']:.3f} ms (goal: at most {GOAL_MS})")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
