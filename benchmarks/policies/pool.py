"""Replays cells in processes of their own, hands each result over as it comes, and counts requests for one progress bar."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

from policies.grid import Cell

POLL_S = 0.5

_served: Synchronized[int] | None = None  # of a worker process, which has nowhere else to keep them
_stop: Event | None = None


class Stopped(Exception):
    """The caller wants no more."""


def run_all(
    cells: Sequence[Cell], *, jobs: int, on_result: Callable[[dict[str, Any]], None], on_progress: Callable[[int], None]
) -> None:
    """`on_progress` is told requests served over all cells. However it ends, no process is left; what was handed over stays."""
    context = multiprocessing.get_context("spawn")
    served, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(max(min(jobs, len(cells)), 1), mp_context=context, initializer=_begin, initargs=(served, stop))
    try:
        pending = {pool.submit(_run, cell) for cell in cells}
        while pending:
            done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            on_progress(served.value)
            for future in done:
                on_result(future.result())
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _begin(served: Synchronized[int], stop: Event) -> None:
    global _served, _stop
    _served, _stop = served, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller hears it too, and says what is to be done


def _run(cell: Cell) -> dict[str, Any]:
    return cell.run(_count)


def _count() -> None:
    assert _served is not None and _stop is not None
    if _stop.is_set():
        raise Stopped
    with _served.get_lock():
        _served.value += 1
