"""Whether a store is used or suspended, judged by how its calls end. Logs every change. Any thread.

Queries and transfers are judged separately: an index in memory answers while the disk below it hangs. While either fails,
neither is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from stepwell.base.meters import Clock, Counters
from stepwell.base.tasks import ItemStatus
from stepwell.policy.store_use import Breaker, BreakerState
from stepwell.verified.calls import Call

log = logging.getLogger(__name__)


class Health:
    """The circuit breakers of one store, and counters."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._data, self._questions = Breaker(), Breaker()
        self._counters, self._lock = Counters(), Lock()
        self._closed = False

    @property
    def state(self) -> BreakerState:
        return self._data.state if self._data.state is not BreakerState.CLOSED else self._questions.state

    @contextmanager
    def call(self, deadline_s: float, statuses: Sequence[ItemStatus] = (), *, question: bool = False) -> Iterator[Call | None]:
        """A call, or None while the store is suspended. On exit waits for the call, and records how the store did.

        If the caller is interrupted, nothing touches its memory any more, and the next call judges the store.
        """
        call = self._begin(deadline_s, question=question)
        if call is None:
            yield None
            return
        try:
            yield call
            self._end(call, statuses, question=question)
        except BaseException:
            call.abandon()
            with self._lock:
                (self._questions if question else self._data).undecided()
            raise

    def _begin(self, deadline_s: float, *, question: bool) -> Call | None:
        now = self._clock.now()
        with self._lock:
            if self._closed or not (self._data.allows(now) and self._questions.allows(now)):
                self._counters.add("store_not_asked")
                return None
            (self._questions if question else self._data).asked(now)
        return Call(self._clock, deadline_s)

    def _end(self, call: Call, statuses: Sequence[ItemStatus], *, question: bool) -> None:
        breaker = self._questions if question else self._data
        call.end()
        why = "it did not answer in time" if call.overdue else call.error
        if why is None and ItemStatus.FAILED in statuses:
            why = "it could not read or write values"
        with self._lock:
            before = self.state
            if why is None:
                breaker.succeeded()
            else:
                self._counters.add("store_overdue" if call.overdue else "store_failed")
                if breaker.failed(self._clock.now()):
                    self._counters.add("store_switched_off")
            after = self.state
        if after is BreakerState.OPEN and before is BreakerState.CLOSED:
            log.warning("the %s store is left alone for a while: %s", self._name, why)
        elif after is BreakerState.CLOSED and before is not BreakerState.CLOSED:
            log.warning("the %s store is used again", self._name)

    def count(self, verb: str, statuses: Sequence[ItemStatus], size_bytes: int) -> None:
        """Counts the results for the values of a call."""
        with self._lock:
            self._counters.add(f"{verb}_bytes", size_bytes)
            for status in set(statuses):
                label = "values" if status is ItemStatus.OK else status.name.lower()
                self._counters.add(f"{verb}_{label}", statuses.count(status))

    def snapshot(self) -> Mapping[str, int]:
        with self._lock:
            return self._counters.snapshot()

    def close(self) -> bool:
        """Prevents new calls; returns whether this is the first close."""
        with self._lock:
            closed, self._closed = self._closed, True
        return not closed
