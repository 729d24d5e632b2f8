"""Jobs on worker threads, with one part for each rank: which ranks have begun, answered, or make no progress.

The common part of copies and store operations. Knows numbers and callables, never pages or keys; decides nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from queue import SimpleQueue
from threading import TIMEOUT_MAX, Condition, Lock, Thread
from typing import Generic, TypeVar
from weakref import finalize

from stepwell.base.ids import JobId
from stepwell.base.meters import Clock

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[], None]


class WorkQueue:
    """Daemon threads over one queue, started when there is work: work that hangs forever must not keep the process from ending.
    They end with the queue, when it is closed or garbage collected.
    """

    def __init__(self, name: str, clock: Clock, *, threads: int = 1) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._pulse = _Pulse(clock)
        self._name = f"stepwell-{name}"
        self._to_start = threads
        self._starts = Lock()  # any thread may submit, and the number of threads started equals that ended
        self._end = finalize(self, _end_threads, self._queue, threads)

    @property
    def moved_s(self) -> float:
        """When one of its threads last began or ended a piece of work."""
        return self._pulse.moved_s

    def submit(self, work: Work) -> None:
        """Queues work in any case: if the system has no more threads, the work waits until a later one starts a thread."""
        assert self._end.alive, f"{self._name} was closed"
        self._queue.put(work)
        if self._to_start:
            with self._starts:
                self._start()

    def _start(self) -> None:
        while self._to_start:
            try:
                Thread(target=_live, args=(self._queue, self._pulse), name=self._name, daemon=True).start()
            except RuntimeError as error:
                log.warning("a thread of %s could not be started: %s", self._name, error)
                return
            self._to_start -= 1

    def close(self) -> None:
        """Accepts no more work, and lets its threads end after everything in the queue."""
        self._end()


class _Pulse:
    """When the threads of a queue last made progress."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.moved_s = clock.now()

    def beat(self) -> None:
        self.moved_s = self._clock.now()


def _live(queue: SimpleQueue[Work | None], pulse: _Pulse) -> None:
    while (work := queue.get()) is not None:
        pulse.beat()
        work()
        del work  # and what it refers to, while there is no work
        pulse.beat()


