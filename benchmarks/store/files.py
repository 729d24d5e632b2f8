"""One file for each page, the simplest store there is: one thread, no checksums, nothing synced, no copies in between."""

from __future__ import annotations

import os
from pathlib import Path

from store.load import Load, Took, timed

ASKED = 4096


class Files:
    name = "file per page"

    def __init__(self, load: Load, directory: Path) -> None:
        self._load, self._directory = load, directory / "files"
        self._directory.mkdir()
        self._life = 0

    def write(self, life: int) -> Took:
        for path in self.files():
            path.unlink()
        self._life = life
        paths = self._paths()

        def work() -> None:
            for at, path in enumerate(paths):
                fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(fd, self._load.source(at))
                os.close(fd)
                os.rename(f"{path}.new", path)

        return timed(work)

    def read(self) -> Took:
        paths = self._paths()

        def work() -> None:
            for at, path in enumerate(paths):
                fd = os.open(path, os.O_RDONLY)
                got = os.readv(fd, [self._load.target(at)])
                os.close(fd)
                assert got == self._load.value_bytes, f"{got=}"

        return timed(work)

    def exists(self) -> Took:
        paths = self._paths()[:ASKED]

        def work() -> None:
            assert all(os.path.exists(path) for path in paths)

        return timed(work)

    def files(self) -> list[Path]:
        return sorted(self._directory.iterdir())

    def close(self) -> None:
        pass

    def _paths(self) -> list[str]:
        return [f"{self._directory}/{key.hex()}" for key in self._load.keys(self._life)]
