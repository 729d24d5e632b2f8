"""An order of candidates for eviction, the least valuable first, although values change over time. Decides nothing else.

An order has one heap for each value class, and no heap is ever rebuilt. Entries may be stale: an entry counts only while its
number is the victim's own, and a victim whose standing rose since it was pushed is pushed again when it surfaces, so using a
victim costs nothing. Stale entries are swept out a few at a time: every push moves a few entries from the older half to the newer
one and drops those that are stale. A caller that also sweeps whenever an entry becomes stale bounds the number of entries to a
few times the live ones.

Which value class goes first depends on the time. While a tier evicts, time is frozen (`freeze_time`) and the heads of all value
classes are kept in order, so finding the first again costs nothing for classes that did not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from stepwell.base.untracked import untrack
from stepwell.policy.value import ValueClass, ValuePolicy
from stepwell.tree.node import Victim

SWEPT_PER_PUSH = 2
WORTHLESS, DUPLICATE, USEFUL = -2, -1, 0  # ranks: unusable victims go first, then those that another tier has too


class Standing(NamedTuple):
    """A victim's position: by rank, then by the worth of its value class now.

    Among DUPLICATE victims the most valuable goes first, since it leaves the other tier last and must be copied again last. Their
    value classes therefore hold the negative of the last visit.
    """

    rank: int
    value_class: ValueClass


_Key = tuple[int, int, int]  # rank, group, level
_Entry = tuple[float, int, Victim]  # last visit, number, victim
_Heaps = dict[_Key, list[_Entry]]
# Heads are ordered by rank, worth, last visit and number. Then follow a number of the head, its key, and the heap it is first in.
Head = tuple[int, float, float, int, int, _Key, list[_Entry]]


class EvictionOrder:
    """One tier's candidates for eviction, the least worth keeping first."""

    def __init__(self, value: ValuePolicy) -> None:
        self._value = value
        self._older: _Heaps = {}
        self._newer: _Heaps = {}
        self._num_pushed = 0  # to this order alone
        self._turns: list[tuple[_Heaps, _Key]] = []  # heaps that `next_head` has not looked at yet
        self._heads: list[Head] | None = None  # a heap while time is frozen; only the latest head of each heap counts
        self._latest: dict[int, int] = {}  # the number of the latest head, by the identity of its heap
        self._last_head = 0

    def __len__(self) -> int:
        """The number of entries, live or stale."""
        return sum(len(heap) for heaps in (self._older, self._newer) for heap in heaps.values())

    def __bool__(self) -> bool:
        """Whether there may be a live entry."""
        return bool(self._older or self._newer)

    def live(self) -> Iterator[Victim]:
        """The queued victims, in no order. Scans all entries."""
        for heaps in (self._older, self._newer):
            for heap in heaps.values():
                yield from (victim for _, number, victim in heap if victim.entry == number)

    def push(self, victim: Victim, standing: Standing, *, number: int | None = None) -> None:
        """Queues `victim`; an earlier entry of it becomes stale.

        `number` is the one that another order gave it, for an entry that counts in both orders.
        """
        if number is None:
            number = self._num_pushed = self._num_pushed + 1
            victim.entry, victim.standing = number, standing.rank
        value_class = standing.value_class
        entry = (value_class.last_visit_s, number, victim)
        untrack(entry)
        self._add((standing.rank, value_class.hazard_group, value_class.gain_level), entry)
        self.sweep()

    def freeze_time(self) -> bool:
        """Values do not change until `unfreeze_time`. False if time is frozen already."""
        if self._heads is not None:
            return False
        self._heads = []
        for heaps in (self._older, self._newer):
            for key in list(heaps):
                heap = _living(heaps, key)
                if heap is not None:
                    self._heads.append(self._head_of(key, heap))
        heapify(self._heads)
        return True

    def unfreeze_time(self) -> None:
        """Values change with time again."""
        self._heads = None
        self._latest.clear()

    def head(self) -> tuple[Victim, Standing] | None:
        """The first live entry and its standing when it was queued; stays queued."""
        found = self._first()
        return (found[0][0][2], found[1]) if found is not None else None

    def pop(self) -> Victim | None:
        """Removes and returns the first live entry's victim, which is then not queued."""
        found = self._first()
        if found is None:
            return None
        victim = heappop(found[0])[2]
        victim.entry = 0
        return victim

    def next_head(self) -> tuple[Victim, Standing] | None:
        """The first live entry of some value class, a different class at each call; stays queued."""
        if not self._turns:
            self._turns = [(heaps, key) for heaps in (self._older, self._newer) for key in heaps]
        while self._turns:
            heaps, key = self._turns.pop()
            heap = _living(heaps, key)
            if heap is not None:
                return heap[0][2], _standing(key, heap)
        return None

    def clear(self) -> None:
        self._older.clear()
        self._newer.clear()
        self._turns.clear()
        self._latest.clear()
        if self._heads is not None:
            self._heads = []

    def rank(self, standing: Standing) -> tuple[int, float, float]:
        """A key to compare standings by: the lowest goes first; of two equal values, the one visited longer ago."""
        return standing.rank, self._worth(standing.rank, *standing.value_class), standing.value_class.last_visit_s

    def _first(self) -> tuple[list[_Entry], Standing] | None:
        """The heap whose head goes first, and the standing of that head."""
        if self._heads is not None:
            frozen = self._frozen_head()
            return (frozen[6], _standing(frozen[5], frozen[6])) if frozen is not None else None
        first: list[tuple[_Key, list[_Entry]]] = []  # those of the lowest rank; mostly a single one, which needs no comparing
        for heaps in (self._older, self._newer):
            for key in list(heaps):
                if first and key[0] > first[0][0][0]:
                    continue
                heap = _living(heaps, key)
                if heap is None:
                    continue
                if first and key[0] < first[0][0][0]:
                    first.clear()
                first.append((key, heap))
        if not first:
            return None
        key, heap = min(first, key=self._order_of_head) if len(first) > 1 else first[0]
        return heap, _standing(key, heap)

    def _frozen_head(self) -> Head | None:
        """Like `head`, while time is frozen."""
        heads = self._heads
        assert heads is not None, "time is not frozen"
        while heads:
            head = heads[0]
            _, _, _, number, latest, key, heap = head
            if heap and heap[0][1] == number and heap[0][2].entry == number:
                return head
            if self._latest.get(id(heap)) != latest:
                heappop(heads)
                continue
            while heap and heap[0][2].entry != heap[0][1]:
                heappop(heap)
            if heap:
                heapreplace(heads, self._head_of(key, heap))
            else:
                del self._latest[id(heap)]
                heappop(heads)
        return None

    def _head_of(self, key: _Key, heap: list[_Entry]) -> Head:
        """A new head for the first entry of a heap; earlier heads of the heap no longer count."""
        since, number, _ = heap[0]
        self._last_head = self._latest[id(heap)] = self._last_head + 1
        return key[0], self._worth(*key, since), since, number, self._last_head, key, heap

    def _add(self, key: _Key, entry: _Entry) -> None:
        heap = self._newer.get(key)
        if heap is None:
            heap = self._newer[key] = []
            untrack(heap)
        heappush(heap, entry)
        if self._heads is not None and heap[0] is entry:
            heappush(self._heads, self._head_of(key, heap))

    def _order_of_head(self, value_class: tuple[_Key, list[_Entry]]) -> tuple[float, float, int]:
        (rank, group, level), heap = value_class
        since, number, _ = heap[0]
        return self._worth(rank, group, level, since), since, number

    def _worth(self, rank: int, group: int, level: int, since: float) -> float:
        return self._value.worth(group, level, since) if rank != DUPLICATE else -self._value.worth(group, level, -since)

    def sweep(self, count: int = SWEPT_PER_PUSH) -> None:
        """Checks `count` entries and drops those that are stale."""
        for _ in range(count):
            if not self._older:
                self._older, self._newer = self._newer, self._older
                return
            key, heap = next(iter(self._older.items()))
            if not heap:
                del self._older[key]
                continue
            entry = heap.pop()  # the last entry of a heap can be removed without reordering it
            if not heap:
                del self._older[key]
            if entry[2].entry == entry[1]:
                self._add(key, entry)


def _living(heaps: _Heaps, key: _Key) -> list[_Entry] | None:
    """The heap of a key, with a live entry first; None if it has no live entry, and then the heap is removed."""
    heap = heaps.get(key)
    while heap and heap[0][2].entry != heap[0][1]:
        heappop(heap)
    if not heap:
        heaps.pop(key, None)
        return None
    return heap


def _standing(key: _Key, heap: list[_Entry]) -> Standing:
    return Standing(key[0], ValueClass(key[1], key[2], heap[0][0]))
