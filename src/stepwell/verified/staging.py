"""Memory of our own that values pass through: what a store reads into, and where values of several runs are put together.

    store  --read-->  | value | value | value |  --verified, then copied-->  the caller's runs

A store that hangs, or one that writes into a buffer after it said that a read failed (`Traits.late_write_s`), reaches this
memory only, never the caller's. Buffers begin at multiples of a memory page, which direct reads need. Bounded; any thread.
"""

from __future__ import annotations

import mmap
from collections import deque
from threading import Lock

from stepwell.base.errors import StoreError
from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes
from stepwell.store.api import Store, register, unregister

BUFFER_BYTES = 32 * 2**20
MOST_BYTES = 512 * 2**20  # with what hung or failed reads hold on to


class Loan:
    """A buffer in use. Given back exactly once; `unsettled` when the store may still write into it."""

    def __init__(self, staging: Staging, block: memoryview, size: int) -> None:
        self._staging, self._block = staging, block
        self.memory = block[:size]
        self.unsettled = False

    def give_back(self) -> None:
        self._staging._take_back(self._block, unsettled=self.unsettled)


class Staging:
    """Hands out buffers, keeps those of the usual size for the next one, and shows all of them to stores that want to know."""

    def __init__(self, store: Store, clock: Clock, *, most_bytes: int = MOST_BYTES) -> None:
        self._store, self._clock, self._most_bytes = store, clock, most_bytes
        self._free: list[memoryview] = []
        self._held: deque[tuple[float, memoryview]] = deque()  # until when, by time
        self._taken_bytes = 0
        self._lock = Lock()

    def borrow(self, size: int) -> Loan:
        """A buffer of so many bytes. Raises StoreError when calls that hang hold all there may be, OSError without memory."""
        if not size:
            return Loan(self, memoryview(bytearray()), 0)
        with self._lock:
            while self._held and self._held[0][0] <= self._clock.now():
                self._keep(self._held.popleft()[1])
            if size <= BUFFER_BYTES and self._free:
                return Loan(self, self._free.pop(), size)
            wanted = max(size, BUFFER_BYTES)
            while self._free and self._taken_bytes + wanted > self._most_bytes:
                self._drop(self._free.pop())
            if self._taken_bytes and self._taken_bytes + wanted > self._most_bytes:  # one value alone may be of any size
                raise StoreError(f"calls that have not ended hold {format_bytes(self._taken_bytes)}: the store is too slow")
            self._taken_bytes += wanted
        try:
            block = memoryview(mmap.mmap(-1, wanted))
            register(self._store, [block])
        except BaseException:
            with self._lock:
                self._taken_bytes -= wanted
            raise
        return Loan(self, block, size)

    def close(self) -> None:
        """Takes memory back from the store. What is in use stays with whoever uses it."""
        with self._lock:
            while self._free:
                self._drop(self._free.pop())

    def _take_back(self, block: memoryview, *, unsettled: bool) -> None:
        if not block:
            return
        late_s = self._store.traits.late_write_s if unsettled else 0.0
        with self._lock:
            if late_s:
                self._held.append((self._clock.now() + late_s, block))
            else:
                self._keep(block)

    def _keep(self, block: memoryview) -> None:
        if len(block) == BUFFER_BYTES:
            self._free.append(block)
        else:
            self._drop(block)

    def _drop(self, block: memoryview) -> None:
        self._taken_bytes -= len(block)
        unregister(self._store, [block])
