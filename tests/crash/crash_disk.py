"""A disk in memory that can lose its power at any operation, and what is left of it afterwards.

    written        -> may be lost, kept, or kept in part, until the file is synced
    named, renamed -> may be undone, from some point on, until the directory is synced

`left_behind` puts what survived into a real directory.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from random import Random

from stepwell.store.log.disk.files import Disk
from stepwell.store.log.disk.locking import DirectoryLock


class Crashed(BaseException):
    """The power is gone. Nothing may catch this and go on."""


class Loss(Enum):
    """What happens to writes that were not synced."""

    ALL = "all of them are lost"
    NONE = "all of them are kept"
    TAIL = "kept up to some sector, lost from there"
    SECTORS = "random sectors are kept"
    BLOCKS = "random blocks of 4 KiB are kept"


class _File:
    def __init__(self) -> None:
        self.now = bytearray()
        self.durable = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []  # offset, bytes; and growth as (new size, b"")


class _NoLock(DirectoryLock):
    """No other process opens the directory."""

    def __init__(self) -> None: ...

    def is_ours(self) -> bool:
        return True

    def close(self) -> None: ...


class CrashDisk(Disk):
    """Counts operations that change something; at operation `crash_at` the power goes, and stays gone."""

    def __init__(self, *, crash_at: int | None = None, budget_bytes: int | None = None) -> None:
        self.operations = 0
        self.crash_at = crash_at
        self.budget_bytes = budget_bytes
        self.fail_at: dict[int, int] = {}  # operation -> errno: it fails, having done half of its work, and life goes on
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._name_history: list[dict[str, _File]] = []  # since the directory was synced
        self._open: dict[int, _File] = {}

    # ---- the disk ---------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        pass

    def names(self, directory: Path) -> list[str]:
        return sorted(self._names)

    def open(self, path: Path, *, writable: bool = True, direct: bool = False) -> int:
        if direct:
            raise OSError(errno.EINVAL, "not here")
        if path.name not in self._names:
            raise FileNotFoundError(path)
        return self._descriptor(self._names[path.name])

    def create(self, path: Path) -> int:
        assert path.name not in self._names, f"{path.name} is there already"
        self._operation()
        self._rename({**self._names, path.name: _File()})
        return self._descriptor(self._names[path.name])

    def close(self, fd: int) -> None:
        del self._open[fd]

    def size(self, fd: int) -> int:
        return len(self._open[fd].now)

    def allocate(self, fd: int, size: int) -> None:
        file = self._open[fd]
        self._operation()
        if len(file.now) != size:
            file.now[:] = file.now[:size].ljust(size, b"\0")
            file.unsynced.append((size, b""))
        self._within_budget()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        data = b"".join(buffers)
        try:
            self._operation()
        except BaseException:
            self._apply(self._open[fd], offset, data[: len(data) // 2])
            raise
        self._apply(self._open[fd], offset, data)
        self._within_budget()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._alive()
        start = offset
        for buffer in buffers:
            part = self._open[fd].now[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            offset += len(part)
        return offset - start

    def sync(self, fd: int) -> None:
        self._operation()
        file = self._open[fd]
        file.durable[:], file.unsynced = file.now, []

    def sync_directory(self, path: Path) -> None:
        self._operation()
        self._durable_names, self._name_history = dict(self._names), []

    def rename(self, source: Path, target: Path) -> None:
        self._operation()
        names = dict(self._names)
        names[target.name] = names.pop(source.name)
        self._rename(names)

    def unlink(self, path: Path) -> None:
        self._operation()
        names = dict(self._names)
        del names[path.name]
        self._rename(names)

    def drop_cached(self, fd: int, offset: int, size: int) -> None:
        pass

    def is_cached(self, fd: int, offset: int, size: int) -> bool:
        return False

    def lock(self, directory: Path) -> DirectoryLock | None:
        self._alive()
        return _NoLock()

    def has_name(self, fd: int) -> bool:
        return True

    def file_size(self, path: Path) -> int | None:
        self._alive()
        return len(self._names[path.name].now) if path.name in self._names else None

    def total_bytes(self, directory: Path) -> int:
        return sum(len(file.now) for file in self._names.values())

    def read_file(self, path: Path) -> bytes | None:
        self._alive()
        return bytes(self._names[path.name].now) if path.name in self._names else None

    # ---- the crash --------------------------------------------------------------------------------

    def left_behind(self, directory: Path, loss: Loss, random: Random) -> None:
        """Fills a real directory with what survived."""
        history = [self._durable_names, *self._name_history]
        names = {Loss.ALL: history[0], Loss.NONE: history[-1]}.get(loss) or random.choice(history)
        directory.mkdir(mode=0o700, parents=True)
        for name, file in names.items():
            (directory / name).write_bytes(_survivor(file, loss, random))

    def _operation(self) -> None:
        self._alive()
        self.operations += 1
        if self.operations in self.fail_at:
            raise OSError(self.fail_at[self.operations], "an injected failure")
        self._alive()

    def _alive(self) -> None:
        if self.crash_at is not None and self.operations >= self.crash_at:
            raise Crashed

    def _apply(self, file: _File, offset: int, data: bytes) -> None:
        if len(file.now) < offset + len(data):
            file.now.extend(bytes(offset + len(data) - len(file.now)))
        file.now[offset : offset + len(data)] = data
        file.unsynced.append((offset, data))

    def _rename(self, names: dict[str, _File]) -> None:
        self._names = names
        self._name_history.append(names)

    def _descriptor(self, file: _File) -> int:
        fd = max(self._open, default=2) + 1
        self._open[fd] = file
        return fd

    def _within_budget(self) -> None:
        total = self.total_bytes(Path())
        assert self.budget_bytes is None or total <= self.budget_bytes, f"{total=} {self.budget_bytes=}"


def _survivor(file: _File, loss: Loss, random: Random) -> bytes:
    if loss is Loss.NONE:
        return bytes(file.now)
    content = bytearray(file.durable)
    if loss is Loss.ALL:
        return bytes(content)
    writes = file.unsynced if loss is not Loss.TAIL else file.unsynced[: random.randint(0, len(file.unsynced))]
    unit = 4096 if loss is Loss.BLOCKS else 512
    for number, (offset, data) in enumerate(writes):
        if not data:
            content[:] = content[:offset].ljust(offset, b"\0") if random.random() < 0.5 or loss is Loss.TAIL else content
            continue
        keep = len(data)
        if loss is Loss.TAIL and number == len(writes) - 1:
            keep = random.randrange(0, len(data) + unit, unit)
        for at in range(0, len(data), unit):
            kept = at < keep if loss is Loss.TAIL else random.random() < 0.5
            if kept:
                piece = data[at : at + unit]
                content.extend(bytes(max(0, offset + at + len(piece) - len(content))))
                content[offset + at : offset + at + len(piece)] = piece
    return bytes(content)
