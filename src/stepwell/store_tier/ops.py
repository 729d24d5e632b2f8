"""Operations to the store on their way: what each one holds while it runs, and whether the store is well.

An operation holds a reference to every host page it reads or writes, until the store has answered for it, however late. Pages
of a fetch that ended badly are held on for as long as the store may still write into them (`Traits.late_write_s`). Outcomes are
handed on in `apply`, on the cache's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepwell.base.clock import Clock
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.keys import Namespace
from stepwell.base.plan import PageIds
from stepwell.base.store_op import FetchCheckpoint, FetchPages, FindItems, ItemStatus, Outcome, Reply, StoreOp, Task, num_items
from stepwell.jobs.store_executor import StoreExecutor
from stepwell.memory.arena import Arena
from stepwell.metrics.counters import Counters
from stepwell.policy.breaker import Breaker
from stepwell.tiers.copies import CopyJobs
from stepwell.tree.node import Residency

Pages = tuple[tuple[Kind, PageIds], ...]
OnOutcome = Callable[[Outcome, float], None]  # and the seconds it took


class Call:
    """What an operation was sent for; it is called off by setting `is_off`. `page` is what it is about, where that matters."""

    def __init__(self, page: int = 0) -> None:
        self.page = page
        self.is_off = False

    def off(self) -> bool:
        return self.is_off


class _Held(NamedTuple):
    """Pages of a transfer that failed, and may still write into them."""

    until_s: float
    pages: Pages


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    op: StoreOp
    started_s: float
    pages: Pages
    reads: Residency | None
    on_outcome: OnOutcome
    call: Call
    counts: bool  # for or against the store
    abandoned: bool = False


class StoreOps:
    """Starts operations and hands on their outcomes, each exactly once."""

    def __init__(
        self, executor: StoreExecutor, host: Arena, copies: CopyJobs, counters: Counters, clock: Clock, breaker: Breaker, *,
        timeout_s: float, late_write_s: float,
    ) -> None:  # fmt: skip
        self._executor = executor
        self._host = host
        self._mover = copies
        self._counters = counters
        self._clock = clock
        self._breaker = breaker
        self._timeout_s = timeout_s
        self._late_write_s = late_write_s
        self._held: deque[_Held] = deque()  # by when they are let go
        self._held_bytes = 0
        self._running: dict[JobId, _Running] = {}  # in the order they were started
        self._last_id = 0
        self._failures: list[str] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def overdue(self) -> bool:
        """Whether nothing is left but what was given up on, and questions that only somebody's curiosity waits for."""
        return all(running.abandoned or not running.counts for running in self._running.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that nobody may have yet, because a transfer that failed may still write into them."""
        return self._held_bytes

    def take_failures(self) -> list[str]:
        """What went wrong since it was last asked."""
        failures, self._failures = self._failures, []
        return failures

    def holders(self) -> Iterator[tuple[Tier, Kind, PageIds]]:
        """Every reference that operations hold, for audits."""
        for pages in (*[running.pages for running in self._running.values()], *[held.pages for held in self._held]):
            for kind, ids in pages:
                yield Tier.HOST, kind, ids

    def readers(self) -> Iterable[Residency | None]:
        return [running.reads for running in self._running.values()]

    def start(
        self, task: Task, namespace: Namespace, on_outcome: OnOutcome, *, call: Call, pages: Pages = (),
        reads: Residency | None = None, counts: bool = True,
    ) -> JobId:  # fmt: skip
        """Takes a reference to every host page named and sends the operation off. How the store does may count for nothing."""
        self._last_id += 1
        now = self._clock.now()
        op = StoreOp(job=JobId(self._last_id), namespace=namespace, task=task, cancelled=call.off)
        pages = tuple((kind, ids) for kind, ids in pages if len(ids))
        for kind, ids in pages:
            self._host.retain(kind, ids)
        if reads is not None:
            reads.users += 1
        self._running[op.job] = _Running(
            op=op, started_s=now, pages=pages, reads=reads, on_outcome=on_outcome, call=call, counts=counts
        )
        if counts:
            self._breaker.asked(now)
        self._executor.submit(op)
        return op.job

    def apply(self) -> int:
        """Hands on everything that was answered, and gives up on what is overdue; returns how many were answered."""
        replies = self._executor.replies()
        for reply in replies:
            self._answered(reply)
        self._abandon_overdue()
        self._withdraw()
        while self._held and self._held[0].until_s <= self._clock.now():
            pages = self._held.popleft().pages
            self._held_bytes -= self._size(pages)
            self._release(pages)
        return len(replies)

    def wait(self, job: JobId, timeout_s: float) -> None:
        """Waits at most so long for one operation, and hands on what came of it. Nothing else is applied."""
        reply = self._executor.answer(job, timeout_s) if job in self._running else None
        if reply is not None:
            self._answered(reply)

    def drain(self, timeout_s: float) -> None:
        """Waits for everything under way: for so long, and no longer than an operation may take."""
        self._executor.drain(min(timeout_s, self._timeout_s))

    def close(self) -> None:
        """Takes back what has not begun, and lets the threads end. What has begun ends when the store lets it."""
        for running in self._running.values():
            running.call.is_off = True
        self._withdraw()
        self._executor.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _answered(self, reply: Reply) -> None:
        running = self._running.pop(reply.job)
        if not running.abandoned:
            if running.counts:
                self._judge(running.op.task, reply.outcome)
            running.on_outcome(reply.outcome, reply.took_s)
        if running.reads is not None:
            self._mover.unpin(running.reads)
        late = self._may_be_written(running.op.task, reply.outcome, running.pages)
        if late:
            for kind, ids in late:
                self._host.retain(kind, ids)
            self._held.append(_Held(self._clock.now() + self._late_write_s, late))
            self._held_bytes += self._size(late)
            self._counters.add("store_pages_held", sum(len(ids) for _, ids in late))
        self._release(running.pages)

    def _may_be_written(self, task: Task, outcome: Outcome, pages: Pages) -> Pages:
        """Pages that a fetch which ended badly may still write into; none of a store that is done when it answers."""
        if not self._late_write_s or not (outcome.unsettled or outcome.error is not None):
            return ()
        if isinstance(task, FetchCheckpoint):
            return pages if outcome.statuses != (ItemStatus.OK,) else ()
        if isinstance(task, FetchPages):
            bad = np.fromiter((status is not ItemStatus.OK for status in outcome.statuses), np.bool_, len(task.ids))
            return ((Kind.PREFIX, task.ids[bad]),) if bad.any() else ()
        return ()  # a put that ended badly only reads them

    def _size(self, pages: Pages) -> int:
        return sum(len(ids) * self._host.layout.strides[kind] for kind, ids in pages)

    def _release(self, pages: Pages) -> None:
        for kind, ids in pages:
            self._mover.release(Tier.HOST, kind, ids)

    def _judge(self, task: Task, outcome: Outcome) -> None:
        """Counts what went wrong by its cause, and lets the breaker know how the store did."""
        if outcome.error is None and outcome.statuses.count(ItemStatus.OK) == len(outcome.statuses):
            self._breaker.succeeded()
            return
        for status in outcome.statuses if not isinstance(task, FindItems) else ():  # that a store lacks something is no failure
            if status not in (ItemStatus.OK, ItemStatus.CANCELLED):
                self._counters.add(f"store_{status.name.lower()}")
        if outcome.error is not None or ItemStatus.FAILED in outcome.statuses:
            self._failed(outcome.error or "the store failed")
        elif ItemStatus.CANCELLED in outcome.statuses:
            self._breaker.undecided()
        else:
            self._breaker.succeeded()

    def _failed(self, why: str) -> None:
        self._failures.append(why)
        self._counters.add("store_ops_failed")
        if self._breaker.failed(self._clock.now()):
            self._counters.add("store_switched_off")

    def _withdraw(self) -> None:
        """Takes back what was called off and has not begun, so that a store that hangs does not hold pages for it."""
        for job, running in list(self._running.items()):
            if running.call.is_off and self._executor.withdraw(job):
                self._never_began(running)

    def _never_began(self, running: _Running) -> None:
        statuses = (ItemStatus.CANCELLED,) * num_items(running.op.task)
        self._answered(Reply(job=running.op.job, outcome=Outcome(statuses=statuses), took_s=0.0))

    def _abandon_overdue(self) -> None:
        """What the store has made no progress on for so long has failed; its pages stay held, for it may still be using them.

        What has only waited in line, behind something that hangs, is called off.
        """
        latest_s = self._clock.now() - self._timeout_s
        for running in list(self._running.values()):
            if running.started_s > latest_s:
                break
            if running.abandoned or self._executor.progressed_s(running.op.job) > latest_s:
                continue
            if self._executor.withdraw(running.op.job):
                self._counters.add("store_ops_never_began")
                self._never_began(running)
            else:
                running.abandoned = running.call.is_off = True
                if running.counts:
                    self._failed(f"no answer within {self._timeout_s:g} s")
                statuses = (ItemStatus.FAILED,) * num_items(running.op.task)
                running.on_outcome(Outcome(statuses=statuses, error="no answer"), self._timeout_s)
