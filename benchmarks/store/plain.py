"""The yardstick: one file, one thread, one `pwritev` or `preadv` for each batch, one `fdatasync` after each write.

No names, no checksums, no index: nothing can be found again in it. Through the page cache, or past it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from store.load import BATCH, Load, Took, timed


class Plain:
    def __init__(self, load: Load, directory: Path, *, direct: bool) -> None:
        self.name = "plain direct" if direct else "plain"
        self._load = load
        self._path = directory / f"{self.name}.bin"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, load.total_bytes)
        self.fd = os.open(self._path, os.O_RDWR | os.O_DIRECT) if direct else fd
        if direct:
            os.close(fd)

    def write(self, life: int) -> Took:
        load = self._load

        def work() -> None:
            for batch in range(load.batches):
                first = batch * BATCH
                self._all(os.pwritev, [load.source(at) for at in range(first, first + BATCH)], batch)
                os.fdatasync(self.fd)

        return timed(work)

    def read(self) -> Took:
        load = self._load

        def work() -> None:
            for batch in range(load.batches):
                first = batch * BATCH
                self._all(os.preadv, [load.target(at) for at in range(first, first + BATCH)], batch)

        return timed(work)

    def _all(self, call: Callable[[int, list[memoryview], int], int], buffers: list[memoryview], batch: int) -> None:
        moved = call(self.fd, buffers, batch * self._load.batch_bytes)
        assert moved == self._load.batch_bytes, f"{moved=}"

    def files(self) -> list[Path]:
        return [self._path]

    def close(self) -> None:
        os.close(self.fd)
