"""Which value depends on which, the effective level of each, and the order in which values of a tenant with a quota are evicted.

A value's level counts for its parent as well, so the effective level is the highest of the value and of all its descendants.
It is kept up to date with every change, step by step towards the root for as long as something changes. Nothing here visits
all values, except `build`, once after opening.

    parent[row] <- row        first[row] -> child <-> child <-> child      (next, before)

The order of eviction is (effective level, last use, deepest first): no value comes before one that depends on it. A value is
linked to its parent only if it is deeper, so chains are never circular, whatever was written. No files, no locks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Level
from stepwell.store.api import NO_PARENT
from stepwell.store.log.format.batch import split
from stepwell.store.log.state.columns import Columns, Rows

DEPTH_BITS = 20  # deeper values count as equally deep
LEVEL_SHIFT = 61  # the two bits below the sign
_MOST_USED = (1 << (LEVEL_SHIFT - DEPTH_BITS)) - 1  # the bits left for the last use: no log reaches the end
_NONE = -1  # in place of a row
_NUM_LEVELS = len(Level)
_LEAST_ENTRIES = 64  # of a queue before it is rebuilt


class Queue:
    """The values of one tenant that have no children, in the order of eviction. A use of a value costs nothing: an entry whose
    value was used since then moves back when it reaches the front. A stale entry is dropped there."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, int]] = []  # rank at that time, number of the entry, row
        self.num_live = 0


