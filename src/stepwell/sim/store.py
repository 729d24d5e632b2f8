"""A bounded store of names and sizes, without bytes. It evicts the lowest level first, and within a level by last use.

A use and a level count for all ancestors of a value too. So only values without children are evicted, and a value that loses its
last child was last used when that child was. A parent may be written after its child, as in the log. Keys are chained from their
namespace, so those of two namespaces never meet. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.store.api import Read, ReadResult, Space, StoreSize, Traits, Write, WriteOutcome, never

TURN_BYTES = 64 * 2**20  # nothing is read, so a call costs the replay more than its bytes do
LEAST_ENDS = 64  # entries of the heap before it is rebuilt


class _Value:
    __slots__ = ("below", "key", "level", "num_above", "size_bytes", "used")

    def __init__(self, key: bytes, size_bytes: int, below: _Value | None, used: int, level: Level) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.below = below  # its parent
        self.used = used  # the number of its last use
        self.level = level
        self.num_above = 0  # children


class CountingStore:
    """Names of at most `capacity_bytes` of values. Used through `CountingStoreExecutor`: there are no bytes to read."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._values: dict[bytes, _Value] = {}
        self._ends: list[tuple[Level, int, bytes]] = []  # a heap of values without children; some entries are stale
        self._latest: bytes | None = None  # the value written last, not in the heap yet: it may get a child next
        self._orphans: dict[bytes, dict[bytes, None]] = {}  # keys by their parent, where that is missing
        self._refused: bytes | None = None  # the value refused last
        self._num_uses = 0
        self._used_bytes = 0

    @property
    def traits(self) -> Traits:
        return Traits(name="counting", durable=True, shared=False, groups=False, sized=True, levels=True, turn_bytes=TURN_BYTES)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        values = self._values
        return [key in values for key in keys]

    def size(self) -> StoreSize:
        return StoreSize(used_bytes=self._used_bytes, budget_bytes=self._capacity_bytes)

    def keep(self, key: bytes, size_bytes: int, parent: bytes | None, level: Level = Level.NORMAL) -> WriteOutcome:
        """Adds a value and evicts others, but none of its ancestors. A value whose parent was just refused is refused too."""
        if key in self._values:
            self._relevel(key, level)
            return WriteOutcome.EXISTS
        below = self._values.get(parent) if parent is not None else None
        if size_bytes > self._capacity_bytes:
            return WriteOutcome.TOO_LARGE
        if parent is not None and parent == self._refused:
            self._refused = key
            return WriteOutcome.NO_ROOM
        latest, self._latest = self._latest, None
        if latest is not None and latest != parent:
            self._queue(latest)
        if below is not None:
            below.num_above += 1
        while self._used_bytes + size_bytes > self._capacity_bytes:
            if not self._evict_oldest():
                if below is not None:  # only its ancestors are left
                    below.num_above -= 1
                    self._queue(below.key)
                self._refused = key
                return WriteOutcome.NO_ROOM
        self._num_uses += 1
        value = self._values[key] = _Value(key, size_bytes, below, self._num_uses, level)
        self._used_bytes += size_bytes
        self._latest = key
        if parent is not None and below is None:
            self._orphans.setdefault(parent, {})[key] = None
        for each in self._orphans.pop(key, ()):
            if (above := self._values.get(each)) is not None:
                above.below = value
                value.num_above += 1
        return WriteOutcome.STORED

    def use(self, key: bytes) -> None:
        """Marks a value and its ancestors as used."""
        value = self._values.get(key)
        if value is not None:
            self._num_uses += 1
            value.used = self._num_uses
            self._queue(key)

    def _relevel(self, key: bytes, level: Level) -> None:
        value = self._values[key]
        if value.level != level:
            value.level = level
            self._queue(key)

    def _queue(self, key: bytes) -> None:
        """Makes a value evictable if it has no children."""
        value = self._values.get(key)
        if value is not None and not value.num_above and key != self._latest:
            heappush(self._ends, (value.level, value.used, key))
        if len(self._ends) > 2 * len(self._values) + LEAST_ENDS:
            self._ends = sorted({(each.level, each.used, each.key) for each in self._values.values() if not each.num_above})

    def _evict_oldest(self) -> bool:
        while self._ends:
            level, used, key = heappop(self._ends)
            value = self._values.get(key)
            if value is not None and (value.level, value.used) == (level, used) and not value.num_above:
                self._remove(key)
                return True
        return False

    def _remove(self, key: bytes) -> None:
        value = self._values.pop(key)
        self._used_bytes -= value.size_bytes
        below = value.below
        if below is not None:
            below.num_above -= 1
            below.used = max(below.used, value.used)
            self._queue(below.key)

    # ---- the seam ---------------------------------------------------------------------------------

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        return self.has(keys)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        raise StoreError("a counting store holds no bytes to read")

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        raise StoreError("a counting store takes no bytes")

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        present = [key for key in keys if key in self._values]
        for key in present:
            self._remove(key)
        return len(present)

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        present = [key for key in keys if key in self._values]
        self._num_uses += 1
        for key in present:
            self._values[key].used = self._num_uses
            self._values[key].level = level
            self._queue(key)
        return len(present)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
