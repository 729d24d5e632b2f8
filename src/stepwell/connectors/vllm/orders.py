"""What travels between the scheduler's side and the workers: copies to make with a step, and their outcomes. Plain values.

    submit            a plan waits for the next step
    take              it leaves with the step's metadata
    answer            one or several ranks report the outcome
    answers           it counts when all ranks have reported

Saves read what their step computes. When the engine ends, saves of a step without output count as failed. `StepOrders` is the
cache's executor. Nothing here waits, because only the engine's steps bring answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stepwell.base.ids import JobId
from stepwell.base.meters import Clock
from stepwell.base.tasks import Completion, Plan

WAITING_STEP_S = 0.001  # the sleep of vLLM's own loop

Answers = dict[int, tuple[int, str | None]]  # by job: number of ranks that answered, and the first error
WeightsAnswer = tuple[int, str | None]  # number of the query, and the name of a rank's weights (`weights.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan for every rank. `request` is the one that waits for it; None for a save."""

    plan: Plan
    request: str | None = None


@dataclass(slots=True, kw_only=True)
class _Open:
    plan: Plan
    sent_s: float | None = None  # None: waits for the next step
    step: int = 0  # that it was sent with
    ranks: int = 0
    error: str | None = None


def merged(mine: Answers, others: Answers) -> Answers:
    """Answers of several ranks as one."""
    both = dict(mine)
    for job, (ranks, error) in others.items():
        so_far, first = both.get(job, (0, None))
        both[job] = (so_far + ranks, first if first is not None else error)
    return both


@dataclass(slots=True)
class StepOrders:
    """Copies made with the engine's steps, on `num_ranks` ranks. The cache's thread."""

    num_ranks: int
    clock: Clock
    num_steps: int = 0  # sent
    _computed_steps: int = 0  # with output
    _open: dict[JobId, _Open] = field(default_factory=dict)
    _done: list[Completion] = field(default_factory=list)

    def submit(self, plan: Plan) -> None:
        self._open[plan.job] = _Open(plan=plan)

    def take(self) -> list[Plan]:
        """Returns the plans submitted since the last step, which are now in flight."""
        self.num_steps += 1
        waiting = [each for each in self._open.values() if each.sent_s is None]
        for each in waiting:
            each.sent_s, each.step = self.clock.now(), self.num_steps
        return [each.plan for each in waiting]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def answer(self, answers: Answers, *, step: int) -> dict[JobId, str | None]:
        """Takes the answers of ranks that have computed up to `step`; returns the jobs that all ranks have answered, with their
        errors.
        """
        self._computed_steps = max(self._computed_steps, step)
        ended: dict[JobId, str | None] = {}
        for number, (ranks, error) in answers.items():
            job = JobId(number)
            each = self._open.get(job)
            assert each is not None and each.sent_s is not None, f"an answer to job {number}, which is not under way"
            each.ranks += ranks
            each.error = each.error if each.error is not None else error
            assert each.ranks <= self.num_ranks, f"job {number}: {each.ranks} answers of {self.num_ranks} ranks"
            if each.ranks == self.num_ranks:
                self._end(job)
                ended[job] = each.error
        return ended

    def end_all(self, is_done: Callable[[JobId], bool]) -> None:
        """After the last step: jobs that are not done have failed, and so have those of a step without output."""
        for job, each in list(self._open.items()):
            was_computed = each.sent_s is not None and each.step <= self._computed_steps
            if not was_computed or not is_done(job):
                each.error = "the engine stopped before it was copied"
            self._end(job)

    def _end(self, job: JobId) -> None:
        each = self._open.pop(job)
        self._done.append(Completion(job=job, error=each.error))

    # ---- as the cache's executor --------------------------------------------------------------------

    def answers(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def withdraw(self, job: JobId) -> bool:
        each = self._open.get(job)
        if each is None or each.sent_s is not None:
            return False
        del self._open[job]
        return True

    def progressed_s(self, job: JobId) -> float:
        """When it was sent; a job that was not sent is never late."""
        each = self._open.get(job)
        return each.sent_s if each is not None and each.sent_s is not None else self.clock.now()

    def wake_by(self, wake: Callable[[], None]) -> bool:
        return False  # vLLM's scheduler brings the answers

    def drain(self, timeout_s: float) -> None:
        self.clock.sleep(min(timeout_s, 0.001))

    def close(self) -> None:
        pass


class Pace:
    """Slows down an engine that steps without pause although it only waits for copies and stores.

    An engine in a process of its own sleeps between such steps. One in its caller's process does not, and would starve the
    threads that read and copy.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited_s: float | None = None  # when the last step left, if it was such a one

    def step(self, *, waits: bool) -> None:
        """Call before each step; `waits` if it has nothing to do but wait."""
        if waits and self._waited_s is not None:
            left_s = self._waited_s + WAITING_STEP_S - self._clock.now()
            if left_s > 0:
                self._clock.sleep(left_s)
        self._waited_s = self._clock.now() if waits else None


def blocks_of(plans: Iterable[Plan]) -> list[int]:
    """The distinct blocks that saves read, in order."""
    ids = {int(block) for plan in plans for copy in plan.copies for block in copy.source.ids.reshape(-1)}
    return sorted(ids - {0})
