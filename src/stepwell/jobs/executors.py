"""Runs copies and store operations on every rank, on worker threads, and returns their results. Decides nothing.

A job is complete when every rank has answered; if one rank fails, the job fails. Exceptions of any kind are caught here and
become answers that keep their text.

Copies that a request waits for and saves have separate threads. So have store queries, reads and writes: no request waits behind
a backup, and no query behind the reads of another request. Writes of a rank run in order, on one thread by default: parents
before children. A thread before that one seals the next put. Small puts that were sealed while another was being written go to
the store together: a durable store syncs once for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from threading import Lock
from typing import NamedTuple, Protocol

from stepwell.base.ids import JobId
from stepwell.base.meters import Clock, SystemClock
from stepwell.base.tasks import (
    Completion,
    FindItems,
    ItemStatus,
    Outcome,
    Plan,
    Purpose,
    PutCheckpoint,
    PutPages,
    Relevel,
    Reply,
    StoreOp,
    joint,
    num_items,
)
from stepwell.jobs.jobs import DoneAtOnce, JobExecutor
from stepwell.jobs.workers import Answer, RankJobs, WorkQueue
from stepwell.store.api import never
from stepwell.transfer.copy_engine import CopyEngine, Work
from stepwell.transfer.store_worker import Sealed, StoreWorker, goes_with

Cancelled = Callable[[], bool]  # may become true at any time, as seen from a worker

# ---- copies -------------------------------------------------------------------------------------


class Arriving(Protocol):
    """A copy to the device that has begun, or is being queued there: later work on the device may wait for it layer by layer."""

    def wait(self, state: str, layer: int) -> None:
        """Makes what the calling thread queues on the device from now on wait for one layer of a state.

        Blocks until the layer's copies are queued, and raises TimeoutError if they never are.
        """
        ...


Arrivals = Callable[[JobId], Arriving | None]  # None for a job that has not begun, or must be waited for as a whole


class CopyExecutor(JobExecutor[Plan, Completion], Protocol):
    """Accepts plans and returns completions, on the cache's thread; only `drain` waits."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks that carry out every plan."""
        ...


class ThreadCopyExecutor:
    """Worker threads for each rank: some for copies that a request waits for, one for saves, which may take longer."""

    def __init__(self, ranks: Sequence[CopyEngine], clock: Clock | None = None, *, workers_per_rank: int = 2) -> None:
        assert ranks, "an executor needs at least one rank's copy engine"
        clock = clock or SystemClock()
        self._ranks = ranks
        self._urgent = [WorkQueue(f"copy{i}", clock, threads=workers_per_rank) for i in range(len(ranks))]
        self._saving = [WorkQueue(f"save{i}", clock) for i in range(len(ranks))]
        self._jobs: RankJobs[str | None] = RankJobs(clock)

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def submit(self, plan: Plan) -> None:
        lines = self._saving if plan.purpose is Purpose.SAVE and not plan.awaited else self._urgent
        self._jobs.open(plan.job, lines, called_off="it was cancelled")
        for rank, (copy_engine, line) in enumerate(zip(self._ranks, lines, strict=True)):
            self._jobs.enqueue(plan.job, rank, line, partial(attempt_copy, rank, begin_copy(copy_engine, plan)))

    def answers(self) -> list[Completion]:
        answers = self._jobs.answers()
        return [Completion(job=each.job, error=next(filter(None, each.outcomes), None)) for each in answers]

    def withdraw(self, job: JobId) -> bool:
        return self._jobs.withdraw(job)

    def progressed_s(self, job: JobId) -> float:
        return self._jobs.progressed_s(job)

    def wake_by(self, wake: Callable[[], None]) -> bool:
        self._jobs.wake_by(wake)
        return True

    def drain(self, timeout_s: float) -> None:
        self._jobs.drain(timeout_s)

    def close(self) -> None:
        for line in (*self._urgent, *self._saving):
            line.close()


class InlineCopyExecutor(DoneAtOnce[Completion]):
    """Runs each plan where it is submitted: for tools that need no overlap."""

    def __init__(self, ranks: Sequence[CopyEngine]) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def submit(self, plan: Plan) -> None:
        errors = [attempt_copy(rank, begin_copy(copy_engine, plan)) for rank, copy_engine in enumerate(self._ranks)]
        self._done.append(Completion(job=plan.job, error=next(filter(None, errors), None)))


