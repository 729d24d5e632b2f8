"""Runs copies on every rank's copy engine and brings home what came of them. Decides nothing, applies nothing.

A plan is complete when every rank has answered; one rank's failure is everybody's. The only place where an
exception of any kind is caught: it becomes a Completion that keeps its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.ids import JobId
from stepwell.base.plan import Completion, Plan, Purpose
from stepwell.jobs.jobs import DoneAtOnce, JobExecutor
from stepwell.jobs.workers import RankJobs, WorkQueue
from stepwell.transfer.copy_engine import CopyEngine, Work


class CopyExecutor(JobExecutor[Plan, Completion], Protocol):
    """Takes plans and gives back completions, on the cache's thread; only `drain` waits."""

    @property
    def num_ranks(self) -> int:
        """How many ranks carry out every plan."""
        ...


class ThreadCopyExecutor:
    """Worker threads for each rank: some for what a request waits for, one for saves, which may take their time."""

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
        self._jobs.open(plan.job, lines, called_off="it was called off")
        for rank, (copy_engine, line) in enumerate(zip(self._ranks, lines, strict=True)):
            self._jobs.enqueue(plan.job, rank, line, partial(attempt, rank, begin(copy_engine, plan)))

    def answers(self) -> list[Completion]:
        return [Completion(job=each.job, error=next(filter(None, each.outcomes), None)) for each in self._jobs.answers()]

    def withdraw(self, job: JobId) -> bool:
        return self._jobs.withdraw(job)

    def progressed_s(self, job: JobId) -> float:
        return self._jobs.progressed_s(job)

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
        errors = [attempt(rank, begin(copy_engine, plan)) for rank, copy_engine in enumerate(self._ranks)]
        self._done.append(Completion(job=plan.job, error=next(filter(None, errors), None)))


def begin(copy_engine: CopyEngine, plan: Plan) -> Work:
    """Hands a plan to a rank. A copy engine that cannot even begin fails like one that cannot copy."""
    try:
        return copy_engine.begin(plan)
    except Exception as error:  # the edge to somebody else's code: a failure comes home as a value
        failure = error

    def fail() -> None:
        raise failure

    return fail


def attempt(rank: int, work: Work) -> str | None:
    """One rank's try at a plan: None when it worked, else what went wrong."""
    try:
        work()
    except BaseException as error:  # the worker boundary: likewise, and the thread lives on
        return f"rank {rank}: {type(error).__name__}: {error}"
    return None
