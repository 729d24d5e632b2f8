"""A block of host memory that several processes of this machine map: one makes it under a name, the others open it.

    |---------------- size_bytes, for pages ----------------|-- note: 4 KiB --|

The note is a few words from the one that made it to the one that opened it: what its bytes mean, and up to which job its copies
had ended when it closed. Whoever opens it takes the name away, so that nothing is left behind by processes that are killed. Where
nobody came to open it, its maker does when it ends, and the next that makes one does for makers that were killed: they no longer
hold the lock on it. (A lock and not a process id in the name: containers may share this memory and not their ids.)
What is found under a name is not trusted before its owner and size were looked at. Nothing here waits.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from hashlib import blake2b
from pathlib import Path
from typing import IO

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes
from stepwell.transfer.copy_engine import map_now, touch

SHARED_ROOT = Path("/dev/shm")
PREFIX = "stepwell-"  # of all names
NOTE_BYTES = 4096
MEANING_BYTES = 32


class SharedBlock:
    """Memory of `size_bytes`, mapped for as long as this object lives. Raises ConfigError where it cannot be had."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            self._map = mmap.mmap(fd, size_bytes + NOTE_BYTES)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes

    @classmethod
    def make(cls, name: str, size_bytes: int, *, meaning: str, root: Path = SHARED_ROOT) -> SharedBlock:
        """New memory under a name, all of it taken now. What was left under that name is taken away first, and what processes
        that are no more have made.
        """
        path = root / (PREFIX + name)
        path.unlink(missing_ok=True)
        _remove_orphans(root)
        _must_fit(size_bytes, root)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        locked = os.fdopen(os.dup(fd), "rb")
        try:
            fcntl.flock(locked, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, size_bytes + NOTE_BYTES)  # else the lack of room would kill whoever writes first
        except OSError as error:
            os.close(fd)
            _remove(path, locked, os.getpid())
            raise ConfigError(_no_room(size_bytes, root, str(error.strerror))) from error
        block = cls(fd, size_bytes)
        weakref.finalize(block, _remove, path, locked, os.getpid())
        touch(block._map)
        block._note(8, _digest(meaning))
        return block

    @classmethod
    def open(cls, name: str, size_bytes: int, *, root: Path = SHARED_ROOT) -> SharedBlock:
        """The memory that another process of this machine made under a name, which is gone then."""
        path = root / (PREFIX + name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(
                f"the memory that a worker shares with the scheduler is not at {path} ({error.strerror}): all workers of an "
                "engine must run on one machine, and see the same /dev/shm"
            ) from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size_bytes + NOTE_BYTES:
            os.close(fd)
            raise ConfigError(f"{path} is not the memory that a worker of this engine made: remove it and start again")
        block = cls(fd, size_bytes)
        path.unlink(missing_ok=True)
        map_now(block._map)
        return block

    @property
    def view(self) -> memoryview:
        """The part that is for pages."""
        return memoryview(self._map)[: self.size_bytes]

    @property
    def meaning(self) -> str:
        """A digest of what its maker said that its bytes mean."""
        start = self.size_bytes + 8
        return self._map[start : start + MEANING_BYTES].hex()

    @property
    def ended_job(self) -> int:
        """Up to which job all copies had ended well when its maker closed; 0 when it has not."""
        return int.from_bytes(self._map[self.size_bytes : self.size_bytes + 8], "little")

    def note_ended(self, job: int) -> None:
        self._note(0, job.to_bytes(8, "little"))

    def _note(self, offset: int, data: bytes) -> None:
        start = self.size_bytes + offset
        self._map[start : start + len(data)] = data


def _remove(path: Path, locked: IO[bytes], maker: int) -> None:
    """Takes a name away if it is still that of the file, in the process that made it: one that was forked leaves it alone."""
    if os.getpid() == maker:
        try:
            if os.path.samestat(os.lstat(path), os.fstat(locked.fileno())):
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # somebody has opened it
    locked.close()


def _remove_orphans(root: Path) -> None:
    """Takes away what this user's processes have made that are no more: nobody holds the lock, and it has a size already."""
    for path in root.glob(PREFIX + "*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # another user's, or gone
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:
            pass  # its maker lives
        finally:
            os.close(fd)


def _digest(meaning: str) -> bytes:
    return blake2b(meaning.encode(), digest_size=MEANING_BYTES).digest()


def _must_fit(size_bytes: int, root: Path) -> None:
    room = os.statvfs(root)
    if size_bytes + NOTE_BYTES > room.f_bavail * room.f_frsize:
        raise ConfigError(_no_room(size_bytes, root, f"{format_bytes(room.f_bavail * room.f_frsize)} are free"))


def _no_room(size_bytes: int, root: Path, why: str) -> str:
    return (
        f"{format_bytes(size_bytes)} of shared memory cannot be had in {root} ({why}): give less host_memory, or more room there "
        "(--shm-size or --ipc=host of a container)"
    )