def begin_copy(copy_engine: CopyEngine, plan: Plan) -> Work:
    """Passes a plan to a rank. A copy engine that fails to begin counts like one that fails to copy."""
    try:
        return copy_engine.begin(plan)
    except Exception as error:  # boundary to code of others: a failure is returned as a value
        failure = error

    def fail() -> None:
        raise failure

    return fail


def attempt_copy(rank: int, work: Work) -> str | None:
    """One rank's attempt at a plan: None if it worked, else the error."""
    try:
        work()
    except BaseException as error:  # worker boundary: a failure is returned as a value, and the thread lives on
        return f"rank {rank}: {type(error).__name__}: {error}"
    return None


# ---- the store ----------------------------------------------------------------------------------


class StoreExecutor(JobExecutor[StoreOp, Reply], Protocol):
    """Accepts store operations and returns replies. Called on the cache's thread; only `answer` and `drain` wait."""

    def cancel(self, job: JobId) -> None:
        """Asks ranks that have begun an operation to stop as soon as they can. It is answered in any case."""
        ...

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        """One operation's reply, out of turn; None if it does not come in time. `answers` will not return it again."""
        ...


class ThreadStoreExecutor:
    """Worker threads for each rank."""

    def __init__(self, ranks: Sequence[StoreWorker], clock: Clock, *, readers: int = 4, writers: int = 1) -> None:
        assert ranks, "an executor needs at least one rank's worker"
        self._ranks = ranks
        self._clock = clock
        self._asking = [WorkQueue(f"ask{i}", clock) for i in range(len(ranks))]
        self._reading = [WorkQueue(f"read{i}", clock, threads=readers) for i in range(len(ranks))]
        self._sealing = [WorkQueue(f"seal{i}", clock) for i in range(len(ranks))]
        self._writing = [WorkQueue(f"write{i}", clock, threads=writers) for i in range(len(ranks))]
        self._sealed: list[deque[_SealedOp]] = [deque() for _ in ranks]
        self._sealed_lock = Lock()
        self._jobs: RankJobs[Outcome] = RankJobs(clock)
        self._cancelled: set[JobId] = set()

    def submit(self, op: StoreOp) -> None:
        puts = isinstance(op.task, (PutPages, PutCheckpoint))
        lines = self._sealing if puts else self._asking if isinstance(op.task, (FindItems, Relevel)) else self._reading
        self._jobs.open(op.job, lines, called_off=_called_off(op))
        for rank, (worker, line) in enumerate(zip(self._ranks, lines, strict=True)):
            if puts:
                line.submit(partial(self._seal, rank, op))
            else:
                self._jobs.enqueue(op.job, rank, line, partial(attempt_op, worker, op, self._is_cancelled(op)))

    def answers(self) -> list[Reply]:
        return [self._reply(answer) for answer in self._jobs.answers()]

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        answer = self._jobs.answer(job, timeout_s)
        return self._reply(answer) if answer is not None else None

    def cancel(self, job: JobId) -> None:
        if self._jobs.is_open(job):
            self._cancelled.add(job)

    def withdraw(self, job: JobId) -> bool:
        taken_back = self._jobs.withdraw(job)
        if taken_back:
            self._cancelled.discard(job)
        return taken_back

    def progressed_s(self, job: JobId) -> float:
        return self._jobs.progressed_s(job)

    def wake_by(self, wake: Callable[[], None]) -> bool:
        self._jobs.wake_by(wake)
        return True

    def drain(self, timeout_s: float) -> None:
        self._jobs.drain(timeout_s)

    def close(self) -> None:
        for sealing, writing in zip(self._sealing, self._writing, strict=True):
            sealing.submit(writing.close)  # behind everything that is still to be written
        for line in (*self._asking, *self._reading, *self._sealing):
            line.close()

    def _seal(self, rank: int, op: StoreOp) -> None:
        """The first half of a put. After it the operation has not begun yet, and can still be withdrawn."""
        started_s = self._clock.now()
        found = self._jobs.prepare(op.job, rank, partial(seal_op, self._ranks[rank], op, self._is_cancelled(op)))
        if found is None:
            return  # withdrawn
        with self._sealed_lock:
            self._sealed[rank].append(_SealedOp(op, found, self._clock.now() - started_s))
        self._jobs.move(op.job, rank, self._writing[rank])
        self._writing[rank].submit(partial(self._write, rank))

    def _write(self, rank: int) -> None:
        """The second half: writes the put that was sealed first, with later ones that go with it."""
        group = self._next_group(rank)
        outcomes = put_ops(self._ranks[rank], group, self._cancelled)
        for each, outcome in zip(group, outcomes, strict=True):
            self._jobs.end(each.op.job, rank, outcome, before_s=each.before_s)

    def _next_group(self, rank: int) -> list[_SealedOp]:
        """Begins puts to be written in one call; empty if other threads took all of them, or they were withdrawn."""
        group: list[_SealedOp] = []
        size_bytes = 0
        with self._sealed_lock:
            line = self._sealed[rank]
            while line and (not group or _goes_with(group[0], line[0], size_bytes)):
                each = line.popleft()
                if self._jobs.begin(each.op.job, rank):
                    group.append(each)
                    size_bytes += each.sealed.size_bytes if isinstance(each.sealed, Sealed) else 0
        return group

    def _is_cancelled(self, op: StoreOp) -> Cancelled:
        return partial(self._cancelled.__contains__, op.job)

    def _reply(self, answer: Answer[Outcome]) -> Reply:
        self._cancelled.discard(answer.job)
        return Reply(job=answer.job, outcome=joint(answer.outcomes), took_s=answer.took_s)


