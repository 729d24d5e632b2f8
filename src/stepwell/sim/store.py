"""A store that keeps the names and sizes of values, and no bytes: bounded, the least recently used going first.

A use counts for all that a value stands on. So only values that nothing stands on may go, and one that becomes such was last
used when the last of those above it was. Keys are chained from their namespace, so those of two namespaces never meet. One
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from stepwell.base.errors import StoreError
from stepwell.store.api import Read, ReadResult, Space, Traits, Write, WriteOutcome, never

TURN_BYTES = 64 * 2**20  # nothing is read, so a call costs the replay more than its bytes do
LEAST_ENDS = 64  # entries of the heap before it is made anew


class _Value:
    __slots__ = ("below", "key", "num_above", "size_bytes", "used")

    def __init__(self, key: bytes, size_bytes: int, below: _Value | None, used: int) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.below = below  # what it stands on
        self.used = used  # when: uses are numbered
        self.num_above = 0  # values that stand on it


class CountingStore:
    """Names of at most `capacity_bytes` of values. It is asked through `CountingStoreExecutor`: there are no bytes to read."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._values: dict[bytes, _Value] = {}
        self._ends: list[tuple[int, bytes]] = []  # a heap of values that nothing stood on, by use; some of it is out of date
        self._latest: bytes | None = None  # the value kept last, which is not in the heap yet: another may come to stand on it
        self._num_uses = 0
        self._used_bytes = 0

    @property
    def traits(self) -> Traits:
        return Traits(name="counting", durable=False, shared=False, groups=False, turn_bytes=TURN_BYTES)

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

    def keep(self, key: bytes, size_bytes: int, parent: bytes | None) -> WriteOutcome:
        """Enters a value, giving up others for it but none that it stands on; without those it would be of no use."""
        if key in self._values:
            return WriteOutcome.EXISTS
        below = self._values.get(parent) if parent is not None else None
        if parent is not None and below is None:
            return WriteOutcome.NO_ROOM
        if size_bytes > self._capacity_bytes:
            return WriteOutcome.TOO_LARGE
        latest, self._latest = self._latest, None
        if latest is not None and latest != parent:
            self._queue(latest)
        if below is not None:
            below.num_above += 1
        while self._used_bytes + size_bytes > self._capacity_bytes:
            if not self._give_up_oldest():
                if below is not None:  # everything else is gone: only what it stands on is left
                    below.num_above -= 1
                    self._queue(below.key)
                return WriteOutcome.NO_ROOM
        self._num_uses += 1
        self._values[key] = _Value(key, size_bytes, below, self._num_uses)
        self._used_bytes += size_bytes
        self._latest = key
        return WriteOutcome.STORED

    def use(self, key: bytes) -> None:
        """A value was read, and with it all that it stands on."""
        value = self._values.get(key)
        if value is not None:
            self._num_uses += 1
            value.used = self._num_uses
            self._queue(key)

    def _queue(self, key: bytes) -> None:
        """Lets a value go in its turn, if nothing stands on it."""
        value = self._values.get(key)
        if value is not None and not value.num_above and key != self._latest:
            heappush(self._ends, (value.used, key))
        if len(self._ends) > 2 * len(self._values) + LEAST_ENDS:
            self._ends = sorted({(each.used, each.key) for each in self._values.values() if not each.num_above})

    def _give_up_oldest(self) -> bool:
        while self._ends:
            used, key = heappop(self._ends)
            value = self._values.get(key)
            if value is not None and value.used == used and not value.num_above:
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

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
