"""The kernel says what it has in memory; nobody reads to find out."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from stepwell.store.log.cached import is_cached

SIZE = 1 << 20
_KERNEL = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
pytestmark = pytest.mark.skipif(sys.platform != "linux" or _KERNEL < (6, 5), reason="the kernel has no cachestat")


def test_what_was_written_is_cached_until_it_is_dropped(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, os.urandom(SIZE), 0)
        assert is_cached(fd, 0, SIZE) and is_cached(fd, 4096, 8192)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(fd, 0, SIZE):
            pytest.skip("this file system keeps what it is asked to drop")
        os.pread(fd, 4096, 0)
        assert not is_cached(fd, 0, SIZE), "a part is not all of it"
    finally:
        os.close(fd)


def test_a_descriptor_that_is_none_has_nothing_cached() -> None:
    assert not is_cached(-1, 0, SIZE)