def attempt_op(worker: StoreWorker, op: StoreOp, cancelled: Cancelled = never) -> Outcome:
    """One rank's attempt at an operation. Any failure is returned as an outcome."""
    return _safely(op, cancelled, lambda: worker.run(op.namespace, op.task, cancelled))


class _SealedOp(NamedTuple):
    """A put that waits to be written on one rank; or, if sealing failed, to be answered in its turn."""

    op: StoreOp
    sealed: Sealed | Outcome
    before_s: float  # time spent on it already


def _goes_with(first: _SealedOp, each: _SealedOp, before_bytes: int) -> bool:
    if not isinstance(first.sealed, Sealed) or not isinstance(each.sealed, Sealed):
        return False
    return goes_with(first.sealed, each.sealed, before_bytes=before_bytes)


def seal_op(worker: StoreWorker, op: StoreOp, cancelled: Cancelled) -> Sealed | Outcome:
    """The first half of one rank's attempt at a put; the outcome if that ends it."""
    task, found = op.task, []
    assert isinstance(task, (PutPages, PutCheckpoint)), f"{task} has nothing to seal"

    def first() -> Outcome:
        found.append(worker.seal(op.namespace, task))
        return Outcome(statuses=())

    went_wrong = _safely(op, cancelled, first)
    return found[0] if found else went_wrong


def put_ops(worker: StoreWorker, group: Sequence[_SealedOp], cancelled: Container[JobId]) -> list[Outcome]:
    """The second half, for puts that go together: the outcome of each. If the store fails them all, each is tried alone: the
    failure of one call must not count as several, and one put must not fail another.
    """
    ends = [each.sealed if isinstance(each.sealed, Outcome) else _called_off(each.op) for each in group]
    wanted = {
        at: each.sealed for at, each in enumerate(group) if isinstance(each.sealed, Sealed) and each.op.job not in cancelled
    }
    if not wanted:
        return ends
    alone = group[next(iter(wanted))].op.job if len(wanted) == 1 else None  # several are one batch, which is not interrupted
    try:
        written = worker.put(list(wanted.values()), lambda: alone in cancelled)
    except BaseException as error:  # as in `_safely`
        if alone is None and isinstance(error, Exception):
            return [put_ops(worker, [each], cancelled)[0] for each in group]
        written = [_failed(group[at].op, error) for at in wanted]
    for at, outcome in zip(wanted, written, strict=True):
        ends[at] = outcome
    return ends


def _safely(op: StoreOp, cancelled: Cancelled, work: Callable[[], Outcome]) -> Outcome:
    if cancelled():
        return _called_off(op)
    try:
        return work()
    except BaseException as error:  # boundary to code of others: a failure is returned as a value
        return _failed(op, error)


def _failed(op: StoreOp, error: BaseException) -> Outcome:
    return Outcome(statuses=(ItemStatus.FAILED,) * num_items(op.task), error=f"{type(error).__name__}: {error}")


def _called_off(op: StoreOp) -> Outcome:
    return Outcome(statuses=(ItemStatus.CANCELLED,) * num_items(op.task))
