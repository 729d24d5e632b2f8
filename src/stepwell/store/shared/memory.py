"""Memory in which values travel between two processes. The client allocates it and passes its descriptor to the owner, once.

The owner of the log maps memory of other processes, so it accepts only files in memory that can never shrink, in ordinary pages.
With any other memory the client could kill the owner (SIGBUS) by truncating the file. Does not know values.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import numpy as np

from stepwell.store.log.disk.files import BLOCK_BYTES, Disk, up_to_block
from stepwell.store.shared.wire import Malformed, Places

_SMALL_ALIGNMENT = 64
_SPARE = 2
_DISK = Disk()  # a file in memory is read and written like any other


def make_memory(size: int) -> int:
    """A descriptor of memory whose size never changes. Raises OSError."""
    fd = os.memfd_create("stepwell-values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, size: int, most_bytes: int) -> memoryview:
    """Maps memory that another process allocated, for as long as the view is referenced. Raises Malformed if it could do harm."""
    if not 1 <= size <= most_bytes:
        raise Malformed(f"memory of {size} bytes; at most {most_bytes} are accepted")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise Malformed("a descriptor that is not one of memory") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise Malformed("memory that could be truncated")
    if os.fstat(fd).st_size < size:
        raise Malformed(f"memory of {os.fstat(fd).st_size} bytes, and not of {size}")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise Malformed("memory in huge pages, which may run out")
    try:
        return memoryview(mmap.mmap(fd, size))
    except OSError as error:
        raise Malformed(f"memory that cannot be mapped: {error}") from None


class Scratch:
    """Private memory for copies that other processes cannot change. Any thread.

    A little of it is kept: the first use of a page costs more than all later ones.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._spare: list[memoryview] = []

    @contextmanager
    def copy(self, memory: memoryview, places: Places) -> Iterator[list[memoryview]]:
        """Copies of the values at these places, with the same alignment; they must not be used after the context ends."""
        with self._lock:
            scratch = self._spare.pop() if self._spare else memoryview(b"")
        if len(scratch) < len(memory):
            scratch = memoryview(mmap.mmap(-1, len(memory), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        source, target = np.frombuffer(memory, np.uint8), np.frombuffer(scratch, np.uint8)
        ranges = [slice(offset, offset + size) for offset, size in zip(places.offsets, places.sizes, strict=True)]
        for each in ranges:
            np.copyto(target[each], source[each])  # releases the GIL, which memoryviews do not
        yield [scratch[each] for each in ranges]
        with self._lock:
            if len(self._spare) < _SPARE:
                self._spare.append(scratch)


# ---- values in it ---------------------------------------------------------------------------------


def place(sizes: Iterable[int], memory_bytes: int) -> Places:
    """Places for the first values, as far as they fit, at least one; large ones at multiples of a block, for direct I/O."""
    offsets: list[int] = []
    taken: list[int] = []
    end = 0
    for size in sizes:
        alignment = BLOCK_BYTES if size >= BLOCK_BYTES else _SMALL_ALIGNMENT
        start = -(-end // alignment) * alignment
        if offsets and start + size > memory_bytes:
            break
        offsets.append(start)
        taken.append(size)
        end = start + size
    return Places(offsets, taken)


class _Run(NamedTuple):
    offset: int
    buffers: list[memoryview]


def copy_in(fd: int, offsets: Sequence[int], values: Sequence[memoryview]) -> None:
    for run in _runs(offsets, values):
        _DISK.write(fd, run.buffers, run.offset)


def copy_out(fd: int, offsets: Sequence[int], values: Sequence[memoryview]) -> None:
    for run in _runs(offsets, values):
        got = _DISK.read(fd, run.buffers, run.offset)
        assert got == sum(map(len, run.buffers)), f"memory that cannot shrink had {got} bytes at {run.offset}"


def _runs(offsets: Sequence[int], values: Sequence[memoryview]) -> Iterator[_Run]:
    """Groups adjacent values into one call."""
    run, end = _Run(0, []), 0
    for offset, value in zip(offsets, values, strict=True):
        if offset != end and run.buffers:
            yield run
            run = _Run(offset, [])
        elif not run.buffers:
            run = _Run(offset, [])
        run.buffers.append(value)
        end = offset + len(value)
    if run.buffers:
        yield run


def memory_for(size: int, usual_bytes: int) -> int:
    """How much memory to allocate for a value of this size, with space for others."""
    return max(usual_bytes, up_to_block(size))
