"""Copies on all ranks, as one CopyExecutor for the cache. The engine's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from stepwell.base.ids import JobId
from stepwell.base.tasks import Completion, Plan
from stepwell.engine.workers.messages import pack_plan
from stepwell.jobs.channel import Message
from stepwell.jobs.processes import RankLost


class CopyingRanks(Protocol):
    """Worker processes that copy: `RankWorkers`."""

    @property
    def size(self) -> int: ...
    @property
    def running(self) -> bool: ...
    def send_all(self, message: Message) -> None:
        """Raises RankLost."""
        ...

    def take(self, timeout_s: float = 0.0) -> None:
        """Handles answers of ranks. Raises RankLost."""
        ...

    def end(self) -> None:
        """Ends all ranks."""
        ...


@dataclass(slots=True, eq=False)
class _Copying:
    missing: set[int]
    error: str | None = None


class RankedCopies:
    """A CopyExecutor whose ranks are worker processes. Copies in flight when a rank is lost are withdrawn, not answered."""

    def __init__(self, workers: CopyingRanks) -> None:
        self._workers = workers
        self._open: dict[JobId, _Copying] = {}
        self._waiting: dict[JobId, Plan] = {}  # of the open jobs, those not sent yet
        self._done: deque[Completion] = deque()
        self._moved_s = [monotonic()] * workers.size  # when each rank last finished a copy

    @property
    def num_ranks(self) -> int:
        """One: all ranks share host memory and stores."""
        return 1

    def submit(self, plan: Plan) -> None:
        now = monotonic()
        if not self._open:
            self._moved_s = [now] * self._workers.size
        self._open[plan.job] = _Copying(set(range(self._workers.size)))
        if not self._workers.running:
            self._waiting[plan.job] = plan
            return
        with suppress(RankLost):  # the runner of passes reports it, and the cache withdraws the copy
            self._workers.send_all(pack_plan(plan))

    def send_waiting(self) -> None:
        """Sends what was submitted before the ranks were running. Raises RankLost."""
        self._moved_s = [monotonic()] * self._workers.size
        while self._waiting:
            job = next(iter(self._waiting))
            self._workers.send_all(pack_plan(self._waiting.pop(job)))

    def answered(self, rank: int, message: Message) -> None:
        """A rank has finished its part. Raises ValueError for a copy that it was not sent."""
        job = JobId(message.number("job"))
        copying = None if job in self._waiting else self._open.get(job)
        if copying is None or rank not in copying.missing:
            raise ValueError("a copy that was not requested")
        if message.fields.get("error") is not None:
            copying.error = copying.error or f"rank {rank}: {message.text('error')}"
        copying.missing.discard(rank)
        self._moved_s[rank] = monotonic()
        if not copying.missing:
            del self._open[job]
            self._done.append(Completion(job=job, error=copying.error))

    def answers(self) -> list[Completion]:
        self._take(0.0)
        return [self._done.popleft() for _ in range(len(self._done))]

    def withdraw(self, job: JobId) -> bool:
        """Only a copy that was not sent, or whose ranks have ended: any other may have begun."""
        if self._waiting.pop(job, None) is None and self._workers.running:
            return False
        return self._open.pop(job, None) is not None

    def progressed_s(self, job: JobId) -> float:
        copying = None if job in self._waiting else self._open.get(job)
        return monotonic() if copying is None else min(self._moved_s[rank] for rank in copying.missing)

    def wake_by(self, wake: Callable[[], None]) -> bool:
        return False  # ranks answer over sockets, which the calling thread reads

    def drain(self, timeout_s: float) -> None:
        """Waits for copies in flight. If a rank is lost, all are ended and the rest of the copies fail."""
        deadline_s = monotonic() + timeout_s
        while self._open and self._workers.running and (left_s := deadline_s - monotonic()) > 0:
            if not self._take(left_s):
                self._workers.end()  # nothing may write to host memory from now on
        if not self._workers.running:
            self._done += [Completion(job=job, error="its ranks are gone") for job in self._open]
            self._open.clear()
            self._waiting.clear()

    def close(self) -> None:
        pass  # the owner of the workers closes them

    def _take(self, timeout_s: float) -> bool:
        try:
            if self._workers.running:
                self._workers.take(timeout_s)
        except RankLost:
            return False  # the runner of passes reports it
        return True
