"""Running work on every rank, and the references it holds until it has ended: the same for copies and for store operations.

    start             assigns a number, takes a reference to every page named, and submits the task to the executor
    apply             handles what the ranks have answered, each job once
    withdraw          cancels a job that no rank has begun
    give_up_overdue   withdraws or fails jobs without progress for too long

A job ends once for its caller: answered, withdrawn or overdue. Its pages stay held until every rank has answered, since an
overdue rank may still be using them. Tasks and answers are plain values, so that executors may have ranks anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Generic, Protocol, TypeVar

from stepwell.base.ids import JobId
from stepwell.base.meters import Clock
from stepwell.base.tasks import Span
from stepwell.jobs.wakeup import Wakeup
from stepwell.tree.node import Residency
from stepwell.tree.tree import Tree

LOOK_SHARE = 1 / 16  # of the time limit passes between two checks for overdue jobs: a long queue takes time to check


class Numbered(Protocol):
    @property
    def job(self) -> JobId: ...


T = TypeVar("T", bound=Numbered)
A = TypeVar("A", bound=Numbered)
T_contra = TypeVar("T_contra", contravariant=True)
Given = TypeVar("Given")


class JobExecutor(Protocol[T_contra, Given]):
    """Runs tasks on every rank and returns answers. Called on the cache's thread; only `drain` waits."""

    def submit(self, task: T_contra) -> None: ...

    def answers(self) -> list[Given]:
        """Everything that all ranks have answered since the last call, each job once."""
        ...

    def withdraw(self, job: JobId) -> bool:
        """Cancels a job that no rank has begun: it will not be answered. False if a rank has begun it, or all have answered."""
        ...

    def progressed_s(self, job: JobId) -> float:
        """When the rank that is furthest behind with a job last made progress: began it, or something before it in the queue.
        Minus infinity if that is unknown.
        """
        ...

    def wake_by(self, wake: Callable[[], None]) -> bool:
        """From now on calls `wake`, from any thread, with every new answer. False if it cannot: then answers must be polled."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Waits until everything submitted was answered, or for this time."""
        ...

    def close(self) -> None:
        """Accepts no more work and lets its threads end; does not wait for one that hangs."""
        ...


