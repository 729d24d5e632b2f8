"""Which segment to reclaim, and which of its values to evict for that. Changes no value.

    a segment, by rank      | cold ........ | ........ hot | tombstones |
                            |-- evicted ----|--- must fit the space ----|
                                            T  the warmest value that must be evicted

If some segments fit completely, the one with the least content is chosen. Otherwise it is the one whose T is coldest, in the
order of eviction (`chains.py`). Only its own values are evicted, and their dependents, wherever those lie.

Segments are kept in a heap by T as last computed. Uses only make a T warmer, so the front of the heap is computed again before
it is chosen; a segment where levels fell is treated like a new one. A choice computes few segments, whatever their number: if
more have changed, an earlier T counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from stepwell.store.log.format.batch import footprint
from stepwell.store.log.state.chains import LEVEL_SHIFT
from stepwell.store.log.state.columns import Rows
from stepwell.store.log.state.index import Index
from stepwell.store.log.state.segments import Segment, Segments, State

Needs = Callable[
    [Segment], int | None
]  # bytes of tombstones that must be relocated out of a segment; None: it cannot be reclaimed
NO_ROWS: Rows = np.zeros(0, np.int64)
_COLD_PART = 4  # the part of all values that may be dropped as not worth copying
_NO_LOSS = -1  # the T of a segment that fits completely
_MOST_NEW, _MOST_AGAIN = 4, 8  # segments computed for one choice: for the first time, and again


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Victim:
    segment: int
    keep: Rows  # of that segment, to be relocated
    drop: Rows  # of any segment, to be evicted, in the order of eviction


class VictimOrder:
    """The full segments, ordered by what would be lost with each. For the one writer; others may use values meanwhile."""

    def __init__(self, index: Index, segments: Segments, keep_bytes: int) -> None:
        """`keep_bytes` is the most that may be copied out of one segment."""
        self._index, self._segments, self._keep_bytes = index, segments, keep_bytes
        self._light: list[tuple[int, int]] = []  # bytes, segment: those that fit completely; some entries are stale
        self._heap: list[tuple[int, int]] = []  # T as last computed, segment; some entries are stale
        self._coldest: dict[int, int] = {}  # segment -> its T in the heap
        self._new: dict[int, None] = {}  # not computed yet, or not since levels fell there
        self._seen = 0  # the number of the newest segment that was added
        for number, segment in segments.table.items():
            if segment.state is State.SEALED:
                self._take_in(number)
            if segment.state is not State.ACTIVE:
                self._seen = number

    def take_notice(self) -> None:
        """Applies the changes since the last choice: new segments, lost values, lower levels. The caller has the lock."""
        self._index.settle_uses()
        for number in range(self._seen + 1, self._segments.last_number + 1):
            segment = self._segments.table.get(number)
            if segment is not None and segment.state is State.ACTIVE:
                break
            self._seen = number
            if segment is not None and segment.state is State.SEALED:
                self._take_in(number)
        lighter, self._index.lighter = self._index.lighter, set()
        for number in lighter:
            self._note_light(number)
        lowered = self._index.chains.lowered
        while lowered:
            if (number := lowered.pop()) in self._coldest:
                self._new[number] = None

    def choose(self, needs: Needs, keep_bytes: int) -> int | None:
        """The segment to reclaim next, if `keep_bytes` of it may stay; None if no segment can be reclaimed.

        Call after `take_notice`, without the lock.
        """
        while True:
            for number in list(islice(self._new, _MOST_NEW)):
                del self._new[number]
                if self._is_full(number):
                    heappush(self._heap, (self._look(number, keep_bytes)[0], number))
            found = self._lightest(needs, keep_bytes)
            if found is None:
                found = self._front(needs, keep_bytes)
            if found is not None or not self._new:
                return found

    def drop_segment(self, number: int) -> None:
        """Drops a segment that is free."""
        self._coldest.pop(number, None)
        self._new.pop(number, None)

    def victim(self, number: int, keep_bytes: int, cold_bytes: int) -> Victim:
        """Which values of a segment to keep so that they fit in `keep_bytes`, and which to evict.

        If any value must be evicted, values colder than the coldest of the next segment are dropped too, up to `cold_bytes`.
        """
        index = self._index
        keep, drop = _cut(index, index.rows_in(number), keep_bytes)
        if not len(drop):
            return Victim(segment=number, keep=keep, drop=drop)
        warmest = int(index.chains.ranks(drop[:1])[0])
        others = [
            rank for rank, other in self._heap[:3] if other != number and self._coldest.get(other) == rank
        ]  # the next is there
        of_level = ((warmest >> LEVEL_SHIFT) + 1 << LEVEL_SHIFT) - 1
        colder = keep[::-1][index.chains.ranks(keep[::-1]) <= min(min(others, default=warmest), of_level)]
        freed = footprint(index.columns.length[colder]).cumsum() + int(footprint(index.columns.length[drop]).sum())
        worthless = colder[freed <= min(cold_bytes, index.total_bytes // _COLD_PART)]
        drop = index.chains.with_descendants(np.concatenate((drop, worthless)))
        return Victim(segment=number, keep=keep[~np.isin(keep, drop)], drop=drop)

    # ---- inside -----------------------------------------------------------------------------------

    def _take_in(self, number: int) -> None:
        self._new[number] = None
        self._note_light(number)

    def _note_light(self, number: int) -> None:
        segment, size = self._segments.table.get(number), self._index.live_bytes.get(number, 0)
        if size <= self._keep_bytes and segment is not None and segment.state is State.SEALED:
            heappush(self._light, (size, number))

    def _lightest(self, needs: Needs, keep_bytes: int) -> int | None:
        """The segment with the least content that fits completely. Tombstones count twice: copying them frees nothing."""
        aside, found, least = list[tuple[int, int]](), None, 2 * keep_bytes + 1
        while self._light and self._light[0][0] < least:
            size, number = heappop(self._light)
            if not self._is_full(number) or self._index.live_bytes.get(number, 0) != size:
                continue
            aside.append((size, number))
            tombstones = needs(self._segments.table[number])
            if tombstones is not None and size + tombstones <= keep_bytes and size + 2 * tombstones < least:
                found, least = number, size + 2 * tombstones
        for entry in aside:
            heappush(self._light, entry)
        return found

    def _front(self, needs: Needs, keep_bytes: int) -> int | None:
        """The segment with the coldest T if this much of it may stay, among those that seem coldest."""
        aside, looked = list[tuple[int, int]](), list[tuple[int, int]]()
        while self._heap and len(looked) < _MOST_AGAIN:
            rank, number = heappop(self._heap)
            if self._coldest.get(number) != rank or not self._is_full(number):
                continue
            tombstones = needs(self._segments.table[number])
            if tombstones is not None:
                rank, now = self._look(number, keep_bytes - tombstones)
                looked.append((now, number))
            aside.append((rank, number))
            if looked and self._heap and looked[-1][0] <= self._heap[0][0]:
                break
        for entry in aside:
            heappush(self._heap, entry)
        return min(looked)[1] if looked else None

    def _look(self, number: int, keep_bytes: int) -> tuple[int, int]:
        """The T of a segment, which is stored, and its T if only `keep_bytes` may be copied."""
        index, rows = self._index, self._index.rows_in(number)
        ranks = index.chains.ranks(rows)
        order = np.argsort(-ranks)
        held = footprint(index.columns.length[rows[order]]).cumsum()
        first, now = (
            int(ranks[order[fits]]) if (fits := int(np.searchsorted(held, most, side="right"))) < len(rows) else _NO_LOSS
            for most in (self._keep_bytes, min(keep_bytes, self._keep_bytes))
        )
        self._coldest[number] = first
        return first, now

    def _is_full(self, number: int) -> bool:
        segment = self._segments.table.get(number)
        if segment is None or segment.state is not State.SEALED:
            self.drop_segment(number)
            return False
        return True


def evict_first(index: Index, tenant: str, wanted_bytes: int, *, most: int) -> Rows:
    """The first values of a tenant that free this many bytes, at most `most`, out of their chains. The caller removes them."""
    index.settle_uses()
    rows, freed = list[int](), 0
    while freed < wanted_bytes and len(rows) < most and (row := index.chains.take_first(tenant)) is not None:
        rows.append(row)
        freed += int(footprint(index.columns.length[row : row + 1])[0])
    return np.array(rows, np.int64)


def _cut(index: Index, rows: Rows, keep_bytes: int) -> tuple[Rows, Rows]:
    """The values of a segment that may stay, and those to evict; both the warmest first."""
    rows = rows[np.argsort(-index.chains.ranks(rows), kind="stable")]
    fits = int(np.searchsorted(footprint(index.columns.length[rows]).cumsum(), keep_bytes, side="right"))
    return rows[:fits], rows[fits:]
