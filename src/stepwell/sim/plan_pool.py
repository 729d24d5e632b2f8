"""Replays many cases in processes of their own, and says how far they have come.

A process is handed names and numbers only, and hands a report back. Whoever interrupts the caller ends them all: they are
told to stop, and stop before their next request.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

from stepwell.base.errors import ConfigError
from stepwell.base.meters import SystemClock
from stepwell.sim.case import Case
from stepwell.sim.replay import replay_trace
from stepwell.sim.report import Report

POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What processes share with the caller."""

    served: Synchronized[int]  # requests, over all cases
    stop: Event


class Stopped(Exception):
    """The caller wants no more."""


_wires: Wires | None = None  # of a worker process, which has nowhere else to keep it


def replay_all(
    cases: Sequence[Case], *, jobs: int, on_progress: Callable[[int, int], None] = lambda served, finished: None
) -> list[Report]:
    """A report for each case, in their order. `on_progress` is told requests served and cases finished, some times a second.

    Raises what a replay raises, and ConfigError when its process was killed. However it ends, no process is left.
    To be called on the main thread, which is where interrupts arrive.
    """
    if jobs < 1:
        raise ConfigError(f"jobs must be 1 or more, got {jobs}")
    context = multiprocessing.get_context("spawn")
    wires = Wires(served=context.Value("q", 0), stop=context.Event())
    workers = min(jobs, len(cases))
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(wires,))
    try:
        with _interrupts_wait():
            futures = [pool.submit(_replay, case) for case in cases]
        _watch(futures, wires, on_progress)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise ConfigError(f"a replay was killed, as for want of memory: try fewer jobs than {workers}") from None
    finally:
        wires.stop.set()
        pool.shutdown(cancel_futures=True)


def _watch(futures: Sequence[Future[Report]], wires: Wires, on_progress: Callable[[int, int], None]) -> None:
    """Until all have ended, or one has failed."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
        # Without its lock: an interrupt just after it is taken could leave it so, and the workers waiting for it.
        on_progress(wires.served.get_obj().value, len(futures) - len(pending))
        for future in done:
            future.result()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Processes started meanwhile begin deaf to ^C, as `_begin` then leaves them. One that came is raised at the end.

    Both are needed: a mask alone is inherited, but any other thread of the caller may still take the signal for it.
    """
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt


def _begin(wires: Wires) -> None:
    global _wires
    _wires = wires
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller hears it too, and says what is to be done


def _replay(case: Case) -> Report:
    return replay_trace(case.open_trace(), case.setup(), policy=case.policy, clock=SystemClock(), on_request=_count)


def _count() -> None:
    assert _wires is not None
    if _wires.stop.is_set():
        raise Stopped
    with _wires.served.get_lock():
        _wires.served.value += 1
