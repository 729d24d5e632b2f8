"""Runs store operations on every rank's worker and brings home what came of them. Decides nothing, applies nothing.

Questions, reads and writes have threads of their own, so that no request waits behind a backup, nor a question behind the
reads of somebody else. Writes of a rank run in order, on one thread by default: parents before children. A thread before
that one seals what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from stepwell.base.clock import Clock
from stepwell.base.ids import JobId
from stepwell.base.store_op import FindItems, ItemStatus, Outcome, PutCheckpoint, PutPages, Reply, StoreOp, joint, num_items
from stepwell.jobs.workers import Answer, Line, RankJobs
from stepwell.transfer.store_worker import StoreWorker


class StoreExecutor(Protocol):
    """Takes operations and gives back replies. Called on the brain's thread; only `answer` and `drain` wait."""

    def submit(self, op: StoreOp) -> None: ...

    def replies(self) -> list[Reply]:
        """Everything that was answered since the last call, each operation once."""
        ...

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        """One operation's reply, before its turn: waits at most so long for it, then None. `replies` will not have it again."""
        ...

    def withdraw(self, job: JobId) -> bool:
        """Takes back an operation that no rank has begun: it will not be answered. False when one has, or all have."""
        ...

    def progressed_s(self, job: JobId) -> float:
        """When the rank that is furthest behind with an operation last got on: began it, or something before it in line.
        Minus infinity where nobody knows.
        """
        ...

    def drain(self, timeout_s: float) -> None:
        """Waits until everything submitted was answered, or for so long."""
        ...

    def close(self) -> None:
        """Takes no more and lets its threads end; does not wait for one that hangs."""
        ...


class ThreadStoreExecutor:
    """Worker threads for each rank."""

    def __init__(self, ranks: Sequence[StoreWorker], clock: Clock, *, readers: int = 4, writers: int = 1) -> None:
        assert ranks, "an executor needs at least one rank's worker"
        self._ranks = ranks
        self._clock = clock
        self._asking = [Line(f"ask{i}", clock) for i in range(len(ranks))]
        self._reading = [Line(f"read{i}", clock, threads=readers) for i in range(len(ranks))]
        self._sealing = [Line(f"seal{i}", clock) for i in range(len(ranks))]
        self._writing = [Line(f"write{i}", clock, threads=writers) for i in range(len(ranks))]
        self._jobs: RankJobs[Outcome] = RankJobs(clock)

    def submit(self, op: StoreOp) -> None:
        puts = isinstance(op.task, (PutPages, PutCheckpoint))
        lines = self._sealing if puts else self._asking if isinstance(op.task, FindItems) else self._reading
        self._jobs.open(op.job, lines, called_off=_called_off(op))
        for rank, (worker, line) in enumerate(zip(self._ranks, lines, strict=True)):
            if puts:
                line.submit(partial(self._seal, rank, op))
            else:
                self._jobs.enqueue(op.job, rank, line, partial(attempt, worker, op))

    def replies(self) -> list[Reply]:
        return [_reply(answer) for answer in self._jobs.answers()]

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        answer = self._jobs.answer(job, timeout_s)
        return _reply(answer) if answer is not None else None

    def withdraw(self, job: JobId) -> bool:
        return self._jobs.withdraw(job)

    def progressed_s(self, job: JobId) -> float:
        return self._jobs.progressed_s(job)

    def drain(self, timeout_s: float) -> None:
        self._jobs.drain(timeout_s)

    def close(self) -> None:
        for sealing, writing in zip(self._sealing, self._writing, strict=True):
            sealing.submit(writing.close)  # behind everything that is still to be written
        for line in (*self._asking, *self._reading, *self._sealing):
            line.close()

    def _seal(self, rank: int, op: StoreOp) -> None:
        """The first half of a put. When it is over the operation has not begun yet, and can be taken back."""
        started_s = self._clock.now()
        put = self._jobs.prepare(op.job, rank, partial(sealed, self._ranks[rank], op))
        if put is None:
            return  # withdrawn
        self._jobs.enqueue(op.job, rank, self._writing[rank], put, before_s=self._clock.now() - started_s)


def attempt(worker: StoreWorker, op: StoreOp) -> Outcome:
    """One rank's try at an operation. Whatever goes wrong comes home as an outcome."""
    return _safely(op, lambda: worker.run(op.namespace, op.task, op.cancelled))


def sealed(worker: StoreWorker, op: StoreOp) -> Callable[[], Outcome]:
    """The first half of one rank's try at a put; what is returned is the other. Both bring home what goes wrong."""
    task, found = op.task, []
    assert isinstance(task, (PutPages, PutCheckpoint)), f"nothing of {task} is to be sealed"

    def first() -> Outcome:
        found.append(worker.seal(op.namespace, task))
        return Outcome(statuses=())

    went_wrong = _safely(op, first)
    return lambda: _safely(op, lambda: worker.put(found[0], op.cancelled)) if found else went_wrong


def _reply(answer: Answer[Outcome]) -> Reply:
    return Reply(job=answer.job, outcome=joint(answer.outcomes), took_s=answer.took_s)


def _safely(op: StoreOp, work: Callable[[], Outcome]) -> Outcome:
    if op.cancelled():
        return _called_off(op)
    try:
        return work()
    except BaseException as error:  # the edge to somebody else's code: a failure comes home as a value, and the thread lives on
        return Outcome(statuses=(ItemStatus.FAILED,) * num_items(op.task), error=f"{type(error).__name__}: {error}")


def _called_off(op: StoreOp) -> Outcome:
    return Outcome(statuses=(ItemStatus.CANCELLED,) * num_items(op.task))
