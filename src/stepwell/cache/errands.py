"""Errands to the store on their way: what each one holds while it runs, and whether the store is well.

An errand holds a reference to every host page it reads or writes, until the store has answered for it, however late. Pages of a
fetch that ended badly are held on for as long as the store may still write into them (`Traits.late_write_s`).
Outcomes are handed on in `apply`, on the brain's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepwell.base.clock import Clock
from stepwell.base.errand import Ask, Errand, Fate, FetchCheckpoint, FetchPages, Outcome, Reply, Task, num_items
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.keys import Namespace
from stepwell.base.plan import PageIds
from stepwell.cache.mover import Mover
from stepwell.cache.porter import Porter
from stepwell.memory.arena import Arena
from stepwell.metrics.counters import Counters
from stepwell.policy.breaker import Breaker
from stepwell.tree.node import Residency

Pages = tuple[tuple[Kind, PageIds], ...]
OnOutcome = Callable[[Outcome, float], None]  # and the seconds it took


class Call:
    """What an errand was sent for; it is called off by setting `is_off`. `page` is what it is about, where that matters."""

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
    errand: Errand
    started_s: float
    pages: Pages
    reads: Residency | None
    on_outcome: OnOutcome
    call: Call
    counts: bool  # for or against the store
    abandoned: bool = False


class Errands:
    """Starts errands and hands on their outcomes, each exactly once."""

    def __init__(
        self, porter: Porter, host: Arena, mover: Mover, counters: Counters, clock: Clock, breaker: Breaker, *, timeout_s: float,
        late_write_s: float,
    ) -> None:  # fmt: skip
        self._porter = porter
        self._host = host
        self._mover = mover
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
        """Every reference that errands hold, for audits."""
        for pages in (*[running.pages for running in self._running.values()], *[held.pages for held in self._held]):
            for kind, ids in pages:
                yield Tier.HOST, kind, ids

    def readers(self) -> Iterable[Residency | None]:
        return [running.reads for running in self._running.values()]

    def start(
        self, task: Task, namespace: Namespace, on_outcome: OnOutcome, *, call: Call, pages: Pages = (),
        reads: Residency | None = None, counts: bool = True,
    ) -> JobId:  # fmt: skip
        """Takes a reference to every host page named and sends the errand off. How the store does may count for nothing."""
        self._last_id += 1
        now = self._clock.now()
        errand = Errand(job=JobId(self._last_id), namespace=namespace, task=task, cancelled=call.off)
        pages = tuple((kind, ids) for kind, ids in pages if len(ids))
        for kind, ids in pages:
            self._host.retain(kind, ids)
        if reads is not None:
            reads.users += 1
        self._running[errand.job] = _Running(
            errand=errand, started_s=now, pages=pages, reads=reads, on_outcome=on_outcome, call=call, counts=counts
        )
        if counts:
            self._breaker.asked(now)
        self._porter.submit(errand)
        return errand.job

    def apply(self) -> int:
        """Hands on everything that was answered, and gives up on what is overdue; returns how many were answered."""
        replies = self._porter.replies()
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
        """Waits at most so long for one errand, and hands on what came of it. Nothing else is applied."""
        reply = self._porter.answer(job, timeout_s) if job in self._running else None
        if reply is not None:
            self._answered(reply)

    def drain(self, timeout_s: float) -> None:
        """Waits for everything under way: for so long, and no longer than an errand may take."""
        self._porter.drain(min(timeout_s, self._timeout_s))

    def close(self) -> None:
        """Takes back what has not begun, and lets the threads end. What has begun ends when the store lets it."""
        for running in self._running.values():
            running.call.is_off = True
        self._withdraw()
        self._porter.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _answered(self, reply: Reply) -> None:
        running = self._running.pop(reply.job)
        if not running.abandoned:
            if running.counts:
                self._judge(running.errand.task, reply.outcome)
            running.on_outcome(reply.outcome, reply.took_s)
        if running.reads is not None:
            self._mover.unpin(running.reads)
        late = self._may_be_written(running.errand.task, reply.outcome, running.pages)
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
            return pages if outcome.fates != (Fate.OK,) else ()
        if isinstance(task, FetchPages):
            bad = np.fromiter((fate is not Fate.OK for fate in outcome.fates), np.bool_, len(task.ids))
            return ((Kind.PREFIX, task.ids[bad]),) if bad.any() else ()
        return ()  # a put that ended badly only reads them

    def _size(self, pages: Pages) -> int:
        return sum(len(ids) * self._host.layout.strides[kind] for kind, ids in pages)

    def _release(self, pages: Pages) -> None:
        for kind, ids in pages:
            self._mover.release(Tier.HOST, kind, ids)

    def _judge(self, task: Task, outcome: Outcome) -> None:
        """Counts what went wrong by its cause, and lets the breaker know how the store did."""
        if outcome.error is None and outcome.fates.count(Fate.OK) == len(outcome.fates):
            self._breaker.succeeded()
            return
        for fate in outcome.fates if not isinstance(task, Ask) else ():  # that a store lacks something is no failure
            if fate not in (Fate.OK, Fate.CANCELLED):
                self._counters.add(f"store_{fate.name.lower()}")
        if outcome.error is not None or Fate.FAILED in outcome.fates:
            self._failed(outcome.error or "the store failed")
        elif Fate.CANCELLED in outcome.fates:
            self._breaker.undecided()
        else:
            self._breaker.succeeded()

    def _failed(self, why: str) -> None:
        self._failures.append(why)
        self._counters.add("store_errands_failed")
        if self._breaker.failed(self._clock.now()):
            self._counters.add("store_switched_off")

    def _withdraw(self) -> None:
        """Takes back what was called off and has not begun, so that a store that hangs does not hold pages for it."""
        for job, running in list(self._running.items()):
            if running.call.is_off and self._porter.withdraw(job):
                self._never_began(running)

    def _never_began(self, running: _Running) -> None:
        fates = (Fate.CANCELLED,) * num_items(running.errand.task)
        self._answered(Reply(job=running.errand.job, outcome=Outcome(fates=fates), took_s=0.0))

    def _abandon_overdue(self) -> None:
        """What the store has made no progress on for so long has failed; its pages stay held, for it may still be using them.

        What has only waited in line, behind something that hangs, is called off.
        """
        latest_s = self._clock.now() - self._timeout_s
        for running in list(self._running.values()):
            if running.started_s > latest_s:
                break
            if running.abandoned or self._porter.progressed_s(running.errand.job) > latest_s:
                continue
            if self._porter.withdraw(running.errand.job):
                self._counters.add("store_errands_never_began")
                self._never_began(running)
            else:
                running.abandoned = running.call.is_off = True
                if running.counts:
                    self._failed(f"no answer within {self._timeout_s:g} s")
                fates = (Fate.FAILED,) * num_items(running.errand.task)
                running.on_outcome(Outcome(fates=fates, error="no answer"), self._timeout_s)
