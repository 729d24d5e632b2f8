"""The order in which a tier gives things up: a heap that is never rebuilt.

An entry may be out of date. It counts only while its ticket is the victim's own, and a victim whose rank
rose since it was pushed is put back when it surfaces; so touching a victim costs nothing.

Entries whose victim is gone are swept out a few at a time: every push moves a few entries from the older half
to the newer one and leaves the dead behind. Frees nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from stepwell.tree.node import Victim

SWEPT_PER_PUSH = 2


class Standing(NamedTuple):
    """Where a victim stands: worthless things first (-1), then by priority, then by rank."""

    priority: int
    rank: float


_Entry = tuple[int, float, int, Victim]


class EvictionOrder:
    """One tier's candidates for eviction, the least worth keeping first."""

    def __init__(self) -> None:
        self._older: list[_Entry] = []
        self._newer: list[_Entry] = []
        self._tickets = 0

    def __len__(self) -> int:
        """Entries, live or not."""
        return len(self._older) + len(self._newer)

    def push(self, victim: Victim, standing: Standing) -> None:
        """Queues `victim`; an earlier entry of it no longer counts."""
        self._tickets += 1
        victim.ticket, victim.standing = self._tickets, standing.priority
        heappush(self._newer, (standing.priority, standing.rank, self._tickets, victim))
        self._sweep()

    def head(self) -> tuple[Victim, Standing] | None:
        """The first live entry and where it stood when it was queued; stays queued."""
        entry = self._first()
        return (entry[3], Standing(entry[0], entry[1])) if entry is not None else None

    def pop(self) -> Victim | None:
        """Takes out the first live entry; its victim is then not queued."""
        entry = self._first()
        if entry is None:
            return None
        heappop(self._older if self._older and self._older[0] is entry else self._newer)
        victim = entry[3]
        victim.ticket = 0
        return victim

    def _first(self) -> _Entry | None:
        heads = []
        for heap in (self._older, self._newer):
            while heap and heap[0][3].ticket != heap[0][2]:
                heappop(heap)
            if heap:
                heads.append(heap[0])
        return min(heads) if heads else None

    def _sweep(self) -> None:
        if not self._older:
            self._older, self._newer = self._newer, self._older
            return
        for _ in range(min(SWEPT_PER_PUSH, len(self._older))):
            entry = self._older.pop()  # the last of a heap can go without disturbing it
            if entry[3].ticket == entry[2]:
                heappush(self._newer, entry)
