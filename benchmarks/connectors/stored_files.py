"""What a cache has left on the disk: how much it is, when it has stopped growing, and off the system's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format.superblock import NAME
from stepwell.store.log.inspect import stat_directory

STILL_S, PATIENCE_S = 5.0, 120.0  # threads of an engine on a busy machine pause for seconds


def size_of(directory: Path) -> int:
    """Bytes of the values that are stored: of logs what they say of themselves, since their files are longer than that."""
    logs = [found.parent for found in directory.rglob(NAME)]
    if logs:
        return sum(stat_directory(log, Disk()).value_bytes for log in logs)
    sizes = []
    for file in _files(directory):
        with suppress(FileNotFoundError):  # it was a temporary one
            sizes.append(file.stat().st_size)
    return sum(sizes)


def settled(directory: Path, work: Callable[[], object]) -> int:
    """Lets an engine work until its files have not grown for a while; their size. Raises TimeoutError if they always do."""
    began = changed = time.monotonic()
    size = size_of(directory)
    while (now := time.monotonic()) - changed < STILL_S:
        if now - began > PATIENCE_S:
            raise TimeoutError(f"{directory} still grows after {PATIENCE_S:g} s")
        work()
        time.sleep(0.05)
        if size_of(directory) != size:
            size, changed = size_of(directory), time.monotonic()
    return size


def forget(directory: Path) -> None:
    """Off the system's memory, so that the next process reads from the disk, whoever wrote it."""
    for file in _files(directory):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(directory: Path) -> list[Path]:
    return [file for file in directory.rglob("*") if file.is_file()]
