"""Copies between memories: how the outcome of each changes tree and arenas. Applied in `apply`, on the cache's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.meters import Clock, Counters
from stepwell.base.tasks import Completion, Copy, PageIds, Plan, Purpose, Span
from stepwell.jobs.executors import Arrivals, Arriving, CopyExecutor
from stepwell.jobs.jobs import End, Jobs
from stepwell.jobs.wakeup import Wakeup
from stepwell.tree.checkpoints import drop_residency, residency_arrived
from stepwell.tree.node import Loss, LossReason, Node, Residency, Run
from stepwell.tree.pruning import discard_ids
from stepwell.tree.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Touched:
    """The nodes and checkpoints that a plan reads and writes."""

    reads: tuple[Residency, ...]
    writes: Residency | None
    saves: tuple[Run, ...]


class CopyJobs(Jobs[Plan, Completion]):
    """Starts copies and applies their outcomes. One thread."""

    def __init__(
        self, tree: Tree, executor: CopyExecutor, counters: Counters, clock: Clock, wakeup: Wakeup, *,
        arrivals: Arrivals | None = None,
    ) -> None:  # fmt: skip
        """`arrivals` returns the loads that a pass may begin on before they have ended; without it, there are none."""
        self._arrivals = arrivals
        super().__init__(executor, tree, clock, wakeup)
        self._counters = counters
        self._saving_bytes = dict.fromkeys(Tier, 0)
        self.on_saved: Callable[[Node], None] | None = None  # called with nodes that have something new on the host

    def saving_bytes(self, tier: Tier) -> int:
        """How much of a tier is being saved and may be evicted afterwards, without copies that exceeded their time limit."""
        return self._saving_bytes[tier]

    def loads_of(self, ids: PageIds) -> tuple[JobId, ...]:
        """The jobs that load these prefix pages to the device; none if they do not load all of them."""
        jobs, missing = [], ids
        for plan in self.tasks():
            if not len(missing):
                break
            if plan.purpose is Purpose.LOAD:
                targets = [copy.target for copy in plan.copies]
                loaded = [span.ids for span in targets if (span.tier, span.kind) == (Tier.DEVICE, Kind.PREFIX)]
                left = missing[~np.isin(missing, np.concatenate(loaded))] if loaded else missing
                if len(left) < len(missing):
                    jobs.append(plan.job)
                    missing = left
        return tuple(jobs) if not len(missing) else ()

    def arriving(self, jobs: Iterable[JobId]) -> tuple[Arriving, ...]:
        """Those of the jobs that have not ended, to be waited for layer by layer; none if one of them cannot be."""
        if self._arrivals is None:
            return ()
        found = [self._arrivals(job) for job in jobs if self.is_awaited(job)]
        return tuple(each for each in found if each is not None) if None not in found else ()

    def copy(
        self,
        purpose: Purpose,
        copies: Iterable[Copy],
        *,
        reads: tuple[Residency, ...] = (),
        writes: Residency | None = None,
        saves: tuple[Run, ...] = (),
        awaited: bool = False,
    ) -> JobId | None:
        """Starts copies that succeed or fail together; None if there is nothing to copy."""
        wanted = tuple(copy for copy in copies if len(copy.source.ids))
        if not wanted:
            return None
        plan = Plan(job=self.next_id(), purpose=purpose, copies=wanted, awaited=awaited)
        pages = tuple(span for copy in wanted for span in (copy.source, copy.target))
        touched = _Touched(reads=reads, writes=writes, saves=saves)
        self._note_saving(plan, 1)
        self.start(plan, pages=pages, reads=reads, on_end=partial(self._ended, plan, touched))
        return plan.job

    # ---- outcomes ---------------------------------------------------------------------------------

    def audit(self) -> None:
        """Asserts that the bytes being saved are counted correctly."""
        counted = dict.fromkeys(Tier, 0)
        for plan in self.tasks():
            for tier, size_bytes in self._saved_bytes(plan):
                counted[tier] += size_bytes
        assert counted == self._saving_bytes, f"{counted} bytes are being saved, {self._saving_bytes} are counted"

    def _note_saving(self, plan: Plan, sign: int) -> None:
        """Counts a save that begins (1) or has ended (-1)."""
        for tier, size_bytes in self._saved_bytes(plan):
            self._saving_bytes[tier] += sign * size_bytes

    def _saved_bytes(self, plan: Plan) -> Iterator[tuple[Tier, int]]:
        """How many bytes of each tier a plan saves."""
        for span in (copy.source for copy in plan.copies if plan.purpose is Purpose.SAVE):
            if span.tier is not Tier.ENGINE:
                yield span.tier, len(span.ids) * self._tree.arenas[span.tier].layout.strides[span.kind]

    def _ended(self, plan: Plan, touched: _Touched, end: End, completion: Completion | None) -> None:
        self._note_saving(plan, -1)
        if completion is not None and completion.error is None:
            self._succeed(plan, touched)
            return
        if end is End.OVERDUE:
            self._counters.add("abandoned_jobs")
        elif end is End.WITHDRAWN:
            self._counters.add("withdrawn_jobs")
        # A load that failed discards its sources too, as they cannot be trusted. Unread sources are as good as before.
        self._fail(plan, touched, sources=end is not End.WITHDRAWN and plan.purpose is not Purpose.SAVE)

    def _succeed(self, plan: Plan, touched: _Touched) -> None:
        tree, purpose = self._tree, plan.purpose.value
        for copy in plan.copies:
            target = copy.target
            if target.tier is not Tier.ENGINE:
                came = tree.arenas[target.tier].mark_ready(target.kind, target.ids)
                if target.kind is Kind.PREFIX and len(came):
                    tree.refresh(target.tier, came)
            if not copy.is_of_rows:
                self._counters.add(f"{purpose}_pages", len(target.ids))
        if touched.writes is not None:
            residency_arrived(tree, touched.writes)
        self._counters.add(f"{purpose}_jobs")
        if self.on_saved is not None and plan.purpose is Purpose.SAVE:
            for node in self._saved_nodes(plan, touched):
                self.on_saved(node)

    def _saved_nodes(self, plan: Plan, touched: _Touched) -> list[Node]:
        """The nodes, still in the tree, that have pages or a checkpoint of this job on the host."""
        pages = [copy.target.ids for copy in plan.copies if copy.target.kind is Kind.PREFIX]
        nodes = dict.fromkeys(run.node for ids in pages for run in self._tree.runs_of(Tier.HOST, ids))
        if touched.writes is not None and touched.writes.checkpoint.node is not None:
            nodes[touched.writes.checkpoint.node] = None
        return list(nodes)

    def _fail(self, plan: Plan, touched: _Touched, *, sources: bool) -> None:
        """Targets become DEAD and leave the tree; so do `sources` that cannot be trusted."""
        tree, loss_at = self._tree, self._clock.now()
        for copy in plan.copies:
            target = copy.target
            if target.tier is not Tier.ENGINE:
                tree.arenas[target.tier].mark_dead(target.kind, target.ids)
                self._discard(target, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=target.tier))
            if sources:
                self._discard(copy.source, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=copy.source.tier))
                self._discard_backed(copy.source, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=Tier.DEVICE))
        suspects = touched.reads if sources else ()
        for residency in (*suspects, *([touched.writes] if touched.writes is not None else [])):
            drop_residency(tree, residency, Loss(at_s=loss_at, reason=LossReason.FAILED, tier=residency.tier))
        for run in touched.saves:
            run.unsaved = True
        if plan.purpose is Purpose.SAVE:
            for residency in touched.reads:
                residency.unsaved = True
        self._counters.add(f"{plan.purpose.value}_failures")

    def _discard(self, span: Span, loss: Loss) -> None:
        if span.kind is Kind.PREFIX and span.tier is not Tier.ENGINE:
            discard_ids(self._tree, span.tier, span.ids, loss)

    def _discard_backed(self, span: Span, loss: Loss) -> None:
        """Pages whose rows are only on these host pages leave the tree with them. Requests that use them go on, unpublished."""
        row_pages = self._tree.row_pages
        if row_pages is not None and row_pages.num_backed and (span.tier, span.kind) == (Tier.HOST, Kind.PREFIX):
            backed = row_pages.backed_by(span.ids)
            row_pages.quarantine(backed)
            discard_ids(self._tree, Tier.DEVICE, backed, loss)
