"""Runs errands on every rank's store hands and brings home what came of them. Decides nothing, applies nothing.

Reads and questions have threads of their own, apart from writes, so that no request waits behind a backup. Writes of a
rank run in order on one thread by default: parents before children.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Protocol

from stepwell.base.clock import Clock
from stepwell.base.errand import Errand, Fate, Outcome, PutCheckpoint, PutPages, Reply, joint, num_items
from stepwell.base.ids import JobId
from stepwell.transfer.store_hands import StoreHands


class Porter(Protocol):
    """Takes errands and gives back replies; neither ever blocks. Called on the brain's thread."""

    def submit(self, errand: Errand) -> None: ...

    def replies(self) -> list[Reply]:
        """Everything that was answered since the last call, each errand once."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Waits until everything submitted was answered, or for so long. The only verb that waits."""
        ...

    def close(self) -> None:
        """Takes no more and lets its threads end; does not wait for one that hangs."""
        ...


class _Tally:
    """The outcomes of ranks that have answered, and the longest any of them took."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.took_s = 0.0


class ThreadPorter:
    """Worker threads for each rank."""

    def __init__(self, ranks: Sequence[StoreHands], clock: Clock, *, readers: int = 4, writers: int = 1) -> None:
        assert ranks, "a porter needs at least one rank's hands"
        self._ranks = ranks
        self._clock = clock
        self._reading = [ThreadPoolExecutor(readers, thread_name_prefix=f"stepwell-read{i}") for i in range(len(ranks))]
        self._writing = [ThreadPoolExecutor(writers, thread_name_prefix=f"stepwell-write{i}") for i in range(len(ranks))]
        self._lock = Condition()
        self._tallies: dict[JobId, _Tally] = {}
        self._done: deque[Reply] = deque()

    def submit(self, errand: Errand) -> None:
        with self._lock:
            self._tallies[errand.job] = _Tally()
        pools = self._writing if isinstance(errand.task, (PutPages, PutCheckpoint)) else self._reading
        for hands, pool in zip(self._ranks, pools, strict=True):
            pool.submit(self._run, hands, errand)

    def replies(self) -> list[Reply]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def drain(self, timeout_s: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._tallies, timeout_s)

    def close(self) -> None:
        for pool in (*self._reading, *self._writing):
            pool.shutdown(wait=False)

    def _run(self, hands: StoreHands, errand: Errand) -> None:
        started_s = self._clock.now()
        outcome = attempt(hands, errand)
        took_s = self._clock.now() - started_s
        with self._lock:
            tally = self._tallies[errand.job]
            tally.outcomes.append(outcome)
            tally.took_s = max(tally.took_s, took_s)
            if len(tally.outcomes) == len(self._ranks):
                del self._tallies[errand.job]
                self._done.append(Reply(job=errand.job, outcome=joint(tally.outcomes), took_s=tally.took_s))
                self._lock.notify_all()


def attempt(hands: StoreHands, errand: Errand) -> Outcome:
    """One rank's try at an errand. Whatever goes wrong comes home as an outcome."""
    if errand.cancelled():
        return Outcome(fates=(Fate.CANCELLED,) * num_items(errand.task))
    try:
        return hands.run(errand.namespace, errand.task, errand.cancelled)
    except Exception as error:  # the edge to somebody else's code: a failure comes home as a value
        return Outcome(fates=(Fate.FAILED,) * num_items(errand.task), error=f"{type(error).__name__}: {error}")
