"""The order in which a tier gives things up: a heap that is never rebuilt.

An entry may be out of date. It counts only while its ticket is the victim's own, and a victim whose rank
rose since it was pushed is put back when it surfaces; so touching a victim costs nothing. Frees nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from stepwell.tree.node import Victim


class Standing(NamedTuple):
    """Where a victim stands: worthless things first (-1), then by priority, then by rank."""

    priority: int
    rank: float


class EvictionOrder:
    """One tier's candidates for eviction, the least worth keeping first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Victim]] = []
        self._tickets = 0

    def push(self, victim: Victim, standing: Standing) -> None:
        """Queues `victim`; an earlier entry of it no longer counts."""
        self._tickets += 1
        victim.ticket, victim.standing = self._tickets, standing.priority
        heappush(self._heap, (standing.priority, standing.rank, self._tickets, victim))

    def head(self) -> tuple[Victim, Standing] | None:
        """The first live entry and where it stood when it was queued; stays queued."""
        while self._heap:
            priority, rank, ticket, victim = self._heap[0]
            if victim.ticket == ticket:
                return victim, Standing(priority, rank)
            heappop(self._heap)
        return None

    def pop(self) -> Victim | None:
        """Takes out the first live entry; its victim is then not queued."""
        head = self.head()
        if head is None:
            return None
        heappop(self._heap)
        victim = head[0]
        victim.ticket = 0
        return victim
