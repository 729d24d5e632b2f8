"""Operations of one store: delivers their outcomes, and judges the store. Applied in `apply`, on the cache's thread.

Pages of a failed fetch are held for as long as the store may still write into them (`Traits.late_write_s`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.meters import Clock, Counters, Durations
from stepwell.base.prompt import Namespace
from stepwell.base.tasks import (
    FetchCheckpoint,
    FetchPages,
    FindItems,
    ItemStatus,
    Outcome,
    PageIds,
    Relevel,
    Reply,
    Span,
    StoreOp,
    Task,
    num_items,
)
from stepwell.jobs.executors import StoreExecutor
from stepwell.jobs.jobs import End, Jobs
from stepwell.jobs.wakeup import Wakeup
from stepwell.policy.store_use import Breaker
from stepwell.tree.node import Residency
from stepwell.tree.tree import Tree

Pages = tuple[tuple[Kind, PageIds], ...]
OPERATIONS = ("find", "fetch", "put")
OnOutcome = Callable[[Outcome, float], None]  # and the seconds it took


class Call:
    """A group of operations that can be cancelled together. `page` is the page they are for, if that matters."""

    def __init__(self, page: int = 0) -> None:
        self.page = page
        self.is_off = False
        self._cancels: list[Callable[[], None]] = []

    def bind(self, cancel: Callable[[], None]) -> None:
        """Adds an operation; `cancel` cancels it, at once if the group was cancelled before."""
        self._cancels.append(cancel)
        if self.is_off:
            cancel()

    def cancel(self) -> None:
        """Cancels every operation of the group. A second call does nothing."""
        if not self.is_off:
            self.is_off = True
            for cancel in self._cancels:
                cancel()


class _Held(NamedTuple):
    """Pages of a failed transfer that may still write into them."""

    until_s: float
    pages: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sent:
    op: StoreOp
    on_outcome: OnOutcome
    call: Call
    counts: bool  # for or against the store


class StoreOps(Jobs[StoreOp, Reply]):
    """Starts operations and delivers their outcomes, each exactly once."""

    def __init__(
        self, executor: StoreExecutor, tree: Tree, counters: Counters, clock: Clock, wakeup: Wakeup, breaker: Breaker, *,
        timeout_s: float, late_write_s: float, times: Mapping[str, Durations],
    ) -> None:  # fmt: skip
        super().__init__(executor, tree, clock, wakeup, before_release=self._hold_on)
        self._store_executor = executor
        self._host = tree.arenas[Tier.HOST]
        self._counters = counters
        self._breaker = breaker
        self._timeout_s = timeout_s
        self._late_write_s = late_write_s
        self._times = times  # by operation
        self._sent: dict[JobId, _Sent] = {}  # those that were not answered or withdrawn
        self._called_off: dict[JobId, None] = {}  # of those, the ones that may still be withdrawn
        self._held: deque[_Held] = deque()  # by the time of their release
        self._held_bytes = 0
        self._failures: list[str] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of pages that cannot be reused yet, because a failed transfer may still write into them."""
        return self._held_bytes

    def take_failures(self) -> list[str]:
        """Returns and clears the failures so far."""
        failures, self._failures = self._failures, []
        return failures

    def held(self) -> Iterator[Span]:
        """Every reference that operations hold, for audits."""
        yield from super().held()
        for held in self._held:
            yield from held.pages

    def send(
        self, task: Task, namespace: Namespace, on_outcome: OnOutcome, *, call: Call, pages: Pages = (),
        reads: Residency | None = None, counts: bool = True,
    ) -> JobId:  # fmt: skip
        """Takes a reference to every host page named and sends the task. `counts`: its outcome affects the store's health."""
        op = StoreOp(job=self.next_id(), namespace=namespace, task=task)
        self._sent[op.job] = sent = _Sent(op=op, on_outcome=on_outcome, call=call, counts=counts)
        if counts:
            self._breaker.asked(self._clock.now())
        spans = tuple(Span(tier=Tier.HOST, kind=kind, ids=ids) for kind, ids in pages if len(ids))
        self.start(op, pages=spans, reads=(reads,) if reads is not None else (), on_end=partial(self._ended, sent))
        call.bind(partial(self._cancel, op.job))
        return op.job

    def apply(self) -> list[Reply]:
        """Delivers all answers, gives up overdue operations, and withdraws cancelled ones."""
        replies = super().apply()
        for end in self.give_up_overdue(self._timeout_s).values():
            self._counters.add("store_ops_never_began", int(end is End.WITHDRAWN))
        self._withdraw_called_off()
        while self._held and self._held[0].until_s <= self._clock.now():
            pages = self._held.popleft().pages
            self._held_bytes -= self._size(pages)
            self._tree.release_all(pages)
        return replies

    def wait(self, job: JobId, timeout_s: float) -> None:
        """Waits at most this long for one operation, and delivers its outcome. Applies nothing else."""
        reply = self._store_executor.answer(job, timeout_s) if self.is_running(job) else None
        if reply is not None:
            self.settle(reply)

    def drain(self, timeout_s: float) -> None:
        """Waits for everything in flight: for this time, and no longer than an operation may take."""
        super().drain(min(timeout_s, self._timeout_s))

    def close(self) -> None:
        """Withdraws operations that have not begun, and lets the threads end. Others end when the store answers."""
        for sent in list(self._sent.values()):
            sent.call.cancel()
        self._withdraw_called_off()
        super().close()

    # ---- inside -----------------------------------------------------------------------------------

    def _ended(self, sent: _Sent, end: End, reply: Reply | None) -> None:
        task, items = sent.op.task, num_items(sent.op.task)
        if end is End.OVERDUE:
            sent.call.cancel()
            if sent.counts:
                self._times[_operation(task)].add(self._timeout_s)
                self._failed(f"no answer within {self._timeout_s:g} s")
            sent.on_outcome(Outcome(statuses=(ItemStatus.FAILED,) * items, error="no answer"), self._timeout_s)
            return
        del self._sent[sent.op.job]
        if reply is not None and not isinstance(task, Relevel):  # a hint transfers nothing: it would make storing look fast
            self._times[_operation(task)].add(reply.took_s)
        outcome = reply.outcome if reply is not None else Outcome(statuses=(ItemStatus.CANCELLED,) * items)
        if sent.counts:
            self._judge(task, outcome)
        sent.on_outcome(outcome, reply.took_s if reply is not None else 0.0)

    def _hold_on(self, op: StoreOp, reply: Reply) -> None:
        """Keeps pages that a failed fetch may still write into; none if the store never writes after its answer."""
        self._sent.pop(op.job, None)  # a late answer
        late = self._may_be_written(op.task, reply.outcome)
        if late:
            self._tree.retain(late)
            self._held.append(_Held(self._clock.now() + self._late_write_s, late))
            self._held_bytes += self._size(late)
            self._counters.add("store_pages_held", sum(len(span.ids) for span in late))

    def _may_be_written(self, task: Task, outcome: Outcome) -> tuple[Span, ...]:
        if not self._late_write_s or not (outcome.unsettled or outcome.error is not None):
            return ()
        if isinstance(task, FetchCheckpoint) and outcome.statuses != (ItemStatus.OK,):
            pages = [(Kind.WINDOW, task.windows), (Kind.POINT, task.points)]
        elif isinstance(task, FetchPages):
            bad = np.fromiter((status is not ItemStatus.OK for status in outcome.statuses), np.bool_, len(task.ids))
            pages = [(Kind.PREFIX, task.ids[bad])]
        else:
            pages = []  # a failed put only reads them
        return tuple(Span(tier=Tier.HOST, kind=kind, ids=ids) for kind, ids in pages if len(ids))

    def _size(self, pages: tuple[Span, ...]) -> int:
        return sum(len(span.ids) * self._host.layout.strides[span.kind] for span in pages)

    def _judge(self, task: Task, outcome: Outcome) -> None:
        """Counts failures by their cause, and reports the result to the breaker."""
        if outcome.error is None and outcome.statuses.count(ItemStatus.OK) == len(outcome.statuses):
            self._breaker.succeeded()
            return
        for status in outcome.statuses if not isinstance(task, FindItems) else ():  # a missing value is no failure
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

    def _cancel(self, job: JobId) -> None:
        self._called_off[job] = None
        self._store_executor.cancel(job)

    def _withdraw_called_off(self) -> None:
        """Withdraws cancelled operations that have not begun, so that a store that hangs holds no pages for them."""
        for job in list(self._called_off):
            if job not in self._sent or self.withdraw(job):
                self._sent.pop(job, None)  # still there if it was given up before
                del self._called_off[job]


def _operation(task: Task) -> str:
    if isinstance(task, FindItems):
        return "find"
    return "fetch" if isinstance(task, (FetchPages, FetchCheckpoint)) else "put"
