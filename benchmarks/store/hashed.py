"""The limit of a store that seals: plain transfers of one file, and XXH3-128 of every value, with nothing else around them.

As many threads as the log has: one that hashes ahead of one that writes, four that read and hash. No names, no stamps, no
index, and nothing is compared. What the log does not reach of this is its own; what this does not reach of plain is hashing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from stepwell.base.config import StoreConfig
from store.load import BATCH, Load, Took, timed
from store.plain import Plain

TURN_BYTES = 8 << 20  # a reader's call, as the log's


class Hashed:
    """Reads and writes the file of a plain contender."""

    def __init__(self, load: Load, plain: Plain) -> None:
        self.name = plain.name.replace("plain", "plain, hashed")
        self._load, self._plain = load, plain
        self._sealing = ThreadPoolExecutor(1)
        self._readers = ThreadPoolExecutor(StoreConfig().readers)

    def write(self, life: int) -> Took:
        load, fd = self._load, self._plain.fd

        def hashed(first: int) -> list[memoryview]:
            values = [load.source(at) for at in range(first, first + BATCH)]
            _hash_all(values)
            return values

        def work() -> None:
            for batch, values in enumerate(self._sealing.map(hashed, range(0, load.count, BATCH))):
                moved = os.pwritev(fd, values, batch * load.batch_bytes)
                assert moved == load.batch_bytes, f"{moved=}"
                os.fdatasync(fd)

        return timed(work)

    def read(self) -> Took:
        load, fd = self._load, self._plain.fd
        step = max(TURN_BYTES // load.value_bytes, 1)

        def one(first: int) -> None:
            values = [load.target(at) for at in range(first, min(first + step, load.count))]
            moved = os.preadv(fd, values, first * load.value_bytes)
            assert moved == len(values) * load.value_bytes, f"{moved=}"
            _hash_all(values)

        return timed(lambda: [*self._readers.map(one, range(0, load.count, step))].clear())

    def files(self) -> list[Path]:
        return self._plain.files()

    def close(self) -> None:
        self._sealing.shutdown()
        self._readers.shutdown()


def _hash_all(values: Iterable[memoryview]) -> None:
    for value in values:
        xxhash.xxh3_128_digest(value)
