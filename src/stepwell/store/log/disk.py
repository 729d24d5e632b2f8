"""Every file operation of the log, in one small object, so that tests can stand in its place and pull the plug.

Moves bytes and names; knows no format. Raises OSError as the machine does. A build without O_DIRECT, fallocate or
posix_fadvise goes without.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BLOCK_BYTES = 4096  # of memory and of disk: direct transfers start and end at multiples of it
IOV_MAX = 1024
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700

_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
_LOCK_TRIES, _LOCK_PAUSE_S = 3, 0.01
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


def up_to_block(size: int) -> int:
    """The next multiple of a block."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class Disk:
    """The real one. Descriptors are plain integers; whoever opens one closes it."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def names(self, directory: Path) -> list[str]:
        return sorted(os.listdir(directory))

    def open(self, path: Path, *, writable: bool = True, direct: bool = False) -> int:
        """A descriptor of an existing file. Raises OSError(EINVAL) where the file system knows no direct transfers."""
        if direct and not _DIRECT:
            raise OSError(errno.EINVAL, "this system has no direct I/O", str(path))
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (_DIRECT if direct else 0))

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file. Lasting only after `sync_directory`."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def allocate(self, fd: int, size: int) -> None:
        """Makes a file exactly this long, with room set aside where possible: a full disk shows here, not later."""
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)
        if sys.platform == "linux":
            try:
                return os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
        os.ftruncate(fd, size)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes all of the buffers, one after the other, in as few calls as the machine allows."""
        rest = [buffer for buffer in buffers if len(buffer)]
        while rest:
            written = os.pwritev(fd, rest[:IOV_MAX], offset)
            if not written:
                raise OSError(errno.EIO, f"nothing could be written at {offset}")
            offset += written
            rest = _after(rest, written)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills the buffers, one after the other; returns how many bytes there were before the end of the file."""
        rest, total = [buffer for buffer in buffers if len(buffer)], 0
        while rest:
            got = os.preadv(fd, rest[:IOV_MAX], offset + total)
            if not got:
                break
            total += got
            rest = _after(rest, got)
        return total

    def sync(self, fd: int) -> None:
        """Returns when everything written to this file will survive a crash."""
        if sys.platform == "linux":
            os.fdatasync(fd)
        else:
            os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Returns when the names in this directory will survive a crash."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def forget_cached(self, fd: int, offset: int, size: int) -> None:
        """Asks the machine to drop its copy of a range, so that the next read comes from the disk."""
        if sys.platform == "linux":
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def lock(self, path: Path) -> int | None:
        """Takes the one lock on a file and writes our process id into it; None when another process has it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_TRIES - 1:
                    os.close(fd)
                    return None
                time.sleep(_LOCK_PAUSE_S)  # somebody may only be looking, as `is_locked` does
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def is_locked(self, path: Path) -> bool:
        """Whether some process has the lock now."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def file_size(self, path: Path) -> int | None:
        """None when there is no such file."""
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return None

    def total_bytes(self, directory: Path) -> int:
        """Of all files in a directory, as long as they say they are or as many blocks as they take up, if that is more."""
        sizes = [entry.stat() for entry in os.scandir(directory)]
        return sum(max(size.st_size, size.st_blocks * 512) for size in sizes)

    def read_file(self, path: Path) -> bytes | None:
        """All bytes of a small file; None when there is none."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers when `done` bytes of them were moved."""
    if done == sum(map(len, buffers)):
        return []
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def replace_file(disk: Disk, path: Path, content: Sequence[memoryview]) -> None:
    """Puts a whole file in the place of another: a crash leaves the old one or the new one, never a mixture."""
    fresh = path.with_name(path.name + ".new")
    if fresh.name in disk.names(path.parent):
        disk.unlink(fresh)
    fd = disk.create(fresh)
    try:
        disk.write(fd, content, 0)
        disk.sync(fd)
    except OSError:
        disk.unlink(fresh)  # half a file must not take up room
        raise
    finally:
        disk.close(fd)
    disk.rename(fresh, path)
    disk.sync_directory(path.parent)
