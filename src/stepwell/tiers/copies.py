"""Copies on their way: what each one holds while it runs, and what its outcome does to tree and arenas.

A job holds a reference to every page it reads or writes, so nothing it touches can be freed or reused
under it, whatever happens to the tree meanwhile. Outcomes are applied by `apply`, on the brain's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from stepwell.base.clock import Clock
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.plan import Completion, Copy, PageIds, Plan, Purpose, Span
from stepwell.jobs.copy_executor import CopyExecutor
from stepwell.metrics.counters import Counters
from stepwell.tree.checkpoints import drop_residency, residency_arrived
from stepwell.tree.node import Loss, LossReason, Node, Residency, Run
from stepwell.tree.pruning import discard_ids
from stepwell.tree.tree import Tree

LOOK_SHARE = 1 / 16  # of the time limit passes between two looks at what is overdue


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A plan under way, and the checkpoints it reads from and writes to."""

    plan: Plan
    started_s: float
    reads: tuple[Residency, ...] = ()
    writes: Residency | None = None
    saves: tuple[Run, ...] = ()


class CopyJobs:
    """Starts jobs and applies their outcomes."""

    def __init__(self, tree: Tree, executor: CopyExecutor, counters: Counters, clock: Clock) -> None:
        self._tree = tree
        self._executor = executor
        self._counters = counters
        self._clock = clock
        self._jobs: dict[JobId, Job] = {}  # in the order they were started
        self._abandoned: set[JobId] = set()
        self._next_look_s = -inf  # at what is overdue: a long line is not looked through in every step
        self._last_id = 0
        self.on_saved: Callable[[Node], None] | None = None  # told of nodes with something new on the host

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    @property
    def num_awaited(self) -> int:
        """Those whose outcome will still count."""
        return len(self._jobs) - len(self._abandoned)

    def running(self) -> Iterable[Job]:
        return self._jobs.values()

    def saving_bytes(self, tier: Tier) -> int:
        """How much of a tier is being copied down, so that it may go then; less what nobody waits for any more."""
        jobs = (job for number, job in self._jobs.items() if number not in self._abandoned and job.plan.purpose is Purpose.SAVE)
        spans = [copy.source for job in jobs for copy in job.plan.copies if copy.source.tier is tier]
        return sum(len(span.ids) * self._tree.arenas[tier].layout.strides[span.kind] for span in spans)

    def is_running(self, job: JobId) -> bool:
        return job in self._jobs

    def is_awaited(self, job: JobId) -> bool:
        """Whether its outcome will still count."""
        return job in self._jobs and job not in self._abandoned

    def start(
        self,
        purpose: Purpose,
        copies: Iterable[Copy],
        *,
        reads: tuple[Residency, ...] = (),
        writes: Residency | None = None,
        saves: tuple[Run, ...] = (),
        awaited: bool = False,
    ) -> JobId | None:
        """Takes a reference to every page named and submits the copies; None when there is nothing to copy."""
        wanted = tuple(copy for copy in copies if len(copy.source.ids))
        if not wanted:
            return None
        self._last_id += 1
        plan = Plan(job=JobId(self._last_id), purpose=purpose, copies=wanted, awaited=awaited)
        self._each_page(plan, lambda span: self._tree.arenas[span.tier].retain(span.kind, span.ids))
        for residency in reads:
            residency.users += 1
        self._jobs[plan.job] = Job(plan=plan, started_s=self._clock.now(), reads=reads, writes=writes, saves=saves)
        self._executor.submit(plan)
        return plan.job

    def apply(self) -> list[Completion]:
        """Applies everything that completed since last time; returns what counts of it."""
        counting = []
        for completion in self._executor.completed():
            job = self._jobs.pop(completion.job)
            if completion.job in self._abandoned:
                self._abandoned.discard(completion.job)  # too late to matter, whatever came of it
            else:
                counting.append(completion)
                self._succeed(job) if completion.error is None else self._fail(job)
            self._let_go(job)
        return counting

    def abandon_overdue(self, timeout_s: float) -> list[JobId]:
        """Treats jobs on which some rank has made no progress for so long as failed, for all ranks; returns them.

        Those that no rank has begun are taken back. The pages of the others stay referenced until that rank does answer: it may
        still be writing.
        """
        now = self._clock.now()
        if now < self._next_look_s:
            return []
        self._next_look_s = now + timeout_s * LOOK_SHARE
        latest_s, overdue = now - timeout_s, []
        for number, job in self._jobs.items():
            if job.started_s > latest_s:
                break
            if number not in self._abandoned and self._executor.progressed_s(number) <= latest_s:
                overdue.append(number)
        for number in overdue:
            if not self._take_back(number):
                self._counters.add("abandoned_jobs")
                self._abandoned.add(number)
                self._fail(self._jobs[number])
        return overdue

    def withdraw_all(self) -> None:
        """Takes back everything that no rank has begun."""
        for number in list(self._jobs):
            if number not in self._abandoned:
                self._take_back(number)

    def _take_back(self, number: JobId) -> bool:
        if not self._executor.withdraw(number):
            return False
        job = self._jobs.pop(number)
        self._fail(job, sources=False)  # nobody has read them: they are as good as before
        self._let_go(job)
        self._counters.add("withdrawn_jobs")
        return True

    # ---- outcomes ---------------------------------------------------------------------------------

    def _succeed(self, job: Job) -> None:
        tree, purpose = self._tree, job.plan.purpose.value
        for copy in job.plan.copies:
            target = copy.target
            if target.tier is not Tier.ENGINE:
                tree.arenas[target.tier].mark_ready(target.kind, target.ids)
                if target.kind is Kind.PREFIX:
                    tree.refresh(target.tier, target.ids)
            self._counters.add(f"{purpose}_pages", len(target.ids))
        if job.writes is not None:
            residency_arrived(tree, job.writes)
        self._counters.add(f"{purpose}_jobs")
        if self.on_saved is not None and job.plan.purpose is Purpose.SAVE:
            for node in self._saved_nodes(job):
                self.on_saved(node)

    def _saved_nodes(self, job: Job) -> list[Node]:
        """The nodes, still in the tree, that have pages or a checkpoint of this job on the host."""
        pages = [copy.target.ids for copy in job.plan.copies if copy.target.kind is Kind.PREFIX]
        nodes = dict.fromkeys(run.node for ids in pages for run in self._tree.runs_of(Tier.HOST, ids))
        if job.writes is not None and job.writes.checkpoint.node is not None:
            nodes[job.writes.checkpoint.node] = None
        return list(nodes)

    def _fail(self, job: Job, *, sources: bool = True) -> None:
        """Targets are DEAD and leave the tree. A load that failed also takes its sources out: they cannot be trusted."""
        tree, loss_at = self._tree, self._clock.now()
        sources &= job.plan.purpose is not Purpose.SAVE
        for copy in job.plan.copies:
            target = copy.target
            if target.tier is not Tier.ENGINE:
                tree.arenas[target.tier].mark_dead(target.kind, target.ids)
                self._discard(target, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=target.tier))
            if sources:
                self._discard(copy.source, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=copy.source.tier))
        suspects = job.reads if sources else ()
        for residency in (*suspects, *([job.writes] if job.writes is not None else [])):
            drop_residency(tree, residency, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=residency.tier))
        for run in job.saves:
            run.unsaved = True
        if job.plan.purpose is Purpose.SAVE:
            for residency in job.reads:
                residency.unsaved = True
        self._counters.add(f"{job.plan.purpose.value}_failures")

    def _discard(self, span: Span, loss: Loss) -> None:
        if span.kind is Kind.PREFIX and span.tier is not Tier.ENGINE:
            discard_ids(self._tree, span.tier, span.ids, loss)

    def _let_go(self, job: Job) -> None:
        for residency in job.reads:
            self.unpin(residency)
        self._each_page(job.plan, self._release)

    def unpin(self, residency: Residency) -> None:
        """One user less; a checkpoint nobody reads is a candidate for eviction again."""
        residency.users -= 1
        assert residency.users >= 0, f"{residency.users=}"
        if not residency.users:
            self._tree.ranking.queue_residency(residency)

    def _release(self, span: Span) -> None:
        self.release(span.tier, span.kind, span.ids)

    def release(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        """Gives references back, and lets the tree know that it may be the last holder now."""
        self._tree.arenas[tier].release(kind, ids)
        if kind is Kind.PREFIX:
            self._tree.requeue(tier, ids)

    @staticmethod
    def _each_page(plan: Plan, act: Callable[[Span], None]) -> None:
        for copy in plan.copies:
            for span in (copy.source, copy.target):
                if span.tier is not Tier.ENGINE:
                    act(span)
