"""One order of candidates for eviction: who is worth least now, though worth changes while nobody looks. Decides nothing else.

An order is a heap for each place, none of them ever rebuilt. An entry may be out of date: it counts only while its number is the
victim's own, and a victim whose standing rose since it was pushed is put back when it surfaces; so touching a victim costs
nothing. Entries whose victim is gone are swept out a few at a time: every push moves a few entries from the older half to the
newer one and leaves the dead behind. Whoever sweeps at each death too has no more entries than a few times the live ones.

Which place goes first depends on the time. While a tier makes room none passes (`hold`), and the heads of all places are kept in
order: to find the first again costs nothing for places that did not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from stepwell.base.untracked import untrack
from stepwell.policy.value import Place, ValuePolicy
from stepwell.tree.node import Victim

SWEPT_PER_PUSH = 2
WORTHLESS, REPEATED, USEFUL = -2, -1, 0  # ranks: what nothing can use goes first, then what another tier has too


class Standing(NamedTuple):
    """Where a victim stands: by rank, then by what its place is worth now.

    Of what is REPEATED the most valuable goes first: it leaves the other tier last, and has to be copied again last. So its place
    is told by the negative of since when.
    """

    rank: int
    place: Place


_Key = tuple[int, int, int]  # rank, group, level
_Entry = tuple[float, int, Victim]  # since when, number, who
_Heaps = dict[_Key, list[_Entry]]
# The order of a head: rank, worth, since when, number. Then a number of its own, its place, and the heap it is the first of.
Head = tuple[int, float, float, int, int, _Key, list[_Entry]]


class EvictionOrder:
    """One tier's candidates for eviction, the least worth keeping first."""

    def __init__(self, value: ValuePolicy) -> None:
        self._value = value
        self._older: _Heaps = {}
        self._newer: _Heaps = {}
        self._num_pushed = 0  # to here alone
        self._turns: list[tuple[_Heaps, _Key]] = []  # places that `next_head` has still to look at
        self._heads: list[Head] | None = None  # while held: a heap. A heap of entries has one that counts, its latest
        self._latest: dict[int, int] = {}  # by the identity of a heap, the number of that
        self._last_head = 0

    def __len__(self) -> int:
        """Entries, live or not."""
        return sum(len(heap) for heaps in (self._older, self._newer) for heap in heaps.values())

    def __bool__(self) -> bool:
        """Whether there may be a live entry."""
        return bool(self._older or self._newer)

    def live(self) -> Iterator[Victim]:
        """Who is queued here, in no order. Looks at everything."""
        for heaps in (self._older, self._newer):
            for heap in heaps.values():
                yield from (victim for _, number, victim in heap if victim.entry == number)

    def push(self, victim: Victim, standing: Standing, *, number: int | None = None) -> None:
        """Queues `victim`; an earlier entry of it no longer counts.

        `number` is one that another order has given it, if it is to count there and here alike.
        """
        if number is None:
            number = self._num_pushed = self._num_pushed + 1
            victim.entry, victim.standing = number, standing.rank
        place = standing.place
        entry = (place.since, number, victim)
        untrack(entry)
        self._add((standing.rank, place.group, place.level), entry)
        self.sweep()

    def hold(self) -> bool:
        """Nobody's worth changes until `let_go`. False where that was said already."""
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

    def let_go(self) -> None:
        """Time passes again."""
        self._heads = None
        self._latest.clear()

    def head(self) -> tuple[Victim, Standing] | None:
        """The first live entry and where it stood when it was queued; stays queued."""
        found = self._first()
        return (found[0][0][2], found[1]) if found is not None else None

    def pop(self) -> Victim | None:
        """Takes out the first live entry; its victim is then not queued."""
        found = self._first()
        if found is None:
            return None
        victim = heappop(found[0])[2]
        victim.entry = 0
        return victim

    def next_head(self) -> tuple[Victim, Standing] | None:
        """The first live entry of some place, another one at each call; stays queued."""
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
        """For comparing: the lowest goes first. Of two equal worths the one visited longer ago does."""
        return standing.rank, self._worth(standing.rank, *standing.place), standing.place.since

    def _first(self) -> tuple[list[_Entry], Standing] | None:
        """The heap whose head goes first, and where that stands."""
        if self._heads is not None:
            held = self._held_head()
            return (held[6], _standing(held[5], held[6])) if held is not None else None
        first: list[tuple[_Key, list[_Entry]]] = []  # of the lowest rank: mostly one, whose worth is not asked for then
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

    def _held_head(self) -> Head | None:
        """As `head`, while the order is held: as it was queued."""
        heads = self._heads
        assert heads is not None, "the order is not held"
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
        """Says that what is first in a heap now counts as its head."""
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

    def _order_of_head(self, place: tuple[_Key, list[_Entry]]) -> tuple[float, float, int]:
        (rank, group, level), heap = place
        since, number, _ = heap[0]
        return self._worth(rank, group, level, since), since, number

    def _worth(self, rank: int, group: int, level: int, since: float) -> float:
        return self._value.worth(group, level, since) if rank != REPEATED else -self._value.worth(group, level, -since)

    def sweep(self, count: int = SWEPT_PER_PUSH) -> None:
        """Looks at so many entries, and takes out those that no longer count."""
        for _ in range(count):
            if not self._older:
                self._older, self._newer = self._newer, self._older
                return
            key, heap = next(iter(self._older.items()))
            if not heap:
                del self._older[key]
                continue
            entry = heap.pop()  # the last of a heap can go without disturbing it
            if not heap:
                del self._older[key]
            if entry[2].entry == entry[1]:
                self._add(key, entry)


def _living(heaps: _Heaps, key: _Key) -> list[_Entry] | None:
    """The heap of a place, with a live entry first; None, and no heap, when it has none."""
    heap = heaps.get(key)
    while heap and heap[0][2].entry != heap[0][1]:
        heappop(heap)
    if not heap:
        heaps.pop(key, None)
        return None
    return heap


def _standing(key: _Key, heap: list[_Entry]) -> Standing:
    return Standing(key[0], Place(key[1], key[2], heap[0][0]))
