"""A store that keeps the names and sizes of values, and no bytes: bounded, the least recently used going first.

A use counts for all that a value stands on, so what is deep in a chain goes before what it stands on. Keys are chained from
their namespace, so those of two namespaces never meet. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from stepwell.base.errors import StoreError
from stepwell.store.api import Read, ReadResult, Space, Traits, Write, WriteOutcome, never


class CountingStore:
    """Names of at most `capacity_bytes` of values. It is asked through `CountingPorter`: there are no bytes to read."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._values: OrderedDict[bytes, tuple[int, bytes | None]] = OrderedDict()  # size and parent, oldest first
        self._used = dict[bytes, None]()  # values whose use has not been entered into that order yet, last used last
        self._used_bytes = 0
        self._kept: bytes | None = None  # the value entered last, if what it stands on is guarded
        self._guarded: bytes | None = None  # the first to go of what that stands on: nothing from it on may

    @property
    def traits(self) -> Traits:
        return Traits(name="counting", durable=False, shared=False, groups=False)

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
        if parent is not None and parent not in self._values:
            return WriteOutcome.NO_ROOM
        if size_bytes > self._capacity_bytes:
            return WriteOutcome.TOO_LARGE
        full = self._used_bytes + size_bytes > self._capacity_bytes
        if full:
            self._guard(parent)
            while self._used_bytes + size_bytes > self._capacity_bytes:
                oldest = next(iter(self._values))
                if oldest == self._guarded:
                    return WriteOutcome.NO_ROOM  # everything else is gone: only what it stands on is left
                self._used_bytes -= self._values.pop(oldest)[0]
        self._values[key] = (size_bytes, parent)
        self._used_bytes += size_bytes
        self._kept = key if full or (parent is not None and parent == self._kept) else None
        return WriteOutcome.STORED

    def use(self, key: bytes) -> None:
        """A value was read, and with it all that it stands on."""
        self._used.pop(key, None)
        self._used[key] = None

    def _guard(self, parent: bytes | None) -> None:
        """Makes all that a new value stands on the last to go; once for values that come one below the other."""
        if parent is not None and parent == self._kept and not self._used:
            return
        if parent is not None:
            self.use(parent)
        self._enter_uses()
        self._guarded = parent

    def _enter_uses(self) -> None:
        """Brings the order up to date: put off until something must go, since a chain is long and most uses are of one path."""
        for used in self._used:
            key: bytes | None = used
            while key is not None and key in self._values:
                self._values.move_to_end(key)
                key = self._values[key][1]
        self._used.clear()

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
            self._used_bytes -= self._values.pop(key)[0]
        self._kept = None
        return len(present)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
