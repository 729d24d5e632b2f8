"""Copies on all ranks, as the cache knows them. The engine's thread."""

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
        """Passes on what ranks have answered. Raises RankLost."""
        ...

    def end(self) -> None:
        """Ends all of them."""
        ...


@dataclass(slots=True, eq=False)
class _Copying:
    owing: set[int]
    error: str | None = None


class RankedCopies:
    """A CopyExecutor whose ranks are worker processes. What was under way when a rank was lost is taken back, not answered."""

    def __init__(self, workers: CopyingRanks) -> None:
        self._workers = workers
        self._open: dict[JobId, _Copying] = {}
        self._waiting: dict[JobId, Plan] = {}  # of those, for ranks to run
        self._done: deque[Completion] = deque()
        self._moved_s = [monotonic()] * workers.size  # when each rank last ended a copy

    @property
    def num_ranks(self) -> int:
        """One, as far as host memory and stores go: all ranks share it."""
        return 1

    def submit(self, plan: Plan) -> None:
        now = monotonic()
        if not self._open:
            self._moved_s = [now] * self._workers.size
        self._open[plan.job] = _Copying(set(range(self._workers.size)))
        if not self._workers.running:
            self._waiting[plan.job] = plan
            return
        with suppress(RankLost):  # whoever runs passes is told, and takes it back
            self._workers.send_all(pack_plan(plan))

    def send_waiting(self) -> None:
        """Ranks run now, and are given what was submitted meanwhile. Raises RankLost."""
        self._moved_s = [monotonic()] * self._workers.size
        while self._waiting:
            job = next(iter(self._waiting))
            self._workers.send_all(pack_plan(self._waiting.pop(job)))

    def answered(self, rank: int, message: Message) -> None:
        """A rank has ended its part. Raises ValueError for what nobody asked it."""
        job = JobId(message.number("job"))
        copying = None if job in self._waiting else self._open.get(job)
        if copying is None or rank not in copying.owing:
            raise ValueError("a copy that it was not asked for")
        if message.fields.get("error") is not None:
            copying.error = copying.error or f"rank {rank}: {message.text('error')}"
        copying.owing.discard(rank)
        self._moved_s[rank] = monotonic()
        if not copying.owing:
            del self._open[job]
            self._done.append(Completion(job=job, error=copying.error))

    def answers(self) -> list[Completion]:
        self._take(0.0)
        return [self._done.popleft() for _ in range(len(self._done))]

    def withdraw(self, job: JobId) -> bool:
        """Only what was not sent, or was sent to ranks that are no more: anything else may have begun."""
        if self._waiting.pop(job, None) is None and self._workers.running:
            return False
        return self._open.pop(job, None) is not None

    def progressed_s(self, job: JobId) -> float:
        copying = None if job in self._waiting else self._open.get(job)
        return monotonic() if copying is None else min(self._moved_s[rank] for rank in copying.owing)

    def wake_by(self, wake: Callable[[], None]) -> bool:
        return False  # ranks answer over sockets, which the thread that asks reads

    def drain(self, timeout_s: float) -> None:
        """Before the end: what ranks have begun is waited for. Once one is lost all are ended, and what they owe has failed."""
        deadline_s = monotonic() + timeout_s
        while self._open and self._workers.running and (left_s := deadline_s - monotonic()) > 0:
            if not self._take(left_s):
                self._workers.end()  # nothing may write to the host any more
        if not self._workers.running:
            self._done += [Completion(job=job, error="its ranks are gone") for job in self._open]
            self._open.clear()
            self._waiting.clear()

    def close(self) -> None:
        pass  # the workers are closed by whoever has them

    def _take(self, timeout_s: float) -> bool:
        try:
            if self._workers.running:
                self._workers.take(timeout_s)
        except RankLost:
            return False  # whoever runs passes is told
        return True
