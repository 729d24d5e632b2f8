"""An executor whose every answer a test decides: late, out of order, or failed on one of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.base.ids import JobId
from stepwell.base.tasks import Completion, Plan
from stepwell.jobs.executors import attempt_copy, begin_copy
from stepwell.testing.scripted import Scripted
from stepwell.transfer.copy_engine import CopyEngine, Work


class ScriptedExecutor(Scripted[Plan, Completion]):
    """Copies when a test lets a rank answer."""

    def __init__(self, ranks: Sequence[CopyEngine]) -> None:
        super().__init__()
        self._ranks = ranks
        self._answers: dict[JobId, dict[int, str | None]] = {}
        self._work: dict[JobId, list[Work]] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def plan(self, job: JobId) -> Plan:
        return self._tasks[job]

    def submit(self, task: Plan) -> None:
        super().submit(task)
        self._answers[task.job] = {}
        self._work[task.job] = [begin_copy(copy_engine, task) for copy_engine in self._ranks]

    def answer(self, job: JobId, rank: int = 0, *, error: str | None = None) -> None:
        """Lets one rank make its copies, or fail without making any. The plan completes with the last rank."""
        answers = self._answers[job]
        assert rank not in answers, f"rank {rank} answered for job {job} already"
        answers[rank] = error or attempt_copy(rank, self._work[job][rank])
        if len(answers) == len(self._ranks):
            del self._tasks[job], self._answers[job], self._work[job]
            first_error = next((answers[each] for each in sorted(answers) if answers[each]), None)
            self._done.append(Completion(job=job, error=first_error))

    def finish(self, job: JobId, *, failing_rank: int | None = None) -> None:
        """Lets every rank that has not answered do so; one of them may fail."""
        for rank in range(len(self._ranks)):
            if job in self._answers and rank not in self._answers[job]:
                self.answer(job, rank, error="made to fail" if rank == failing_rank else None)
