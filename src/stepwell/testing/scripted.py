"""What executors have in common that answer when a test says so: tasks wait, answers are handed out once. Runs nothing itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from stepwell.base.ids import JobId
from stepwell.jobs.jobs import Numbered

Task = TypeVar("Task", bound=Numbered)
Answer = TypeVar("Answer", bound=Numbered)


class Scripted(ABC, Generic[Task, Answer]):
    """Keeps tasks until a test lets them be answered. The work is done at that moment, not before."""

    def __init__(self) -> None:
        self._tasks: dict[JobId, Task] = {}
        self._done: list[Answer] = []
        self.num_submitted = 0
        self.gone = False  # true: the ranks have ended, and what they had not answered can be withdrawn

    @property
    def pending(self) -> tuple[JobId, ...]:
        """Tasks that were not answered, or not by all, oldest first."""
        return tuple(self._tasks)

    def submit(self, task: Task) -> None:
        self.num_submitted += 1
        self._tasks[task.job] = task

    @abstractmethod
    def finish(self, job: JobId) -> None:
        """Lets one task be carried out on every rank."""

    def finish_all(self) -> None:
        """Lets everything that is pending succeed, oldest first."""
        for job in self.pending:
            self.finish(job)

    def answers(self) -> list[Answer]:
        done, self._done = self._done, []
        return done

    def withdraw(self, job: JobId) -> bool:
        return self.gone and self._tasks.pop(job, None) is not None  # else everything is said to have begun: the harder case

    def progressed_s(self, job: JobId) -> float:
        return -inf

    def wake_by(self, wake: Callable[[], None]) -> bool:
        return False  # the test decides when something is answered

    def drain(self, timeout_s: float) -> None:
        self.finish_all()

    def close(self) -> None:
        pass
