"""Runs plans on every rank's hands and brings home what came of them. Decides nothing, applies nothing.

A plan is complete when every rank has answered; one rank's failure is everybody's. The only place where an
exception of any kind is caught: it becomes a Completion that keeps its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Protocol

from stepwell.base.ids import JobId
from stepwell.base.plan import Completion, Plan, Purpose
from stepwell.transfer.hands import Hands, Work


class Executor(Protocol):
    """Takes plans and gives back completions; both on the brain's thread, neither ever blocks."""

    @property
    def num_ranks(self) -> int:
        """How many ranks carry out every plan."""
        ...

    def submit(self, plan: Plan) -> None: ...

    def completed(self) -> list[Completion]:
        """Everything that completed since the last call, each plan once."""
        ...

    def close(self) -> None:
        """Waits for what runs, and takes no more."""
        ...


class _Tally:
    """How many ranks still owe an answer for a plan, and the first thing that went wrong."""

    def __init__(self, ranks: int) -> None:
        self.open = ranks
        self.error: str | None = None


class ThreadExecutor:
    """Worker threads for each rank: some for what a request waits for, one for saves, which may take their time."""

    def __init__(self, ranks: Sequence[Hands], *, workers_per_rank: int = 2) -> None:
        assert ranks, "an executor needs at least one rank's hands"
        self._ranks = ranks
        self._urgent = [ThreadPoolExecutor(workers_per_rank, thread_name_prefix=f"stepwell-rank{i}") for i in range(len(ranks))]
        self._saving = [ThreadPoolExecutor(1, thread_name_prefix=f"stepwell-save{i}") for i in range(len(ranks))]
        self._lock = Lock()
        self._tallies: dict[JobId, _Tally] = {}
        self._done: deque[Completion] = deque()

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def submit(self, plan: Plan) -> None:
        with self._lock:
            self._tallies[plan.job] = _Tally(len(self._ranks))
        pools = self._saving if plan.purpose is Purpose.SAVE else self._urgent
        for rank, (hands, pool) in enumerate(zip(self._ranks, pools, strict=True)):
            pool.submit(self._run, rank, plan, begin(hands, plan))

    def completed(self) -> list[Completion]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        for pool in (*self._urgent, *self._saving):
            pool.shutdown(wait=True)

    def _run(self, rank: int, plan: Plan, work: Work) -> None:
        error = attempt(rank, work)
        with self._lock:
            tally = self._tallies[plan.job]
            tally.open -= 1
            tally.error = tally.error or error
            if not tally.open:
                del self._tallies[plan.job]
                self._done.append(Completion(job=plan.job, error=tally.error))


class InlineExecutor:
    """Runs each plan where it is submitted: for tools that need no overlap."""

    def __init__(self, ranks: Sequence[Hands]) -> None:
        self._ranks = ranks
        self._done: list[Completion] = []

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def submit(self, plan: Plan) -> None:
        errors = [attempt(rank, begin(hands, plan)) for rank, hands in enumerate(self._ranks)]
        self._done.append(Completion(job=plan.job, error=next(filter(None, errors), None)))

    def completed(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


def begin(hands: Hands, plan: Plan) -> Work:
    """Hands a plan to a rank. Hands that cannot even begin fail like hands that cannot copy."""
    try:
        return hands.begin(plan)
    except Exception as error:  # the edge to somebody else's code: a failure comes home as a value
        failure = error

    def fail() -> None:
        raise failure

    return fail


def attempt(rank: int, work: Work) -> str | None:
    """One rank's try at a plan: None when it worked, else what went wrong."""
    try:
        work()
    except Exception as error:  # the worker boundary: likewise
        return f"rank {rank}: {type(error).__name__}: {error}"
    return None
