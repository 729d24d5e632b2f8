"""Runs tasks in processes of their own and reports their progress.

    caller  -- a task ------------------> worker     one pipe for each worker,
            <-- requests served, often --            and nothing else in common
            <-- Done or Failed ----------

No lock is shared, so a killed process cannot leave one taken. An interrupt is noted where it arrives, and raised once the
workers have ended. A caller that is killed closes its pipes: its workers end when they next use theirs.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock, SystemClock

POLL_S = 0.2  # at most until an interrupt is looked for; at least between two reports of a worker's progress

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task, Callable[[], None]], Result]  # calls its second argument after each request it has served


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Generic[Result]):
    """The result of a task."""

    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What a task raised, and the lines that led there."""

    error: Exception
    lines: str


class WorkerTraceback(Exception):
    """Stands as the cause of an error that was raised in a worker, with the lines that led to it there."""


def run_all(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    *,
    jobs: int,
    on_result: Callable[[int, Result], None],
    on_progress: Callable[[int], None],
) -> None:
    """Runs `work` on each task, at most `jobs` at a time, in processes that find it by its name.

    `on_result` gets a task's place and its result; `on_progress` the number of requests served by all, some times a second.
    Processes are killed when they are no longer needed, so `work` must own nothing but memory.
    Raises what `work` raises, and ConfigError when its process was killed. However it ends, no process is left.
    To be called on the main thread, which is where interrupts arrive.
    """
    if jobs < 1:
        raise ConfigError(f"jobs must be 1 or more, got {jobs}")
    with _interrupts_noted() as interrupts, ExitStack() as workers:
        left = iter(enumerate(tasks))
        pipes = [workers.enter_context(_worker(work)) for _ in range(min(jobs, len(tasks)))]
        places: dict[Connection, int] = {}  # of the tasks that are being worked on
        served = 0
        for pipe in pipes:
            _hand_over(left, pipe, places)
        while places and not interrupts:
            for pipe in _ready(places):
                match _received(pipe):
                    case int(requests):
                        served += requests
                    case Done(result=result):
                        on_result(places.pop(pipe), result)
                        _hand_over(left, pipe, places)
                    case Failed(error=error, lines=lines):
                        raise error from WorkerTraceback(lines)
            on_progress(served)


def _ready(pipes: Collection[Connection]) -> list[Connection]:
    """Pipes with something to read: as soon as there is one, or none after a while."""
    return [pipe for pipe in connection.wait(list(pipes), timeout=POLL_S) if isinstance(pipe, Connection)]


def _hand_over(left: Iterator[tuple[int, Task]], pipe: Connection, places: dict[Connection, int]) -> None:
    """The next task to a worker that has none, if one is left."""
    for place, task in left:
        places[pipe] = place
        with _workers_death_reported():
            pipe.send(task)
        return


def _received(pipe: Connection) -> Any:
    with _workers_death_reported():
        return pipe.recv()


@contextmanager
def _workers_death_reported() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise ConfigError("a replay was killed, perhaps for lack of memory: try fewer jobs") from None


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Interrupts are added to the list meanwhile, and one is raised at the end; nowhere else, where a lock may be taken.

    A caller that ignores them goes on doing so: that is how a shell starts what it runs in the background.
    """
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield noted
        return
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt


@contextmanager
def _worker(work: Work[Task, Result]) -> Iterator[Connection]:
    """The pipe to a new process, which is killed at the end. It is born deaf to interrupts: the caller hears them for it."""
    context = multiprocessing.get_context("spawn")
    pipe, its_pipe = context.Pipe()
    with pipe:
        process = context.Process(target=_serve, args=(its_pipe, work), daemon=True)
        with its_pipe, _interrupts_blocked():  # closed here once it is open there, or reading on would not end with the worker
            process.start()
        try:
            yield pipe
        finally:
            process.kill()
            process.join()
            process.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """As processes that are started meanwhile inherit it. Threads of the caller may still take a signal for it."""
    resource_tracker.ensure_running()  # as a first start would do, and then unblock them, in some Pythons
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(pipe: Connection, work: Work[Task, Result]) -> None:
    """In a worker: one task after the other, for as long as there is a caller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress = Progress(pipe=pipe, clock=SystemClock())
    try:
        while True:
            outcome = _outcome(work, pipe, progress)
            progress.report()
            try:
                pipe.send(outcome)
            except Exception as error:
                if isinstance(error, OSError):
                    raise
                pipe.send(Failed(error=_portable(error), lines=traceback.format_exc()))  # the result cannot be pickled
    except (EOFError, OSError):
        return  # the caller has ended


def _outcome(work: Work[Task, Result], pipe: Connection, progress: Progress) -> Done[Result] | Failed:
    """The outcome of the next task. Raises EOFError or OSError when the caller has ended."""
    try:
        task: Task = pipe.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:  # it cannot be pickled
        return Failed(error=_portable(error), lines=traceback.format_exc())
    try:
        return Done(result=work(task, progress.count))
    except (Exception, SystemExit) as error:  # the worker boundary: it is raised where the caller waits
        return Failed(error=_portable(error), lines=traceback.format_exc())


def _portable(error: BaseException) -> Exception:
    """The error, or one that says as much where it cannot be pickled, or would end that."""
    said = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, Exception):
        return said
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return said
    return error


@dataclass(slots=True, kw_only=True)
class Progress:
    """In a worker: counts requests and reports them to the caller now and then. Raises OSError when the caller has ended."""

    pipe: Connection
    clock: Clock
    unreported: int = 0
    reported_s: float = float("-inf")

    def count(self) -> None:
        self.unreported += 1
        if self.clock.now() - self.reported_s >= POLL_S:
            self.report()

    def report(self) -> None:
        self.pipe.send(self.unreported)
        self.unreported, self.reported_s = 0, self.clock.now()
