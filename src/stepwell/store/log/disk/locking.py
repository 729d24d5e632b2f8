"""The one lock on a directory, and whether the directory is still the one that was locked. Moves no values.

The directory itself is locked, so removing its `lock` file does not admit another process. That file is locked too: it names
the process, and is the only lock where directories cannot be locked (NFS). There, a replaced file is detected.

A forked child inherits the descriptors that hold the lock, and would hold it until it ends. So it closes them:
the lock ends with the process that took it (`leave_in_forks`). The child cannot use the log.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

LOCK_NAME = "lock"
_TRIES, _PAUSE_S = 3, 0.01
_NO_LOCKS_HERE = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.EOPNOTSUPP, errno.ENOSYS)

OpenFile = Callable[[Path, int], int]  # path and flags -> the descriptor of a plain file


class _Try(Enum):
    LOCKED = "locked by us"
    TAKEN = "locked by another process"
    IMPOSSIBLE = "the file system locks no directories"


class DirectoryLock:
    """Held from `take` to `close`, or the end of the process."""

    def __init__(self, directory: Path, directory_fd: int, file_fd: int, *, by_file: bool) -> None:
        self._fds = directory_fd, file_fd
        self._places = {directory: _identity(os.fstat(directory_fd))}
        if by_file:
            self._places[directory / LOCK_NAME] = _identity(os.fstat(file_fd))

    def is_ours(self) -> bool:
        """Whether the path still leads to what was locked. Costs a stat or two."""
        try:
            return all(_identity(os.stat(path)) == identity for path, identity in self._places.items())
        except OSError:
            return False

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def take(directory: Path, open_file: OpenFile) -> DirectoryLock | None:
    """The lock, with our process id in its file; None if another process has it. Raises OSError, and holds nothing then."""
    fds = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    lock = None
    try:
        tried = _try(fds[0], fcntl.LOCK_EX)
        if tried is not _Try.TAKEN:
            fds.append(open_file(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT))
            if _try(fds[1], fcntl.LOCK_EX) is not _Try.TAKEN:
                found = DirectoryLock(directory, fds[0], fds[1], by_file=tried is _Try.IMPOSSIBLE)
                if found.is_ours():  # else it was replaced meanwhile
                    _sign(fds[1])
                    lock = found
    finally:
        if lock is None:
            for fd in fds:
                os.close(fd)
    return lock


def is_taken(directory: Path, open_file: OpenFile) -> bool:
    """Whether a process has the lock now. Raises OSError."""
    try:
        fds = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    except FileNotFoundError:
        return False
    try:
        with suppress(FileNotFoundError):
            fds.append(open_file(directory / LOCK_NAME, os.O_RDONLY))
        return any(_try(fd, fcntl.LOCK_SH, tries=1) is _Try.TAKEN for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


def _try(fd: int, how: int, tries: int = _TRIES) -> _Try:
    for left in reversed(range(tries)):
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return _Try.LOCKED
        except BlockingIOError:
            if left:
                time.sleep(_PAUSE_S)  # another process may only be testing the lock, as `is_taken` does
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return _Try.IMPOSSIBLE
    return _Try.TAKEN


def _sign(fd: int) -> None:
    """Writes our process id, for people. A full disk must not prevent the opening."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


# ---- forks ----------------------------------------------------------------------------------------


class Locked(Protocol):
    """An object that has a lock."""

    def leave_in_child(self) -> None: ...


_owners: WeakSet[Locked] = WeakSet()


def leave_in_forks(owner: Locked) -> None:
    """From now on, `leave_in_child` is called in every fork of this process, for as long as the owner exists."""
    _register()
    _owners.add(owner)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for owner in list(_owners):
        owner.leave_in_child()
    _owners.clear()