class Chains:
    """Links between the values of an index."""

    def __init__(self, columns: Columns, tenants: Iterable[str]) -> None:
        self.tenants = {tenant: Queue() for tenant in tenants}
        self.lowered: set[int] = set()  # segments with values whose level fell, for the code that orders segments
        self._columns = columns
        self._queue_of: dict[int, Queue] = {}  # by number of the space
        self._absent: dict[int, dict[bytes, set[int]]] = {}  # space -> key of a missing parent -> its children
        self._parent, self._first, self._next, self._before = (array("i") for _ in range(4))
        self._above = array("i")  # children by level, `_NUM_LEVELS` for each row
        self._entry = array("q")  # number of the entry in a queue; 0 for none
        self._num_entries = 0
        self.top = bytearray()  # the effective level
        self._grow()

    # ---- questions --------------------------------------------------------------------------------

    def ranks(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The positions of values in the order of eviction: the lowest is evicted first."""
        columns = self._columns
        used = np.minimum(columns.used[rows], _MOST_USED)
        levels = np.frombuffer(self.top, np.uint8)[rows].astype(np.int64)
        ranks: npt.NDArray[np.int64] = (levels << LEVEL_SHIFT) + (used << DEPTH_BITS) - columns.depth[rows].astype(np.int64)
        return ranks

    def with_descendants(self, rows: Rows) -> Rows:
        """Values and all their descendants, in the order of eviction."""
        found, left = set(rows.tolist()), rows.tolist()
        while left:
            child = self._first[left.pop()]
            while child != _NONE:
                if child not in found:
                    found.add(child)
                    left.append(child)
                child = self._next[child]
        every: Rows = np.fromiter(found, np.int64, len(found))
        return every[np.argsort(self.ranks(every), kind="stable")]

    # ---- orders -----------------------------------------------------------------------------------

    def name(self, number: int, tenant: str) -> None:
        """Assigns a number to a space, and its values to a tenant."""
        if tenant in self.tenants:
            self._queue_of[number] = self.tenants[tenant]

    def drop_space(self, number: int) -> None:
        """Drops a space that is empty, or soon will be: see `wipe`."""
        self._queue_of.pop(number, None)
        self._absent.pop(number, None)

    def enter(
        self, number: int, rows: Sequence[int], parents: Sequence[bytes], keys: Sequence[bytes], known: Mapping[bytes, int]
    ) -> None:
        """Links new values of one space; their rows are filled in."""
        self._grow()
        for row in rows:
            self.top[row] = self._columns.level[row]
        absent = self._absent.setdefault(number, {})
        for row, key, parent in zip(rows, keys, parents, strict=True):
            for child in absent.pop(key, ()):
                self._attach(child, row)
            if parent == NO_PARENT:
                pass
            elif (there := known.get(parent)) is not None:
                self._attach(row, there)
            else:
                absent.setdefault(parent, set()).add(row)
            self._push(row)

    def leave(self, rows: Iterable[int]) -> None:
        """Removes values from their chains, before they are removed from the index."""
        columns = self._columns
        for row in rows:
            absent = self._absent.setdefault(int(columns.space[row]), {})
            if (child := self._first[row]) != _NONE:
                waiting = absent.setdefault(columns.key[row].tobytes(), set())
                while child != _NONE:
                    waiting.add(child)
                    following = self._next[child]
                    self._parent[child] = self._next[child] = self._before[child] = _NONE
                    child = following
            if self._parent[row] != _NONE:
                self._detach(row)
            elif children := absent.get(parent := columns.parent[row].tobytes()):
                children.discard(row)
                if not children:
                    del absent[parent]
            self._unqueue(row)
            self._reset(row)

    def wipe(self, number: int, rows: Rows) -> None:
        """Removes the values of a space that is cleared completely: no value of their chains stays."""
        entries = np.frombuffer(self._entry, np.int64)
        if (queue := self._queue_of.get(number)) is not None:
            queue.num_live -= int(np.count_nonzero(entries[rows]))
        entries[rows] = 0
        for links in (self._parent, self._first, self._next, self._before):
            np.frombuffer(links, np.int32)[rows] = _NONE
        np.frombuffer(self._above, np.int32).reshape(-1, _NUM_LEVELS)[rows] = 0

    def relevel(self, rows: Iterable[int]) -> None:
        """Updates the chains after the levels of these values were changed."""
        for row in rows:
            self._settle_level(row)

    def take_first(self, tenant: str) -> int | None:
        """Removes a tenant's first value from its chain and returns it; None if there is none. The caller removes the value."""
        queue = self.tenants[tenant]
        while queue.heap:
            rank, number, row = queue.heap[0]
            if self._entry[row] != number:
                heappop(queue.heap)
            elif (now := self._rank(row)) > rank:
                heapreplace(queue.heap, (now, number, row))
            else:
                heappop(queue.heap)
                self.leave([row])
                return row
        return None

    # ---- links ------------------------------------------------------------------------------------

    def _attach(self, child: int, parent: int) -> None:
        if self._columns.depth[child] <= self._columns.depth[parent]:
            return
        first = self._first[parent]
        self._parent[child], self._next[child], self._before[child] = parent, first, _NONE
        if first != _NONE:
            self._before[first] = child
        self._first[parent] = child
        self._above[_NUM_LEVELS * parent + self.top[child]] += 1
        self._unqueue(parent)
        self._settle_level(parent)

    def _detach(self, child: int) -> None:
        parent, following, before = self._parent[child], self._next[child], self._before[child]
        if before != _NONE:
            self._next[before] = following
        else:
            self._first[parent] = following
        if following != _NONE:
            self._before[following] = before
        self._parent[child] = self._next[child] = self._before[child] = _NONE
        self._above[_NUM_LEVELS * parent + self.top[child]] -= 1
        self._settle_level(parent)
        self._push(parent)

    def _settle_level(self, row: int) -> None:
        """Updates the effective level of a value, and of its ancestors as far as theirs change."""
        while row != _NONE:
            level = _NUM_LEVELS - 1
            own, before = int(self._columns.level[row]), self.top[row]
            while level > own and not self._above[_NUM_LEVELS * row + level]:
                level -= 1
            if level == before:
                return
            self.top[row] = level
            if level < before:
                self.lowered.add(int(self._columns.segment[row]))
                self._push(row, again=True)
            if (parent := self._parent[row]) != _NONE:
                self._above[_NUM_LEVELS * parent + before] -= 1
                self._above[_NUM_LEVELS * parent + level] += 1
            row = parent

    def _reset(self, row: int) -> None:
        self._first[row] = _NONE
        for level in range(_NUM_LEVELS):
            self._above[_NUM_LEVELS * row + level] = 0

    def _grow(self) -> None:
        more = self._columns.capacity - len(self.top)
        if more > 0:
            self.top += bytes(more)
            for links in (self._parent, self._first, self._next, self._before):
                links.frombytes(np.full(more, _NONE, np.int32).tobytes())
            self._above.frombytes(bytes(4 * _NUM_LEVELS * more))
            self._entry.frombytes(bytes(8 * more))

    # ---- queues -----------------------------------------------------------------------------------

    def _rank(self, row: int) -> int:
        columns = self._columns
        used = min(int(columns.used[row]), _MOST_USED)
        return (self.top[row] << LEVEL_SHIFT) + (used << DEPTH_BITS) - int(columns.depth[row])

    def _push(self, row: int, *, again: bool = False) -> None:
        """Queues a value without children, if its tenant has a queue. `again` invalidates an earlier entry."""
        if not self._queue_of or self._first[row] != _NONE or (self._entry[row] and not again):
            return
        queue = self._queue_of.get(int(self._columns.space[row]))
        if queue is None:
            return
        self._num_entries += 1
        queue.num_live += not self._entry[row]
        self._entry[row] = self._num_entries
        heappush(queue.heap, (self._rank(row), self._num_entries, row))
        if len(queue.heap) > 2 * queue.num_live + _LEAST_ENTRIES:
            queue.heap = [entry for entry in queue.heap if self._entry[entry[2]] == entry[1]]
            heapify(queue.heap)

    def _unqueue(self, row: int) -> None:
        if self._entry[row]:
            self._queue_of[int(self._columns.space[row])].num_live -= 1
            self._entry[row] = 0

    # ---- after opening ----------------------------------------------------------------------------

    def build(self, spaces: Mapping[int, Mapping[bytes, int]]) -> None:
        """Links everything that an index holds. The only visit to all values."""
        columns, rows = self._columns, self._columns.held()
        parents = self._find_parents(rows, spaces)
        linked = parents != _NONE
        linked[linked] = columns.depth[rows[linked]] > columns.depth[parents[linked]]
        child, parent = rows[linked], parents[linked]
        order = np.argsort(parent, kind="stable")
        child, parent = child[order], parent[order]
        np.frombuffer(self._parent, np.int32)[child] = parent
        same = parent[1:] == parent[:-1]
        np.frombuffer(self._next, np.int32)[child[:-1][same]] = child[1:][same]
        np.frombuffer(self._before, np.int32)[child[1:][same]] = child[:-1][same]
        starts = np.flatnonzero(np.concatenate(([True], ~same))) if len(child) else np.zeros(0, np.int64)
        np.frombuffer(self._first, np.int32)[parent[starts]] = child[starts]
        top = np.frombuffer(self.top, np.uint8)
        top[rows] = columns.level[rows]
        if len(child) and columns.level[rows].min() < columns.level[rows].max():
            for level in range(1, _NUM_LEVELS):
                self._raise_above(child[columns.level[child] == level], level)
        counted = np.bincount(_NUM_LEVELS * parent + top[child], minlength=len(self._above))
        np.frombuffer(self._above, np.int32)[:] = counted
        for row in rows[np.frombuffer(self._first, np.int32)[rows] == _NONE].tolist() if self._queue_of else ():
            self._push(row)

    def _raise_above(self, rows: Rows, level: int) -> None:
        """Before children are counted: raises the parents of these values to at least this level."""
        parents, top = np.frombuffer(self._parent, np.int32), np.frombuffer(self.top, np.uint8)
        seen_at = np.zeros(len(top), np.int64)
        while len(rows):
            rows = parents[rows].astype(np.int64)
            rows = rows[(rows != _NONE) & (top[rows] < level)]
            top[rows] = level
            places = np.arange(len(rows))
            seen_at[rows] = places  # if several share a parent, the last
            rows = rows[seen_at[rows] == places]

    def _find_parents(self, rows: Rows, spaces: Mapping[int, Mapping[bytes, int]]) -> npt.NDArray[np.int64]:
        """The row of each value's parent, -1 for none; records the values whose parent is missing."""
        columns, found = self._columns, np.full(len(rows), _NONE, np.int64)
        if not len(rows):
            return found
        before = rows[:-1]  # most values were written right behind their parents
        follows = (columns.key[before] == columns.parent[rows[1:]]).all(axis=1) & (
            columns.space[before] == columns.space[rows[1:]]
        )
        found[1:][follows] = before[follows]
        rest = np.flatnonzero((found == _NONE) & columns.parent[rows].any(axis=1))
        numbers, keys = columns.space[rows[rest]].tolist(), split(columns.parent[rows[rest]])
        for place, number, parent in zip(rest.tolist(), numbers, keys, strict=True):
            if (row := spaces[number].get(parent)) is not None:
                found[place] = row
            else:
                self._absent.setdefault(number, {}).setdefault(parent, set()).add(int(rows[place]))
        return found

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self, spaces: Mapping[int, Mapping[bytes, int]]) -> None:
        """Asserts that links, levels and queues agree with a visit to all values."""
        columns, children = self._columns, dict[int, set[int]]()
        queued = {row for queue in self.tenants.values() for _, number, row in queue.heap if self._entry[row] == number}
        assert sum(queue.num_live for queue in self.tenants.values()) == len(queued), f"{len(queued)=} values are queued"
        every = [row for known in spaces.values() for row in known.values()]
        for number, known in spaces.items():
            for row in known.values():
                key = columns.parent[row].tobytes()
                parent = known.get(key, _NONE) if key != NO_PARENT else _NONE
                deeper = parent != _NONE and columns.depth[row] > columns.depth[parent]
                assert self._parent[row] == (parent if deeper else _NONE), f"row {row} depends on {parent}: {self._parent[row]}"
                if deeper:
                    children.setdefault(parent, set()).add(row)
                assert (row in queued) == (number in self._queue_of and self._first[row] == _NONE), f"row {row} is not queued"
            for key, waiting in self._absent.get(number, {}).items():
                assert key not in known and waiting, f"values wait for {key.hex()}, which is there"
                for row in waiting:
                    name, parent = columns.key[row].tobytes(), columns.parent[row].tobytes()
                    assert known.get(name) == row and parent == key, f"row {row} waits for {key.hex()}, depends on {parent.hex()}"
        for row in every:
            listed, child = deque[int](), self._first[row]
            while child != _NONE:
                listed.append(child)
                child = self._next[child]
            assert set(listed) == children.get(row, set()), f"row {row} has the children {children.get(row)}, listed {listed}"
            levels = [self.top[child] for child in listed]
            assert self.top[row] == max([*levels, int(columns.level[row])]), f"row {row}: {self.top[row]=} above {levels}"
            counted = [self._above[_NUM_LEVELS * row + level] for level in range(_NUM_LEVELS)]
            assert counted == [levels.count(level) for level in range(_NUM_LEVELS)], f"row {row}: {counted=} {levels=}"
