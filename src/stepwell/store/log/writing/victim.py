"""Which segment to reclaim, and which of its values to evict for that. Reads the index; changes nothing.

    a segment, by warmth    | cold ........ | ........ hot | tombstones |
                            |-- evicted ----|--- must fit the room -----|
                                            T  the warmest value that has to go

The order is (level, last use, deepest first). What a value stands on is worth no less than the value, so chains stay whole: the
levels that count are worked out over all values, in as many steps as the longest chain has doublings.

Without a loss, if some segment fits as it is: the one with least in it. Otherwise the one whose T is coldest. Only its
own values go, and what stands on them, wherever that lies: children before parents, and nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.store.log.format.batch import footprint
from stepwell.store.log.state.index import DEPTH_BITS, Columns, Index, Rows

NO_ROWS: Rows = np.zeros(0, np.int64)
_COLD_PART = 4  # of all values at most are not worth copying
_LEVEL_SHIFT = 61  # the two bits below the sign
_MOST_USED = (1 << (_LEVEL_SHIFT - DEPTH_BITS)) - 1  # what is left for the last use: no log gets there
_SPACE_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Victim:
    segment: int
    keep: Rows  # of that segment, to be relocated
    drop: Rows  # of any segment, to be evicted


def choose_victim(index: Index, tombstone_bytes: Mapping[int, int], *, room: int, cold_bytes: int) -> Victim:
    """The segment to reclaim, out of those given with the bytes of tombstones that must be relocated out of each.

    What is among the coldest `cold_bytes` of all values is not worth copying once anything has to go.
    """
    sizes = {segment: index.live_bytes.get(segment, 0) + tombstones for segment, tombstones in tombstone_bytes.items()}
    fitting = [segment for segment in sizes if sizes[segment] <= room]
    if fitting:
        least = min(fitting, key=lambda segment: (sizes[segment] + tombstone_bytes[segment], segment))  # tombstones only live on
        return Victim(segment=least, keep=index.rows_in(least), drop=NO_ROWS)
    order = _Order(index)
    within = order.rows[np.isin(index.columns.segment[order.rows], np.array(list(sizes), np.int64))]
    if not len(within):
        return Victim(segment=min(sizes), keep=NO_ROWS, drop=NO_ROWS)
    segment, keep, drop = _coldest_cut(order, within, tombstone_bytes, room)
    worthless = order.threshold(min(cold_bytes, sum(index.live_bytes.values()) // _COLD_PART))
    cold = order.of(keep) <= worthless
    keep, drop = keep[~cold], np.concatenate((drop, keep[cold]))
    drop = order.with_descendants(drop)
    return Victim(segment=segment, keep=keep[~np.isin(keep, drop)], drop=drop)


def coldest(index: Index, wanted_bytes: int, tenant: str) -> Rows:
    """Values of a tenant that free at least so many bytes, in the order of eviction; all there are when that is less."""
    order, columns = _Order(index), index.columns
    theirs = np.array([space is not None and space.tenant == tenant for space in index.spaces], dtype=bool)
    rows = order.rows[theirs[columns.space[order.rows]]]
    ranks = order.of(rows)
    count = min(len(rows), 256)
    while True:
        chosen = np.argpartition(ranks, count - 1)[:count] if count < len(rows) else np.arange(len(rows))
        chosen = chosen[np.argsort(ranks[chosen], kind="stable")]
        freed = np.cumsum(footprint(columns.length[rows[chosen]]))
        enough = int(np.searchsorted(freed, wanted_bytes)) + 1
        if enough <= count or count == len(rows):
            found: Rows = rows[chosen[:enough]]
            return found
        count = min(len(rows), count * 4)


class _Order:
    """The order of eviction of all values, as it is now: the lowest rank goes first, and nothing before what stands on it."""

    def __init__(self, index: Index) -> None:
        index.settle_uses()
        self.columns, self.rows = index.columns, index.columns.held()
        columns, rows = self.columns, self.rows
        used = np.minimum(columns.used[rows], _MOST_USED)
        depth = columns.depth[rows].astype(np.int64)
        self._ranks: npt.NDArray[np.int64] = (self._levels() << _LEVEL_SHIFT) + (used << DEPTH_BITS) - depth

    def of(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The ranks of some values."""
        ranks: npt.NDArray[np.int64] = self._ranks[np.searchsorted(self.rows, rows)]
        return ranks

    def threshold(self, size_bytes: int) -> int:
        """The rank up to which the coldest values make up so many bytes."""
        order = np.argsort(self._ranks, kind="stable")
        enough = int(np.searchsorted(np.cumsum(footprint(self.columns.length[self.rows[order]])), size_bytes))
        return int(self._ranks[order[enough]]) - 1 if enough < len(self.rows) else int(self._ranks[order[-1]])

    def with_descendants(self, chosen: Rows) -> Rows:
        """The chosen values, and all that stand on them. None of those ranks higher, so only the lower ones are looked at."""
        if not len(chosen):
            return chosen
        rows = self.rows[self._ranks <= self.of(chosen).max()]
        lost = np.isin(rows, chosen)
        for above in _steps_up(self.columns, rows):
            lost |= lost[above]
        found: Rows = rows[lost]
        return found

    def _levels(self) -> npt.NDArray[np.int64]:
        """The highest level of each value and all that stand on it."""
        levels = self.columns.level[self.rows].astype(np.int64)
        if len(levels) and levels.min() < levels.max():
            for above in _steps_up(self.columns, self.rows):
                np.maximum.at(levels, above, levels)
        return levels


