"""Memory that begins at a multiple of a block, as direct transfers need it. Not safe to share between threads."""

from __future__ import annotations

import mmap

import numpy as np

from stepwell.store.log.disk.files import BLOCK_BYTES, up_to_block

_CHUNK_BYTES = 1 << 20


def is_aligned(buffer: memoryview) -> bool:
    """Whether a buffer begins at a multiple of a block in memory."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % BLOCK_BYTES == 0


class Scratch:
    """Blocks for headers, tails and padding, all given back at once."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._chunk, self._used = 0, 0  # how far the chunks are handed out

    def take(self, size: int) -> memoryview:
        """At least `size` bytes, whole blocks. They hold anything."""
        size = up_to_block(size)
        while self._chunk < len(self._chunks) and self._used + size > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(memoryview(mmap.mmap(-1, max(size, _CHUNK_BYTES))))
        taken = self._chunks[self._chunk][self._used : self._used + size]
        self._used += size
        return taken

    def take_zeros(self, size: int) -> memoryview:
        taken = self.take(size)
        taken[:] = bytes(len(taken))
        return taken

    def give_back(self) -> None:
        """Everything handed out may be handed out again. The first chunk is kept for next time."""
        del self._chunks[1:]
        self._chunk = self._used = 0