class DoneAtOnce(Generic[Given]):
    """The common part of executors that complete a task when it is submitted."""

    def __init__(self) -> None:
        self._done: list[Given] = []

    def answers(self) -> list[Given]:
        done, self._done = self._done, []
        return done

    def withdraw(self, job: JobId) -> bool:
        return False

    def progressed_s(self, job: JobId) -> float:
        return -inf

    def wake_by(self, wake: Callable[[], None]) -> bool:
        return False

    def drain(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class End(Enum):
    ANSWERED = "every rank has answered"
    WITHDRAWN = "no rank had begun it when it was cancelled"
    OVERDUE = "some rank made no progress for too long"


OnEnd = Callable[[End, A | None], None]  # the answer, if there is one


@dataclass(slots=True, kw_only=True, eq=False)
class _Running(Generic[T, A]):
    task: T
    started_s: float
    pages: tuple[Span, ...]
    reads: tuple[Residency, ...]
    on_end: OnEnd[A]
    given_up: bool = False


class Jobs(Generic[T, A]):
    """Jobs of one executor. One thread, the cache's."""

    def __init__(
        self, executor: JobExecutor[T, A], tree: Tree, clock: Clock, wakeup: Wakeup, *,
        before_release: Callable[[T, A], None] | None = None,
    ) -> None:  # fmt: skip
        """`wakeup` is set whenever a job is answered. `before_release` is called with every answer, however late, before the
        pages of its job are released.
        """
        wakeup.polled |= not executor.wake_by(wakeup.set)
        self._executor = executor
        self._tree = tree
        self._clock = clock
        self._before_release = before_release
        self._running: dict[JobId, _Running[T, A]] = {}  # in the order of their start
        self._given: deque[A] = deque()  # answers that were not applied yet
        self._applied: list[A] = []  # those that count, and were not returned yet
        self._num_given_up = 0
        self._next_look_s = -inf
        self._last_id = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_awaited(self) -> int:
        """The number of jobs whose outcome will still count."""
        return len(self._running) - self._num_given_up

    def is_running(self, job: JobId) -> bool:
        return job in self._running

    def is_awaited(self, job: JobId) -> bool:
        """Whether its outcome will still count."""
        return job in self._running and not self._running[job].given_up

    def tasks(self) -> Iterator[T]:
        """The tasks whose outcome will still count."""
        return (running.task for running in self._running.values() if not running.given_up)

    def held(self) -> Iterator[Span]:
        """Every reference that jobs hold, for audits."""
        return (span for running in self._running.values() for span in running.pages)

    def readers(self) -> Iterator[Residency]:
        """The checkpoints that jobs read, once for each job, for audits."""
        return (residency for running in self._running.values() for residency in running.reads)

    def next_id(self) -> JobId:
        self._last_id += 1
        return JobId(self._last_id)

    def start(self, task: T, *, pages: tuple[Span, ...], reads: tuple[Residency, ...] = (), on_end: OnEnd[A]) -> None:
        """Takes a reference to every page and checkpoint named, and submits the task."""
        self._tree.retain(pages)
        for residency in reads:
            self._tree.pin(residency)
        self._running[task.job] = _Running(task=task, started_s=self._clock.now(), pages=pages, reads=reads, on_end=on_end)
        self._executor.submit(task)

    def apply(self) -> list[A]:
        """Ends every job answered since the last call; returns the answers that count.

        Raises the exception of the first that fails: the others are kept for the next call.
        """
        self._given += self._executor.answers()
        while self._given:
            answer = self._given.popleft()
            if self.settle(answer):
                self._applied.append(answer)
        applied, self._applied = self._applied, []
        return applied

    def settle(self, answer: A) -> bool:
        """Ends one job; False if it was overdue or withdrawn before."""
        running = self._running.pop(answer.job)
        try:
            self._tell(running, End.ANSWERED, answer)
        finally:
            if self._before_release is not None:
                self._before_release(running.task, answer)
            self._let_go(running)
        return not running.given_up

    def withdraw(self, job: JobId) -> bool:
        """Cancels a job that no rank has begun. False if a rank has begun it, or it has ended."""
        if job not in self._running or not self._executor.withdraw(job):
            return False
        running = self._running.pop(job)
        try:
            self._tell(running, End.WITHDRAWN, None)
        finally:
            self._let_go(running)
        return True

    def withdraw_all(self) -> int:
        """Cancels every job that no rank has begun; returns their number."""
        return sum([self.withdraw(job) for job in list(self._running) if not self._running[job].given_up])

    def take_back_all(self) -> None:
        """Ends all jobs of ranks that are gone: those that were answered count, the others are withdrawn."""
        self.apply()
        for job in list(self._running):
            withdrawn = self.withdraw(job)
            assert withdrawn, f"job {job} may still be carried out"

    def give_up_overdue(self, timeout_s: float) -> dict[JobId, End]:
        """Ends jobs on which a rank has made no progress for this long, for all ranks; returns how each ended.

        Jobs that no rank has begun are withdrawn. The others keep their pages until that rank answers.
        """
        now = self._clock.now()
        if now < self._next_look_s:
            return {}
        self._next_look_s = now + timeout_s * LOOK_SHARE
        latest_s, overdue = now - timeout_s, []
        for job, running in self._running.items():
            if running.started_s > latest_s:
                break
            if not running.given_up and self._executor.progressed_s(job) <= latest_s:
                overdue.append((job, running))
        ends = {}
        for job, running in overdue:
            ends[job] = End.WITHDRAWN if self.withdraw(job) else End.OVERDUE
            if ends[job] is End.OVERDUE:
                running.given_up = True
                self._num_given_up += 1
                running.on_end(End.OVERDUE, None)
        return ends

    def drain(self, timeout_s: float) -> None:
        """Waits until everything was answered, or for this time."""
        self._executor.drain(timeout_s)

    def close(self) -> None:
        self._executor.close()

    def _tell(self, running: _Running[T, A], end: End, answer: A | None) -> None:
        """Reports the end of a job to its caller, unless it was reported as overdue before."""
        if running.given_up:
            self._num_given_up -= 1
        else:
            running.on_end(end, answer)

    def _let_go(self, running: _Running[T, A]) -> None:
        for residency in running.reads:
            self._tree.unpin(residency)
        self._tree.release_all(running.pages)
