"""Store executors whose answers a test controls: by order, or by a clock that it moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from stepwell.base.ids import JobId
from stepwell.base.meters import ManualClock
from stepwell.base.tasks import ItemStatus, Outcome, PutCheckpoint, PutPages, Reply, StoreOp, joint, num_items
from stepwell.jobs.executors import attempt_op
from stepwell.testing.scripted import Scripted
from stepwell.transfer.store_worker import StoreWorker


def _carried_out(ranks: Sequence[StoreWorker], op: StoreOp, cancelled: set[JobId]) -> Outcome:
    """What an operation comes to on all ranks together."""
    return joint([attempt_op(worker, op, partial(cancelled.__contains__, op.job)) for worker in ranks])


class ScriptedStoreExecutor(Scripted[StoreOp, Reply]):
    """Uses the store when a test finishes an operation."""

    def __init__(self, ranks: Sequence[StoreWorker]) -> None:
        super().__init__()
        self._ranks = ranks
        self._cancelled: set[JobId] = set()
        self.answers_in_time = True  # to a caller that waits for one answer

    def op(self, job: JobId) -> StoreOp:
        return self._tasks[job]

    def finish(self, job: JobId, *, took_s: float = 0.0, status: ItemStatus | None = None) -> None:
        """Carries out one operation on every rank; with a status, answers without doing anything."""
        op = self._tasks.pop(job)
        if status is None:
            outcome = _carried_out(self._ranks, op, self._cancelled)
        else:
            outcome = Outcome(
                statuses=(status,) * num_items(op.task), error="made to fail" if status is ItemStatus.FAILED else None
            )
        self._done.append(Reply(job=job, outcome=outcome, took_s=took_s))

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        """Answers at once, or not in time where `answers_in_time` is false."""
        if not self.answers_in_time:
            return None
        self.finish(job)
        return self._done.pop()

    def cancel(self, job: JobId) -> None:
        self._cancelled.add(job)


class TimedStoreExecutor:
    """Answers each operation when the clock has passed the time its store took, on `readers` and `writers` threads.

    The stores of its workers sleep by `sleep`, which only adds up. An operation that has begun is not interrupted.
    """

    def __init__(self, clock: ManualClock, *, readers: int = 4, writers: int = 1) -> None:
        self._clock = clock
        self._ranks: Sequence[StoreWorker] = ()
        self._queues: dict[bool, list[tuple[float, StoreOp]]] = {True: [], False: []}  # by whether they write
        self._free_s = {True: [0.0] * writers, False: [0.0] * readers}
        self._moved_s = {True: -inf, False: -inf}  # when a queue's latest operation began
        self._begun_s: dict[JobId, float] = {}
        self._done: list[tuple[float, Reply]] = []
        self._cancelled: set[JobId] = set()
        self._slept_s = 0.0

    def serve(self, ranks: Sequence[StoreWorker]) -> None:
        """Gives it its workers, whose stores were made with its `sleep`."""
        self._ranks = ranks

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds

    def submit(self, op: StoreOp) -> None:
        self._queues[isinstance(op.task, (PutPages, PutCheckpoint))].append((self._clock.now(), op))

    def answers(self) -> list[Reply]:
        self._work()
        now = self._clock.now()
        due = sorted((each for each in self._done if each[0] <= now), key=lambda each: each[0])
        self._done = [each for each in self._done if each[0] > now]
        return [reply for _, reply in due]

    def next_answer_s(self) -> float:
        """When the next answer is due: infinity for never."""
        self._work()
        return min((at_s for at_s, _ in self._done), default=float("inf"))

    def answer(self, job: JobId, timeout_s: float) -> Reply | None:
        """The answer, if it is due so soon. The clock stays where it is."""
        self._work()
        latest_s = self._clock.now() + timeout_s
        due = next((each for each in self._done if each[1].job == job and each[0] <= latest_s), None)
        if due is None:
            return None
        self._done.remove(due)
        return due[1]

    def cancel(self, job: JobId) -> None:
        self._cancelled.add(job)

    def withdraw(self, job: JobId) -> bool:
        for queue in self._queues.values():
            for waiting in queue:
                if waiting[1].job == job:
                    queue.remove(waiting)
                    return True
        return False

    def progressed_s(self, job: JobId) -> float:
        for writes, queue in self._queues.items():
            if any(op.job == job for _, op in queue):
                return self._moved_s[writes]
        return self._begun_s.get(job, -inf)

    def wake_by(self, wake: Callable[[], None]) -> bool:
        return False  # the clock decides when something is answered

    def drain(self, timeout_s: float) -> None:
        self._clock.advance(timeout_s)

    def close(self) -> None:
        pass

    def _work(self) -> None:
        """Starts every operation that is due."""
        for writes, queue in self._queues.items():
            free = self._free_s[writes]
            while queue:
                submitted_s, op = queue[0]
                worker = min(range(len(free)), key=free.__getitem__)
                started_s = max(submitted_s, free[worker])
                if started_s > self._clock.now():
                    break
                queue.pop(0)
                self._moved_s[writes] = self._begun_s[op.job] = started_s
                took_s = self._run(op, started_s)
                free[worker] = started_s + took_s

    def _run(self, op: StoreOp, started_s: float) -> float:
        self._slept_s = 0.0
        outcome = _carried_out(self._ranks, op, self._cancelled)
        self._done.append((started_s + self._slept_s, Reply(job=op.job, outcome=outcome, took_s=self._slept_s)))
        return self._slept_s
