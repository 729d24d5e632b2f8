"""Copies on their way: what each one holds while it runs, and what its outcome does to tree and arenas.

A job holds a reference to every page it reads or writes, so nothing it touches can be freed or reused
under it, whatever happens to the tree meanwhile. Outcomes are applied by `apply`, on the brain's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepwell.base.clock import Clock
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.plan import Completion, Copy, PageIds, Plan, Purpose, Span
from stepwell.cache.executor import Executor
from stepwell.metrics.counters import Counters
from stepwell.tree.checkpoints import drop_residency, residency_arrived
from stepwell.tree.node import Loss, LossReason, Node, Residency, Run
from stepwell.tree.pruning import discard_ids
from stepwell.tree.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A plan under way, and the checkpoints it reads from and writes to."""

    plan: Plan
    started_s: float
    reads: tuple[Residency, ...] = ()
    writes: Residency | None = None
    saves: tuple[Run, ...] = ()


class Mover:
    """Starts jobs and applies their outcomes."""

    def __init__(self, tree: Tree, executor: Executor, counters: Counters, clock: Clock) -> None:
        self._tree = tree
        self._executor = executor
        self._counters = counters
        self._clock = clock
        self._jobs: dict[JobId, Job] = {}  # in the order they were started
        self._abandoned: set[JobId] = set()
        self._last_id = 0
        self.on_saved: Callable[[Node], None] | None = None  # told of nodes with something new on the host

    @property
    def num_running(self) -> int:
        return len(self._jobs)

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
    ) -> JobId | None:
        """Takes a reference to every page named and submits the copies; None when there is nothing to copy."""
        wanted = tuple(copy for copy in copies if len(copy.source.ids))
        if not wanted:
            return None
        self._last_id += 1
        plan = Plan(job=JobId(self._last_id), purpose=purpose, copies=wanted)
        self._each_page(plan, lambda span: self._tree.arenas[span.tier].retain(span.kind, span.ids))
        for residency in reads:
            residency.users += 1
        self._jobs[plan.job] = Job(plan=plan, started_s=self._clock.now(), reads=reads, writes=writes, saves=saves)
        self._executor.submit(plan)
        return plan.job

    def apply(self) -> list[Completion]:
        """Applies everything that completed since last time; returns it."""
        completions = self._executor.completed()
        for completion in completions:
            job = self._jobs.pop(completion.job)
            if completion.job in self._abandoned:
                self._abandoned.discard(completion.job)  # too late to matter, whatever came of it
            elif completion.error is None:
                self._succeed(job)
            else:
                self._fail(job)
            self._let_go(job)
        return completions

    def abandon_overdue(self, timeout_s: float) -> list[JobId]:
        """Treats jobs on which some rank has made no progress for so long as failed, for all ranks; returns them.

        Those that no rank has begun are taken back. The pages of the others stay referenced until that rank does answer: it may
        still be writing.
        """
        latest_s = self._clock.now() - timeout_s
        overdue = []
        for number, job in self._jobs.items():
            if job.started_s > latest_s:
                break
            if number not in self._abandoned and self._executor.progressed_s(number) <= latest_s:
                overdue.append(number)
        for number in overdue:
            job = self._jobs[number]
            self._fail(job)
            if self._executor.withdraw(number):
                self._counters.add("withdrawn_jobs")
                del self._jobs[number]
                self._let_go(job)
            else:
                self._counters.add("abandoned_jobs")
                self._abandoned.add(number)
        return overdue

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

    def _fail(self, job: Job) -> None:
        """Targets are DEAD and leave the tree. A load that failed also takes its sources out: they cannot be trusted."""
        tree, loss_at = self._tree, self._clock.now()
        for copy in job.plan.copies:
            target = copy.target
            if target.tier is not Tier.ENGINE:
                tree.arenas[target.tier].mark_dead(target.kind, target.ids)
                self._discard(target, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=target.tier))
            if job.plan.purpose is not Purpose.SAVE:
                self._discard(copy.source, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=copy.source.tier))
        suspects = job.reads if job.plan.purpose is not Purpose.SAVE else ()
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
