"""Every file operation of the log, in one small object that tests can replace to simulate crashes.

Moves bytes and names; does not know formats. Raises the system's OSError. A build without O_DIRECT, fallocate or
posix_fadvise does without it. Direct transfers need memory that begins at a multiple of a block: `Scratch` provides it.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stepwell.store.log.disk import page_cache
from stepwell.store.log.disk.locking import DirectoryLock, is_taken, take

BLOCK_BYTES = 4096  # of memory and of disk: direct transfers start and end at multiples of it
IOV_MAX = 1024
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700

_SMALL_FILE_BYTES = 64 * 1024
_MOST_OPEN = 256  # descriptors of one log
_PART_OF_ALL = 4  # of the descriptors that a process may have: the rest is for other uses
# Links are not followed and an open never blocks: another user's file in the directory must not redirect or delay us.
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_CHUNK_BYTES = 1 << 20  # of scratch memory, at least


def up_to_block(size: int) -> int:
    """The next multiple of a block."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class Disk:
    """The real disk. Descriptors are plain integers; the caller closes those that it opens."""

    def make_directory(self, path: Path) -> None:
        """Creates a directory, and those above it, durably."""
        missing = [above for above in (path, *path.parents) if not above.exists()]
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        for made in missing:
            self.sync_directory(made.parent)

    def names(self, directory: Path) -> list[str]:
        return sorted(os.listdir(directory))

    def open(self, path: Path, *, writable: bool = True, direct: bool = False) -> int:
        """A descriptor of an existing file. Raises OSError(EINVAL) if the file system does not support direct transfers."""
        if direct and not _DIRECT:
            raise OSError(errno.EINVAL, "this system has no direct I/O", str(path))
        return _open_plain(path, (os.O_RDWR if writable else os.O_RDONLY) | (_DIRECT if direct else 0))

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file. Durable only after `sync_directory`."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def allocate(self, fd: int, size: int) -> None:
        """Makes a file exactly this long, with its space allocated where possible: a full disk fails here, not later."""
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
        """Writes all of the buffers, one after the other, in the fewest calls that the system allows."""
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

    def drop_cached(self, fd: int, offset: int, size: int) -> None:
        """Asks the system to drop its cached copy of a range, so that the next read comes from the disk."""
        if sys.platform == "linux":
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def is_cached(self, fd: int, offset: int, size: int) -> bool:
        """Whether the system has a cached copy of a whole range; False if it cannot report that."""
        return page_cache.holds(fd, offset, size)

    def lock(self, directory: Path) -> DirectoryLock | None:
        """Takes the one lock on a directory; None if another process has it."""
        return take(directory, _open_plain)

    def is_locked(self, directory: Path) -> bool:
        """Whether a process has the lock now."""
        return is_taken(directory, _open_plain)

    def has_name(self, fd: int) -> bool:
        """Whether a file still has a name in a directory: a removed file is lost as soon as it is closed."""
        return os.fstat(fd).st_nlink > 0

    def file_size(self, path: Path) -> int | None:
        """None if there is no such file. Raises OSError for anything but a plain file."""
        try:
            found = os.lstat(path)
            _must_be_plain(found, path)
            return found.st_size
        except FileNotFoundError:
            return None

    def total_bytes(self, directory: Path) -> int:
        """The total size of all files in a directory: for each, the larger of its length and its allocated blocks."""
        total = 0
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    size = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # renamed or removed just now
                    continue
                total += max(size.st_size, size.st_blocks * 512)
        return total

    def most_open(self) -> int:
        """How many descriptors a log may keep open."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(8, min(_MOST_OPEN, limit // _PART_OF_ALL))

    def read_file(self, path: Path) -> bytes | None:
        """All bytes of a small file, the first 64 KiB of a larger one; None if there is none."""
        try:
            fd = self.open(path, writable=False)
        except FileNotFoundError:
            return None
        try:
            buffer = memoryview(bytearray(min(_SMALL_FILE_BYTES, self.size(fd))))
            return bytes(buffer[: self.read(fd, [buffer], 0)])
        finally:
            self.close(fd)


def _open_plain(path: Path, flags: int) -> int:
    """A descriptor of a plain file; OSError for a link, a directory, a pipe or a device."""
    try:
        fd = os.open(path, flags | _PLAIN, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _not_plain(path) from error
        raise
    try:
        _must_be_plain(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _must_be_plain(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _not_plain(path)


def _not_plain(path: Path) -> OSError:
    return OSError(errno.ENOTSUP, "not a plain file; move it away", str(path))


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The rest of the buffers after `done` bytes of them were moved."""
    if done == sum(map(len, buffers)):
        return []
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def replace_file(disk: Disk, path: Path, content: Sequence[memoryview]) -> None:
    """Replaces a whole file: after a crash the old one or the new one is there, never a mixture."""
    fresh = path.with_name(path.name + ".new")
    if fresh.name in disk.names(path.parent):
        disk.unlink(fresh)
    fd = disk.create(fresh)
    try:
        disk.write(fd, content, 0)
        disk.sync(fd)
    except OSError:
        disk.unlink(fresh)  # half a file must not take up space
        raise
    finally:
        disk.close(fd)
    disk.rename(fresh, path)
    disk.sync_directory(path.parent)


def is_aligned(buffer: memoryview) -> bool:
    """Whether a buffer begins at a multiple of a block in memory."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address % BLOCK_BYTES == 0


class Scratch:
    """Blocks for headers, tails and padding, all released at once. Not to be shared between threads."""

    def __init__(self) -> None:
        self._chunks: list[memoryview] = []
        self._chunk, self._used = 0, 0  # how much of the chunks is in use

    def take(self, size: int) -> memoryview:
        """At least `size` bytes, in whole blocks, with undefined content."""
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

    def release(self) -> None:
        """All blocks may be reused. The first chunk is kept for next time."""
        del self._chunks[1:]
        self._chunk = self._used = 0
