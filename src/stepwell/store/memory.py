"""The reference store: a bounded dictionary in this process. It evicts the lowest level first, and within a level the oldest.

Also an example for authors of other stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nlargest
from threading import Lock

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.store.api import (
    NO_PARENT,
    Read,
    ReadOutcome,
    ReadResult,
    Space,
    SpaceSize,
    StoreSize,
    Traits,
    Write,
    WriteOutcome,
    never,
)

LEAST_ENDS = 64  # entries of the heap before it is rebuilt

_Name = tuple[bytes, bytes]  # digest of the space, key


@dataclass(slots=True)
class _Value:
    data: bytes
    stamp: bytes
    parent: bytes
    level: Level = Level.NORMAL
    used: int = 0  # number of its last use


class MemoryStore:
    """Keeps values in a dictionary; never holds more than `budget_bytes`."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._values: dict[_Name, _Value] = {}
        self._num_above: dict[_Name, int] = {}  # how many values depend on one, whether or not it is stored
        self._ends: list[tuple[Level, int, _Name]] = []  # a heap of values without dependents; some entries are stale
        self._num_uses = 0
        self._used_bytes = 0
        self._sizes: dict[bytes, SpaceSize] = {}  # of spaces that hold values
        self._lock = Lock()
        self._closed = False

    @property
    def traits(self) -> Traits:
        return Traits(
            name="memory", durable=False, shared=False, groups=False, clears=True, sized=True, lists_spaces=True, levels=True,
            max_value_bytes=self._budget_bytes,
        )  # fmt: skip

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def size(self) -> StoreSize:
        with self._lock:
            self._must_be_open()
            return StoreSize(used_bytes=self._used_bytes, budget_bytes=self._budget_bytes)

    def largest_spaces(self, most: int) -> list[SpaceSize]:
        with self._lock:
            self._must_be_open()
            return nlargest(most, self._sizes.values(), key=lambda each: each.used_bytes)

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._must_be_open()
            return [(space.digest, key) in self._values for key in keys]

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        with self._lock:
            self._must_be_open()
            results = [self._read(space, r) if not cancelled() else ReadResult(outcome=ReadOutcome.CANCELLED) for r in reads]
            self._touch(space, [read.key for read in reads])
            return results

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        with self._lock:
            self._must_be_open()
            self._touch(space, [write.parent for write in writes])  # so that they are not evicted for their dependents
            outcomes = [self._write(space, write) for write in writes]
            self._touch(space, [write.key for write in writes])
            return outcomes

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._must_be_open()
            return sum(self._drop((space.digest, key)) for key in keys)

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        with self._lock:
            self._must_be_open()
            there = [value for key in set(keys) if (value := self._values.get((space.digest, key))) is not None]
            for value in there:
                value.level = level
            self._touch(space, keys)
            return len(there)

    def clear(self, digest: bytes) -> int:
        with self._lock:
            self._must_be_open()
            return sum([self._drop(name) for name in list(self._values) if name[0] == digest])

    def flush(self) -> None:
        with self._lock:
            self._must_be_open()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._num_above.clear()
            self._ends.clear()
            self._sizes.clear()
            self._used_bytes = 0

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreError("this memory store is closed")

    def _read(self, space: Space, read: Read) -> ReadResult:
        value = self._values.get((space.digest, read.key))
        if value is None:
            return ReadResult(outcome=ReadOutcome.MISSING)
        if len(value.data) != len(read.into):
            return ReadResult(outcome=ReadOutcome.LENGTH)
        read.into[:] = value.data
        return ReadResult(outcome=ReadOutcome.FOUND, stamp=value.stamp)

    def _write(self, space: Space, write: Write) -> WriteOutcome:
        name = (space.digest, write.key)
        if name in self._values:
            return WriteOutcome.EXISTS
        if not self._make_space(len(write.data)):
            return WriteOutcome.TOO_LARGE
        below = (space.digest, write.parent)
        self._num_above[below] = self._num_above.get(below, 0) + 1
        self._num_uses += 1
        value = self._values[name] = _Value(bytes(write.data), write.stamp, write.parent, write.level, self._num_uses)
        self._queue(name, value)
        self._count(space, values=1, size_bytes=len(write.data))
        return WriteOutcome.STORED

    def _make_space(self, size: int) -> bool:
        if self._budget_bytes is None:
            return True
        if size > self._budget_bytes:
            return False
        while self._used_bytes + size > self._budget_bytes:
            self._drop(self._first_to_go())
        return True

    def _first_to_go(self) -> _Name:
        """The oldest value of the lowest level. A level also counts for a value's ancestors, so this value has no dependents."""
        while self._ends:
            level, used, name = heappop(self._ends)
            value = self._values.get(name)
            if value is not None and (value.level, value.used) == (level, used) and not self._num_above.get(name):
                return name
        return next(iter(self._values))  # they depend on each other

    def _queue(self, name: _Name, value: _Value) -> None:
        """Queues a value for eviction, if no other value depends on it."""
        if not self._num_above.get(name):
            heappush(self._ends, (value.level, value.used, name))
        if len(self._ends) > 2 * len(self._values) + LEAST_ENDS:
            ends = [each for each in self._values if not self._num_above.get(each)]
            self._ends = sorted((self._values[each].level, self._values[each].used, each) for each in ends)

    def _touch(self, space: Space, keys: Sequence[bytes]) -> None:
        """Marks values and all their ancestors as most recently used, deepest first: a parent stays younger than its children."""
        seen = set()
        for key in reversed(keys):
            name = (space.digest, key)
            while name[1] != NO_PARENT and name not in seen and (value := self._values.pop(name, None)) is not None:
                self._values[name] = value
                self._num_uses += 1
                value.used = self._num_uses
                self._queue(name, value)
                seen.add(name)
                name = (space.digest, value.parent)

    def _drop(self, name: _Name) -> bool:
        value = self._values.pop(name, None)
        if value is not None:
            below = (name[0], value.parent)
            self._num_above[below] -= 1
            if not self._num_above[below]:
                del self._num_above[below]
                if below in self._values:
                    self._queue(below, self._values[below])
            self._count(self._sizes[name[0]].space, values=-1, size_bytes=-len(value.data))
        return value is not None

    def _count(self, space: Space, *, values: int, size_bytes: int) -> None:
        self._used_bytes += size_bytes
        before = self._sizes.get(space.digest) or SpaceSize(space=space, values=0, used_bytes=0)
        if before.values + values:
            self._sizes[space.digest] = replace(before, values=before.values + values, used_bytes=before.used_bytes + size_bytes)
        else:
            del self._sizes[space.digest]
