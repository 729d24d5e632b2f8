"""Staging buffers: a store reads into them, and values of several runs are gathered in them.

    store  --read-->  | value | value | value |  --verified, then copied-->  the caller's runs

A store that hangs, or that writes into a buffer after it reported a failed read (`Traits.late_write_s`), can touch only this
memory, never the caller's. Buffers begin at multiples of a memory page, which direct reads need. Bounded; any thread.
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
MOST_BYTES = 512 * 2**20  # including buffers of hung or failed reads


class Loan:
    """A buffer in use. Released exactly once; `unsettled` if the store may still write into it."""

    def __init__(self, staging: Staging, block: memoryview, size: int) -> None:
        self._staging, self._block = staging, block
        self.memory = block[:size]
        self.unsettled = False

    def release(self) -> None:
        self._staging._release(self._block, unsettled=self.unsettled)


class Staging:
    """Provides buffers, keeps those of the usual size for reuse, and registers all of them with stores that need it."""

    def __init__(self, store: Store, clock: Clock, *, most_bytes: int = MOST_BYTES) -> None:
        self._store, self._clock, self._most_bytes = store, clock, most_bytes
        self._free: list[memoryview] = []
        self._held: deque[tuple[float, memoryview]] = deque()  # held until when, by time
        self._taken_bytes = 0
        self._lock = Lock()

    def borrow(self, size: int) -> Loan:
        """A buffer of this size. Raises StoreError if hung calls hold all of the limit, OSError without memory."""
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
        """Unregisters the memory from the store. Buffers in use stay valid."""
        with self._lock:
            while self._free:
                self._drop(self._free.pop())

    def _release(self, block: memoryview, *, unsettled: bool) -> None:
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