def _coldest_cut(order: _Order, rows: Rows, tombstone_bytes: Mapping[int, int], room: int) -> tuple[int, Rows, Rows]:
    """The segment whose warmest loss is coldest, with what of it may stay and what has to go."""
    columns, ranks = order.columns, order.of(rows)
    by_segment = np.lexsort((-ranks, columns.segment[rows]))  # the warmest first
    rows, ranks = rows[by_segment], ranks[by_segment]
    segments, starts = np.unique(columns.segment[rows], return_index=True)
    ends = np.append(starts[1:], len(rows))
    sizes = footprint(columns.length[rows])
    held = np.cumsum(sizes)
    before = held[starts] - sizes[starts] - np.array([tombstone_bytes[segment] for segment in segments.tolist()], np.int64)
    fits = held - np.repeat(before, ends - starts) <= room
    cuts = np.minimum(starts + np.add.reduceat(fits, starts, dtype=np.int64), ends - 1)
    best = int(np.argmin(ranks[cuts]))
    return int(segments[best]), rows[starts[best] : cuts[best]], rows[cuts[best] : ends[best]]


def _steps_up(columns: Columns, rows: Rows) -> Iterator[npt.NDArray[np.int64]]:
    """For each of these values the place of what it stands on among them: one step towards the root, then two, four, ...

    Who stands on nothing here stands on itself. Keys are told apart by eight of their bytes: two that share them cost a value
    that could have stayed, or one that stays longer.
    """
    space = columns.space[rows].astype(np.uint64) * _SPACE_MIX
    names, parents = _prints(columns.key[rows]) ^ space, _prints(columns.parent[rows])
    order = np.argsort(names, kind="stable")
    at = np.searchsorted(names[order], parents ^ space)
    above = order[np.minimum(at, len(rows) - 1)]
    none = (names[above] != parents ^ space) | (parents == 0)
    above[none] = np.flatnonzero(none)
    for _ in range(int(columns.depth[rows].max()).bit_length() + 1):
        yield above
        above = above[above]


def _prints(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    prints: npt.NDArray[np.uint64] = np.ascontiguousarray(keys[:, :8]).view(np.uint64).reshape(-1)
    return prints
