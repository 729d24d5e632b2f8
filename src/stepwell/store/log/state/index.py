"""The place, level and last use of every value: keys to rows, bytes per space, tenant and segment. No files, no locks.

A read or write of a value is a use of it and of all its ancestors, so a value was never used later than its parent.
Values are evicted in the order (level, used, deepest first): children before parents, manifests before members. `chains.py`
keeps the dependencies and effective levels once the log is open for writing (`keep_order`).

A long prompt is read and written a piece at a time, and every piece is a use of everything before it. So a use of ancestors is
only recorded, and applied by one walk to the root, latest use first, when the uses are needed (`settle_uses`).

A row of columns takes about 180 bytes per value, the dictionaries as much again, and the chains about 50.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Level
from stepwell.store.api import NO_PARENT, Space, SpaceSize
from stepwell.store.log.format.batch import Batch, BatchKind, footprint, levels_of, split
from stepwell.store.log.format.snapshot import SHAPES
from stepwell.store.log.state.chains import DEPTH_BITS, Chains
from stepwell.store.log.state.columns import NO_SEGMENT, Columns, Rows

_MAX_DEPTH = (1 << DEPTH_BITS) - 1
_MOST_NOTES = 1 << 12  # deferred walks: readers wait while they are made
_SLICE = 1 << 15  # values deleted at once


class Index:
    """All values that can be served. Every method that changes something says what; callers hold the lock."""

    def __init__(self) -> None:
        self.columns = Columns()
        self.tick = 1
        self.spaces: list[Space | None] = []  # by number, None where free; the first of a digest determines tenant and label
        self.num_values = 0
        self.total_bytes = 0  # on disk, of valid values
        self.live_bytes: dict[int, int] = {}  # the same, by segment
        self.lighter: set[int] = set()  # segments that lost values, for the code that orders segments
        self.space_bytes: list[int] = []  # bytes on disk, by space
        self.value_bytes: list[int] = []  # bytes as they were given, by space
        self._tenant_bytes: dict[str, int] = {}  # and by tenant, for those that have any
        self._numbers: dict[bytes, int] = {}
        self._free_numbers: list[int] = []
        self._rows: list[dict[bytes, int]] = []
        self._in_segment: dict[int, array[int]] = {}  # rows that were put there; some may have moved since
        self._chains: Chains | None = None  # None while nothing is evicted
        self._notes: list[tuple[int, bytes, bytes]] = []  # tick, space and key of a use that was not walked yet; ticks go up

    # ---- questions --------------------------------------------------------------------------------

    def rows_of(self, digest: bytes) -> dict[bytes, int]:
        """Keys to rows of one space; empty for an unknown one. For reading only."""
        number = self._numbers.get(digest)
        return {} if number is None else self._rows[number]

    @property
    def num_spaces(self) -> int:
        """The number of spaces that are not empty."""
        return len(self._numbers)

    def space(self, number: int) -> Space:
        space = self.spaces[number]
        assert space is not None, f"space {number} holds nothing"
        return space

    def space_of(self, digest: bytes) -> Space | None:
        """A space as it was first seen; None if it is empty."""
        number = self._numbers.get(digest)
        return None if number is None else self.spaces[number]

    def largest_spaces(self, most: int) -> list[SpaceSize]:
        """The spaces with the most bytes, largest first."""
        numbers = nlargest(most, self._numbers.values(), key=self.space_bytes.__getitem__)
        return [
            SpaceSize(space=self.space(number), values=len(self._rows[number]), used_bytes=self.space_bytes[number])
            for number in numbers
        ]

    def rows_in(self, segment: int) -> Rows:
        """The values of one segment. Visits no others."""
        rows = np.unique(np.array(self._in_segment.get(segment, ()), np.int64))
        found: Rows = rows[self.columns.segment[rows] == segment]
        return found

    @property
    def chains(self) -> Chains:
        assert self._chains is not None, "no order is kept: this log is open for reading only"
        return self._chains

    def tenant_bytes(self, tenant: str) -> int:
        """The bytes of a tenant's values in all its spaces. Takes the same time for any number of spaces: every write asks."""
        return self._tenant_bytes.get(tenant, 0)

    # ---- orders -----------------------------------------------------------------------------------

    def _number(self, space: Space) -> int:
        """The number of a space, assigned now if it has none. The caller must add a value soon."""
        number = self._numbers.get(space.digest)
        if number is None:
            if not self._free_numbers:
                self._free_numbers.append(len(self.spaces))
                self.spaces.append(None)
                self.space_bytes.append(0)
                self.value_bytes.append(0)
                self._rows.append({})
            number = self._numbers[space.digest] = self._free_numbers.pop()
            self.spaces[number] = space
            if self._chains is not None:
                self._chains.name(number, space.tenant)
        return number

    def _drop_if_empty(self, number: int) -> None:
        """Drops a space that holds nothing: clients may create any number of them."""
        space = self.spaces[number]
        if space is not None and not self._rows[number]:
            assert not self.space_bytes[number], f"space {number} holds nothing, counted {self.space_bytes[number]} bytes"
            del self._numbers[space.digest]
            self.spaces[number] = None
            self._rows[number] = {}  # a dictionary that was large stays so
            if self._chains is not None:
                self._chains.drop_space(number)
            self._free_numbers.append(number)

    def keep_order(self, tenants: Iterable[str]) -> None:
        """From now on maintains chains, and the order of eviction of these tenants. Visits all values, once."""
        self.settle_uses()
        self._chains = Chains(self.columns, tenants)
        for number, space in enumerate(self.spaces):
            if space is not None:
                self._chains.name(number, space.tenant)
        self._chains.build(dict(enumerate(self._rows)))

    def drop_segment(self, segment: int) -> None:
        """Drops a segment that is about to be overwritten: no value is in it any more."""
        left = self.live_bytes.pop(segment, 0)
        assert not left, f"segment {segment} still holds {left} bytes"
        self._in_segment.pop(segment, None)

    def apply(self, batch: Batch) -> Iterator[None]:
        """Applies a batch, in one step or, a clear, in many. The same when it is written and when it is read."""
        digest, as_of = batch.space.digest, batch.entries["as_of"]
        if batch.kind is BatchKind.PUT:
            self.put(batch, used=self.next_tick())
            self.note_use(digest, set(split(batch.entries["parent"])).difference(split(batch.entries["key"])))
        elif batch.kind is BatchKind.DELETE:
            self.erase(digest, batch.keys(), as_of.tolist())
        elif batch.kind is BatchKind.CLEAR:
            yield from self.clear(digest, max(as_of.tolist(), default=0))

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def use(self, digest: bytes, keys: Sequence[bytes], rows: Rows) -> None:
        """Marks the values of these keys, in these rows, and all their ancestors, as used in this tick."""
        self.columns.used[rows] = self.tick
        self.note_use(digest, set(split(self.columns.parent[rows])).difference(keys))

    def relevel(self, digest: bytes, keys: Sequence[bytes], level: Level) -> int:
        """Changes the level of values, which is a use of them; returns how many of them are present."""
        known = self.rows_of(digest)
        there = [key for key in keys if key in known]
        rows = np.fromiter(map(known.__getitem__, there), np.int64, len(there))
        self.next_tick()
        self.use(digest, there, rows)
        self.columns.level[rows] = level
        if self._chains is not None:
            self._chains.relevel(rows.tolist())
        return len(set(there))

    def note_use(self, digest: bytes, keys: Iterable[bytes]) -> None:
        """Marks values that may or may not be present, and all their ancestors, as used in this tick."""
        self._notes += [(self.tick, digest, key) for key in keys]
        if len(self._notes) > _MOST_NOTES:
            self.settle_uses()

    def settle_uses(self) -> None:
        """Walks the recorded uses: afterwards `used` is as if every use had been walked at once."""
        used, parent = self.columns.used, self.columns.parent
        for tick, digest, key in reversed(self._notes):  # the latest first: the walks of earlier ones end where it was
            known = self.rows_of(digest)
            while (row := known.get(key)) is not None and used[row] < tick:
                used[row] = tick
                key = parent[row].tobytes()
        self._notes.clear()

    def put(self, batch: Batch, *, used: int) -> None:
        """Adds the values of a batch. A value that is known already has moved here, and keeps its last use."""
        number, columns, entries = self._number(batch.space), self.columns, batch.entries
        known, keys = self._rows[number], batch.keys()
        spare = columns.take(len(keys) if known.keys().isdisjoint(keys) else sum(key not in known for key in keys))
        fresh = rows = np.array(spare, dtype=np.int64)
        columns.used[fresh] = used
        columns.space[fresh] = number
        if len(fresh) < len(keys):
            rows = np.array([known[key] if key in known else spare.pop() for key in keys], dtype=np.int64)
            self._count(rows[columns.segment[rows] != NO_SEGMENT], -1)
        columns.segment[rows] = batch.segment
        columns.offset[rows] = entries["offset"].astype(np.int64) + batch.offset
        columns.length[rows] = entries["length"]
        columns.seq[rows] = batch.seq
        columns.depth[rows] = np.minimum(entries["depth"], _MAX_DEPTH)
        if self._chains is None or len(fresh) == len(keys):  # a copied value keeps its level: it may have changed meanwhile
            columns.level[rows] = levels_of(entries)
        for name in ("key", "parent", "stamp"):
            getattr(columns, name)[rows] = entries[name]
        known.update(zip(keys, rows.tolist(), strict=True))
        self._in_segment.setdefault(batch.segment, array("q")).extend(rows.tolist())
        self.num_values += len(fresh)
        size = int(footprint(columns.length[rows]).sum())  # all in one segment and one space: no need to sort them apart
        self.live_bytes[batch.segment] = self.live_bytes.get(batch.segment, 0) + size
        self._add_to_space(number, size, int(columns.length[rows].sum()))
        if self._chains is not None and len(fresh):
            assert len(fresh) == len(keys), f"{len(fresh)} of {len(keys)} values of a batch are new"
            self._chains.enter(number, rows.tolist(), split(entries["parent"]), keys, known)

    def remove(self, rows: Rows) -> None:
        """Removes values."""
        if not len(rows):
            return
        self.settle_uses()  # while there still is a path from the used values to their ancestors
        if self._chains is not None:
            self._chains.leave(rows.tolist())
        numbers = self.columns.space[rows]
        for key, number in zip(split(self.columns.key[rows]), numbers.tolist(), strict=True):
            del self._rows[number][key]
        self._remove(rows)
        for number in np.unique(numbers).tolist():
            self._drop_if_empty(number)

    def _remove(self, rows: Rows) -> None:
        self._count(rows, -1)
        self.num_values -= len(rows)
        self.columns.give(rows)

    def erase(self, digest: bytes, keys: list[bytes], as_of: list[int]) -> int:
        """Removes the values of these keys that were written before; returns how many there were."""
        known = self.rows_of(digest)
        there = [(known[key], before) for key, before in zip(keys, as_of, strict=True) if key in known]
        rows, before = np.array(there, np.int64).reshape(-1, 2).T
        rows = np.unique(rows[self.columns.seq[rows] < before])
        self.remove(rows)
        return len(rows)

    def clear(self, digest: bytes, as_of: int) -> Iterator[None]:
        """Removes every value of a space that was written before, a slice at a time: the lock may be released in between.

        None of them can be found after the first slice. Until the last one, no value may be written and no segment reclaimed.
        """
        number = self._numbers.get(digest)
        if number is None:
            return
        known, self._rows[number] = self._rows[number], {}
        left = iter(known.values())
        while len(rows := np.fromiter(islice(left, _SLICE), np.int64)):
            later = self.columns.seq[rows] >= as_of
            if self._chains is not None:
                assert not later.any(), f"{np.count_nonzero(later)} values are younger than the clear that is written now"
                self._chains.wipe(number, rows)
            if later.any():
                self._rows[number].update(zip(split(self.columns.key[rows[later]]), rows[later].tolist(), strict=True))
            self._remove(rows[~later])
            yield
        while known:  # its keys are freed bit by bit, too
            deque(islice(iter(known.popitem, None), min(_SLICE, len(known))), maxlen=0)
            yield
        self._drop_if_empty(number)

    def load(self, spaces: list[Space], columns: dict[str, npt.NDArray[Any]], tick: int) -> bool:
        """Loads the rows of a snapshot; returns whether all keys differ. Only for an empty index."""
        self.columns.fill(columns)
        self.tick, self.num_values = tick, self.columns.capacity
        for space in spaces:
            self._number(space)
        order = np.argsort(self.columns.space, kind="stable")
        cuts = np.searchsorted(self.columns.space[order], np.arange(len(spaces) + 1))
        for number in range(len(spaces)):
            rows = order[cuts[number] : cuts[number + 1]]
            self._rows[number] = dict(zip(split(self.columns.key[rows]), rows.tolist(), strict=True))
        self._count(np.arange(self.num_values), +1)
        order = np.argsort(self.columns.segment, kind="stable")
        each, starts = np.unique(self.columns.segment[order], return_index=True)
        for segment, start, end in zip(each.tolist(), starts.tolist(), [*starts[1:].tolist(), len(order)], strict=False):
            self._in_segment[segment] = array("q", order[start:end].astype(np.int64).tobytes())
        for number in range(len(spaces)):
            self._drop_if_empty(number)
        return sum(map(len, self._rows)) == self.num_values

    def dump(self) -> tuple[list[Space], dict[str, npt.NDArray[Any]]]:
        """The spaces that are not empty and the rows of all values, as `load` takes them. Copies, so the index may change.

        Only for the one writer, after `settle_uses`. Needs no lock: values may be used, and their levels changed, meanwhile.
        """
        rows = self.columns.held()
        columns = {name: getattr(self.columns, name)[rows] for name in SHAPES}
        order = sorted(np.unique(columns["space"]).tolist(), key=lambda number: self.space(number).digest)
        renumber = np.zeros(len(self.spaces), np.int32)
        renumber[order] = np.arange(len(order))
        columns["space"] = renumber[columns["space"]] if len(rows) else columns["space"]
        return [self.space(number) for number in order], columns

    def _count(self, rows: Rows, sign: int) -> None:
        """Updates the sums per segment, per space and per tenant."""
        if not len(rows):
            return
        lengths = self.columns.length[rows]
        sizes = footprint(lengths)
        for segment, total, _ in _sums(self.columns.segment[rows], sizes, lengths):
            self.live_bytes[segment] = self.live_bytes.get(segment, 0) + sign * total
            self.lighter.add(segment)
        for number, total, given in _sums(self.columns.space[rows], sizes, lengths):
            self._add_to_space(number, sign * total, sign * given)

    def _add_to_space(self, number: int, size: int, given: int) -> None:
        self.total_bytes += size
        self.space_bytes[number] += size
        self.value_bytes[number] += given
        tenant = self.space(number).tenant
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self) -> None:
        """Asserts that the sums are right, and that no value was used later than its parent."""
        self.settle_uses()
        columns, rows = self.columns, self.columns.held()
        assert len(rows) == self.num_values == sum(map(len, self._rows)), f"{len(rows)=} {self.num_values=}"
        sizes = footprint(columns.length[rows])
        for segment, size in self.live_bytes.items():
            held = int(sizes[columns.segment[rows] == segment].sum())
            assert held == size, f"segment {segment} holds {held} bytes, counted {size}"
            assert self.rows_in(segment).tolist() == rows[columns.segment[rows] == segment].tolist(), f"rows of {segment=}"
        assert self.total_bytes == sum(self.space_bytes) == sum(self.live_bytes.values()), f"{self.total_bytes=}"
        by_tenant: Counter[str] = Counter()
        for number, size in enumerate(self.space_bytes):
            if size:
                by_tenant[self.space(number).tenant] += size
            held = int(sizes[columns.space[rows] == number].sum())
            assert held == size, f"space {number} holds {held} bytes, counted {size}"
            given = int(columns.length[rows][columns.space[rows] == number].sum())
            assert given == self.value_bytes[number], f"space {number} was given {given} bytes: {self.value_bytes[number]=}"
            assert (self.spaces[number] is None) == (not self._rows[number]), f"space {number}: {len(self._rows[number])} values"
            for key, row in self._rows[number].items():
                assert columns.key[row].tobytes() == key and columns.space[row] == number, f"row {row} is another value's"
                above = self._rows[number].get(columns.parent[row].tobytes())
                if above is not None and columns.parent[row].tobytes() != NO_PARENT:
                    assert columns.used[above] >= columns.used[row], f"row {row} was used later than its parent {above}"
        assert by_tenant == self._tenant_bytes, f"tenants hold {by_tenant}, counted {self._tenant_bytes}"
        if self._chains is not None:
            self._chains.audit({number: known for number, known in enumerate(self._rows) if known})


def _sums(owners: npt.NDArray[Any], *sizes: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Each owner once, with the sums of its sizes."""
    each, inverse = np.unique(owners, return_inverse=True)
    totals = [np.bincount(inverse, weights=one).astype(np.int64).tolist() for one in sizes]
    return list(zip(each.tolist(), *totals, strict=True))