def _end_threads(queue: SimpleQueue[Work | None], threads: int) -> None:
    for _ in range(threads):
        queue.put(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    """A job that every rank has answered, in the order of ranks. `took_s` excludes waiting in queues."""

    job: JobId
    outcomes: tuple[T, ...]
    took_s: float


class _Stage(Enum):
    WAITING = "waiting"
    BEGUN = "begun"
    ANSWERED = "answered"


class _Part(Generic[T]):
    """The state of one rank's part of a job."""

    def __init__(self, line: WorkQueue) -> None:
        self.line = line
        self.stage = _Stage.WAITING
        self.preparing = False  # it has not begun, but a check runs for it
        self.begun_s = 0.0
        self.outcome: T | None = None

    def answer(self, outcome: T) -> None:
        self.stage, self.outcome = _Stage.ANSWERED, outcome

    @property
    def moved_s(self) -> float:
        return self.line.moved_s if self.stage is _Stage.WAITING else self.begun_s


class _Job(Generic[T]):
    def __init__(self, lines: Sequence[WorkQueue], called_off: T) -> None:
        self.parts: list[_Part[T]] = [_Part(line) for line in lines]
        self.called_off = called_off
        self.took_s = 0.0


class RankJobs(Generic[T]):
    """Running jobs. All but `enqueue`, `prepare`, `move`, `begin` and `end` are for one thread, the cache's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = Condition()
        self._jobs: dict[JobId, _Job[T]] = {}
        self._answers: deque[Answer[T]] = deque()
        self._wake: Work = lambda: None

    def wake_by(self, wake: Work) -> None:
        """From now on calls `wake` with every answer, on the thread of the rank that was last. It must be quick."""
        self._wake = wake

    def open(self, job: JobId, lines: Sequence[WorkQueue], *, called_off: T) -> None:
        """Begins to track a job whose part on rank i waits in `lines[i]`. A rank that must not begin any more answers
        `called_off`.
        """
        with self._changed:
            self._jobs[job] = _Job(lines, called_off)

    def is_open(self, job: JobId) -> bool:
        """Whether it was neither answered nor withdrawn."""
        return job in self._jobs

    def prepare(self, job: JobId, rank: int, look: Callable[[], R]) -> R | None:
        """Runs a check before a rank's part, on the calling thread; None if the job was withdrawn. While it runs, the job cannot
        be withdrawn.
        """
        with self._changed:
            opened = self._jobs.get(job)
            if opened is None or opened.parts[rank].stage is not _Stage.WAITING:
                return None
            opened.parts[rank].preparing = True
        found = look()
        with self._changed:
            opened.parts[rank].preparing = False
        return found

    def enqueue(self, job: JobId, rank: int, line: WorkQueue, work: Callable[[], T], *, before_s: float = 0.0) -> None:
        """Queues a rank's part. `before_s` were spent on it already. From any thread."""
        self.move(job, rank, line)
        line.submit(partial(self._run, job, rank, work, before_s))

    def move(self, job: JobId, rank: int, line: WorkQueue) -> None:
        """From now on a rank's part waits in another queue. From any thread."""
        with self._changed:
            opened = self._jobs.get(job)
            if opened is not None:
                opened.parts[rank].line = line

    def begin(self, job: JobId, rank: int) -> bool:
        """Begins a rank's part, on the calling thread, which must `end` it; False if it was withdrawn."""
        with self._changed:
            opened = self._jobs.get(job)
            if opened is None or opened.parts[rank].stage is not _Stage.WAITING:
                return False
            part = opened.parts[rank]
            part.stage, part.begun_s = _Stage.BEGUN, self._clock.now()
            return True

    def end(self, job: JobId, rank: int, outcome: T, *, before_s: float = 0.0) -> None:
        """Answers for a rank's part, which it has begun."""
        with self._changed:
            opened = self._jobs[job]
            part = opened.parts[rank]
            opened.took_s = max(opened.took_s, self._clock.now() - part.begun_s + before_s)
            part.answer(outcome)
            self._settle(job, opened)

    def answers(self) -> list[Answer[T]]:
        """Everything that was answered since the last call, each job once."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def answer(self, job: JobId, timeout_s: float) -> Answer[T] | None:
        """One job's answer, out of turn: waits at most this long for it. `answers` will not return it again."""
        with self._changed:
            self._changed.wait_for(lambda: job not in self._jobs, _bounded(timeout_s))
            answer = next((each for each in self._answers if each.job == job), None)
            if answer is not None:
                self._answers.remove(answer)
            return answer

    def withdraw(self, job: JobId) -> bool:
        """Cancels a job that no rank has begun: it will not be answered. False if a rank has begun it, or all have answered."""
        with self._changed:
            opened = self._jobs.get(job)
            if opened is None:
                return False
            if all(part.stage is _Stage.WAITING and not part.preparing for part in opened.parts):
                self._end(job)
                return True
            for part in opened.parts:  # parts behind a rank that hangs need not be waited for
                if part.stage is _Stage.WAITING and not part.preparing:
                    part.answer(opened.called_off)
            self._settle(job, opened)
            return False

    def progressed_s(self, job: JobId) -> float:
        """When the rank that is furthest behind with a job last made progress: began it, or something before it in the queue."""
        with self._changed:
            opened = self._jobs.get(job)
            waiting = [part.moved_s for part in opened.parts if part.stage is not _Stage.ANSWERED] if opened is not None else []
        return min(waiting, default=self._clock.now())

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything was answered, or for this time. Returns whether everything was."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, _bounded(timeout_s))

    def _run(self, job: JobId, rank: int, work: Callable[[], T], before_s: float) -> None:
        if self.begin(job, rank):
            self.end(job, rank, work(), before_s=before_s)

    def _settle(self, job: JobId, opened: _Job[T]) -> None:
        """Completes the job with the last rank's answer."""
        if all(part.stage is _Stage.ANSWERED for part in opened.parts):
            outcomes = tuple(part.outcome for part in opened.parts)
            self._answers.append(Answer(job=job, outcomes=outcomes, took_s=opened.took_s))  # type: ignore[arg-type]
            self._end(job)
            self._wake()

    def _end(self, job: JobId) -> None:
        del self._jobs[job]
        self._changed.notify_all()


def _bounded(timeout_s: float) -> float:
    return min(max(timeout_s, 0.0), TIMEOUT_MAX)
