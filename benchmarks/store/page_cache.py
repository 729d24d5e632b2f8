"""Files out of the machine's page cache, and into it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def chill(files: Iterable[Path]) -> None:
    """Syncs files and drops them from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(files: Iterable[Path]) -> None:
    """Reads files into the page cache."""
    buffer = bytearray(4 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
