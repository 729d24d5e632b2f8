"""Estimates what a full store evicts next without asking it: what was written longest ago.

This is an estimate: others may use the store, values that were read since are evicted later, and values that memory has again
earlier. It only decides whether something is worth writing. While nothing is, nothing more is written, and the estimate stays the
same until its value has faded. A store that was not filled from here is assumed to have free space; so is one that several ranks
fill, until each has written as much as the store holds, since only the bytes of one rank are counted.
"""

from __future__ import annotations

from collections import deque

from stepwell.policy.value import ValueClass

MOST_ENTRIES = 4096  # about this number of entries: smaller writes are merged, and keep the value class of the first


class StoreVictimEstimate:
    """The value classes of the latest writes, up to the store's capacity."""

    def __init__(self, capacity_bytes: int | None) -> None:
        """`capacity_bytes` is the most that the store keeps, None if unknown. A store that keeps nothing evicts nothing."""
        self._capacity_bytes = capacity_bytes or None
        self._written: deque[tuple[int, ValueClass]] = deque()
        self._num_bytes = 0

    def note(self, value_class: ValueClass, size_bytes: int) -> None:
        """Notes that something of this value class was written."""
        if self._capacity_bytes is None or not size_bytes:
            return
        self._num_bytes += size_bytes
        if self._written and self._written[-1][0] + size_bytes <= self._capacity_bytes // MOST_ENTRIES:
            before, value_class = self._written.pop()
            size_bytes += before
        self._written.append((size_bytes, value_class))
        while self._num_bytes - self._written[0][0] >= self._capacity_bytes:
            self._num_bytes -= self._written.popleft()[0]

    @property
    def current(self) -> ValueClass | None:
        """The value class of what the store would evict for a write now; None while it has free space."""
        if self._capacity_bytes is None or self._num_bytes < self._capacity_bytes:
            return None
        return self._written[0][1]
