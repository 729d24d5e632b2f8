"""Reads the batches of one segment in order; skips what cannot be read, a block at a time.

Reads only. Never trusts a length before it is checked, so hostile bytes cost no more than a read of the segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepwell.store.log.disk.files import BLOCK_BYTES, Disk
from stepwell.store.log.format.batch import MAGIC, Batch, claimed_header_bytes, parse_header

_WINDOW_BYTES = 64 * 1024  # read at once: headers of small batches lie close together
_STRIDE_BYTES = 4 << 20  # the same while looking for the next header


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Bytes that are not a batch: never written, of a former use, torn, or damaged. Only the bytes after it show which."""

    segment: int
    offset: int
    size: int


class _Window:
    """A part of a file, read ahead."""

    def __init__(self, disk: Disk, fd: int, size: int) -> None:
        self._disk, self._fd, self._size = disk, fd, size
        self._start, self._bytes = 0, memoryview(b"")

    def at(self, offset: int, length: int, ahead: int) -> memoryview:
        """`length` bytes at `offset`, fewer at the end of the file; reads at least `ahead` if it has to read."""
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._bytes):
            self._bytes = memoryview(bytearray(max(0, min(max(length, ahead), self._size - offset))))
            try:
                self._bytes = self._bytes[: self._disk.read(self._fd, [self._bytes], offset)]
            except OSError:  # a bad place on the disk: no header, and on to the next block
                self._bytes = memoryview(bytes(min(BLOCK_BYTES, len(self._bytes))))
            self._start, begin = offset, 0
        return self._bytes[begin : begin + length]


def scan(disk: Disk, fd: int, *, segment: int, start: int, seed: int, segment_bytes: int) -> Iterator[Batch | Gap]:
    """Every batch that verifies, beginning at `start`, and the gaps between, before and after them."""
    end = min(disk.size(fd), segment_bytes) // BLOCK_BYTES * BLOCK_BYTES
    window = _Window(disk, fd, end)
    offset = gap_start = start
    while offset < end:
        header_bytes = claimed_header_bytes(window.at(offset, BLOCK_BYTES, _WINDOW_BYTES))
        header = window.at(offset, header_bytes, _WINDOW_BYTES) if header_bytes else memoryview(b"")
        batch = parse_header(header, seed=seed, segment=segment, offset=offset, segment_bytes=segment_bytes)
        if batch is None:
            offset = _next_magic(window, offset + BLOCK_BYTES, end)
            continue
        if offset > gap_start:
            yield Gap(segment=segment, offset=gap_start, size=offset - gap_start)
        yield batch
        offset = gap_start = batch.end
    if end > gap_start:
        yield Gap(segment=segment, offset=gap_start, size=end - gap_start)


def _next_magic(window: _Window, offset: int, end: int) -> int:
    """The next block that begins like a header; the end if there is none."""
    magic = np.frombuffer(MAGIC, np.uint64)[0]
    while offset < end:
        part = window.at(offset, min(_STRIDE_BYTES, end - offset), _STRIDE_BYTES)
        blocks = len(part) // BLOCK_BYTES
        if not blocks:
            return end
        firsts = np.frombuffer(part, np.uint64, blocks * BLOCK_BYTES // 8)[:: BLOCK_BYTES // 8]
        found = np.flatnonzero(firsts == magic)
        if len(found):
            return offset + int(found[0]) * BLOCK_BYTES
        offset += blocks * BLOCK_BYTES
    return end
