"""Registered memory: the caller's, from which values move without a copy, and lanes of our own for everything else.

A value in Mooncake is its stamp followed by its bytes. One batch passes through a lane at a time:

    lane     | stamp bytes... | stamp | stamp | stamp bytes.. |        free for the next |
                 copied          \\       \\
    caller's registered memory     bytes    bytes                      not copied: the second slice of its value

Small values are copied even if their memory is registered: up to COPY_BYTES a second slice costs more than the copy.
Does not know names or outcomes.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from stepwell.base.errors import StoreError
from stepwell.base.units import format_bytes
from stepwell.store.api import STAMP_BYTES
from stepwell.store.mooncake.client import Client

COPY_BYTES = 1024 * 1024  # measured over TCP: 32 KiB 0.60 GB/s with a copy and 0.37 without, 512 KiB 0.78 and 0.75; with less CPU
# Two slices each and three lanes: 960 in flight. A get of 3,000 over TCP hung for 60 s, and all later transfers failed.
VALUES_PER_BATCH = 160


def address_of(memory: memoryview) -> int:
    """The address of non-empty memory, writable or not."""
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


class Regions:
    """Memory that Mooncake may access. Keeps it alive until it is removed.

    One thread at a time changes it while others read it: the mapping that they read is replaced and never changed.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._memories: dict[int, memoryview] = {}
        self._starts: Sequence[int] = ()

    def add(self, memory: memoryview) -> int:
        """Registers memory and returns its address. Raises StoreError if Mooncake refuses it."""
        start = address_of(memory)
        self._client.register(start, memory.nbytes)
        self._replace({**self._memories, start: memory})
        return start

    def find(self, memory: memoryview) -> int | None:
        """The address of memory that lies within one registered region; None for other memory."""
        start, starts, memories = address_of(memory), self._starts, self._memories
        at = bisect_right(starts, start) - 1
        region = memories.get(starts[at]) if at >= 0 else None
        return start if region is not None and start + memory.nbytes <= starts[at] + region.nbytes else None

    def remove(self, start: int) -> None:
        """Unregisters the memory at an address, if it is registered."""
        if start in self._memories:
            self._replace({at: memory for at, memory in self._memories.items() if at != start})
            self._client.unregister(start)

    def release(self) -> None:
        for start in self._starts:
            self.remove(start)

    def _replace(self, memories: dict[int, memoryview]) -> None:
        self._memories, self._starts = memories, sorted(memories)


class Passage(NamedTuple):
    """One value in transfer through a lane."""

    at: int  # offset of its stamp in the lane
    size: int
    caller: int | None  # address of its bytes; None if they are copied and lie behind the stamp


class Lane:
    """A piece of registered memory through which one thread at a time moves batches."""

    def __init__(self, memory: memoryview, address: int, regions: Regions) -> None:
        self._memory = memory
        self._address = address
        self._regions = regions

    @property
    def capacity(self) -> int:
        """Bytes of the largest value that can be copied through."""
        return self._memory.nbytes - STAMP_BYTES

    def admit(self, values: Iterable[memoryview]) -> list[Passage]:
        """Begins a batch: places for the first values, as far as they fit. Copies nothing yet."""
        passages: list[Passage] = []
        used = 0
        for value in values:
            caller = self._regions.find(value) if value.nbytes > COPY_BYTES else None
            needed = STAMP_BYTES + (value.nbytes if caller is None else 0)
            if used + needed > self._memory.nbytes or len(passages) == VALUES_PER_BATCH:
                break
            passages.append(Passage(at=used, size=value.nbytes, caller=caller))
            used += needed
        return passages

    def load(self, passage: Passage, stamp: bytes, data: memoryview) -> None:
        """Copies a value to the place from which Mooncake reads it."""
        self._memory[passage.at : passage.at + STAMP_BYTES] = stamp
        if passage.caller is None:
            start = passage.at + STAMP_BYTES
            self._memory[start : start + passage.size] = data

    def unload(self, passage: Passage, into: memoryview) -> bytes:
        """Copies a received value to its reader; returns its stamp."""
        start = passage.at + STAMP_BYTES
        if passage.caller is None:
            into[:] = self._memory[start : start + passage.size]
        return bytes(self._memory[passage.at : start])

    def pointers(self, passages: Sequence[Passage]) -> list[list[int]]:
        """Where the slices of each value begin, for Mooncake."""
        stamps = [self._address + passage.at for passage in passages]
        return [[at] if way.caller is None else [at, way.caller] for at, way in zip(stamps, passages, strict=True)]

    def sizes(self, passages: Sequence[Passage]) -> list[list[int]]:
        return [[STAMP_BYTES + way.size] if way.caller is None else [STAMP_BYTES, way.size] for way in passages]


def build_lanes(count: int, total_bytes: int, regions: Regions) -> Sequence[Lane]:
    """Lanes of equal size in one piece of memory, registered once. Over TCP, memory that is never touched costs nothing.

    Raises StoreError if the memory cannot be allocated.
    """
    size = total_bytes // count // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        memory = memoryview(mmap.mmap(-1, size * count))
    except (OSError, OverflowError) as error:
        raise StoreError(f"no memory for staging_bytes={format_bytes(total_bytes)} ({error}): set a smaller one") from error
    address = regions.add(memory)
    return [Lane(memory[i * size : (i + 1) * size], address + i * size, regions) for i in range(count)]
