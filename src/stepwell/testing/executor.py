"""An executor whose every answer a test decides: late, out of order, or failed on one of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from stepwell.base.ids import JobId
from stepwell.base.tasks import Completion, Plan
from stepwell.jobs.executors import attempt_copy, begin_copy
from stepwell.transfer.copy_engine import CopyEngine, Work


class ScriptedExecutor:
    """Keeps plans until a test lets a rank answer. Bytes are copied at that moment, not before."""

    def __init__(self, ranks: Sequence[CopyEngine]) -> None:
        self._ranks = ranks
        self._plans: dict[JobId, Plan] = {}
        self._answers: dict[JobId, dict[int, str | None]] = {}
        self._work: dict[JobId, list[Work]] = {}
        self._done: list[Completion] = []
        self.num_submitted = 0

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def pending(self) -> tuple[JobId, ...]:
        """Jobs that some rank has not answered for, oldest first."""
        return tuple(self._plans)

    def plan(self, job: JobId) -> Plan:
        return self._plans[job]

    def submit(self, plan: Plan) -> None:
        self.num_submitted += 1
        self._plans[plan.job] = plan
        self._answers[plan.job] = {}
        self._work[plan.job] = [begin_copy(copy_engine, plan) for copy_engine in self._ranks]

    def answer(self, job: JobId, rank: int = 0, *, error: str | None = None) -> None:
        """Lets one rank make its copies, or fail without making any. The plan completes with the last rank."""
        answers = self._answers[job]
        assert rank not in answers, f"rank {rank} answered for job {job} already"
        answers[rank] = error or attempt_copy(rank, self._work[job][rank])
        if len(answers) == len(self._ranks):
            del self._plans[job], self._answers[job], self._work[job]
            first_error = next((answers[each] for each in sorted(answers) if answers[each]), None)
            self._done.append(Completion(job=job, error=first_error))

    def finish(self, job: JobId, *, failing_rank: int | None = None) -> None:
        """Lets every rank that has not answered do so; one of them may fail."""
        for rank in range(len(self._ranks)):
            if job in self._answers and rank not in self._answers[job]:
                self.answer(job, rank, error="told to fail" if rank == failing_rank else None)

    def finish_all(self) -> None:
        """Lets everything that is pending succeed, oldest first."""
        for job in self.pending:
            self.finish(job)

    def answers(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def withdraw(self, job: JobId) -> bool:
        return False  # here everything is said to have begun: the harder case

    def progressed_s(self, job: JobId) -> float:
        return -inf

    def drain(self, timeout_s: float) -> None:
        self.finish_all()

    def close(self) -> None:
        pass
