"""The segment files: which exist, which are full, which may be written over, and their descriptors. Knows no values.

    (created) -> ACTIVE -> SEALED -> FREE -> (renamed to the next number) ACTIVE ...

Numbers only go up, so a file that is written over has another name, and nothing of its former life is believed. A segment
that somebody reads is pinned: it is neither written over nor closed. Callers bring the lock.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stepwell.store.log.disk import Disk

SUFFIX = ".seg"
NOTHING_YET = 2**62  # first seq of a segment without batches
_MAX_OPEN = 128  # segments with open descriptors: two each


class State(Enum):
    ACTIVE = "being written"
    SEALED = "full"
    FREE = "may be written over"


@dataclass(slots=True, eq=False)
class Segment:
    id: int
    first_seq: int  # of its oldest batch
    end: int  # where the next batch would go
    state: State = State.SEALED
    ghosts: int = 0  # values in it that were given up but would come back if it was read anew
    pins: int = 0
    fd: int = -1  # -1: closed
    direct_fd: int = -1  # -1: closed, or the file system has no direct transfers


def name_of(number: int) -> str:
    return f"{number:016x}{SUFFIX}"


def path_of(directory: Path, number: int) -> Path:
    return directory / name_of(number)


def number_of(name: str) -> int | None:
    """The number of a segment by its file's name; None when the file is none."""
    stem = name.removesuffix(SUFFIX)
    try:
        number = int(stem, 16)
    except ValueError:
        return None
    return number if number > 0 and name == name_of(number) else None


class Segments:
    """All segments of one directory, by number."""

    def __init__(self, disk: Disk, directory: Path, segment_bytes: int, found: list[Segment]) -> None:
        self.table = {segment.id: segment for segment in sorted(found, key=lambda segment: segment.id)}
        self.direct = False  # whether descriptors for direct transfers are wanted
        self._next_id = max(self.table, default=0) + 1
        self._disk, self._directory, self._segment_bytes = disk, directory, segment_bytes
        self._open: dict[int, Segment] = {}  # least recently used first

    def free(self) -> list[Segment]:
        return [segment for segment in self.table.values() if segment.state is State.FREE]

    def sealed(self) -> list[Segment]:
        return [segment for segment in self.table.values() if segment.state is State.SEALED]

    def sound(self, segment: Segment) -> bool:
        """Whether a file has its full length; what is too much is cut off, for the budget's sake. Raises OSError."""
        path = path_of(self._directory, segment.id)
        size = self._disk.file_size(path)
        if size is not None and size > self._segment_bytes:
            self.open(segment)
            self._disk.allocate(segment.fd, self._segment_bytes)
        return self._disk.file_size(path) == self._segment_bytes

    def oldest_elsewhere(self, segment: Segment) -> int:
        """The first seq of any other segment that still has its bytes, free ones too."""
        return min((other.first_seq for other in self.table.values() if other is not segment), default=NOTHING_YET)

    def create(self, first_seq: int) -> Segment:
        """A new file, all of its bytes set aside. Raises OSError, and leaves nothing."""
        segment = Segment(id=self._next_id, first_seq=first_seq, end=0, state=State.ACTIVE)
        path = path_of(self._directory, segment.id)
        fd = self._disk.create(path)
        try:
            self._disk.allocate(fd, self._segment_bytes)
            self._disk.sync_directory(self._directory)
        except OSError:
            self._disk.close(fd)
            self._disk.unlink(path)
            raise
        segment.fd = fd
        self._open[segment.id] = segment
        return self._add(segment)

    def reuse(self, segment: Segment, first_seq: int) -> Segment:
        """Gives the file of a free segment to a new one. Its name is safe on disk before anything is written. Raises OSError."""
        assert segment.state is State.FREE and not segment.pins, f"segment {segment.id}: {segment.state} {segment.pins=}"
        self.close(segment)
        fresh = Segment(id=self._next_id, first_seq=first_seq, end=0, state=State.ACTIVE)
        fd = self._disk.open(path_of(self._directory, segment.id))
        try:
            self._disk.allocate(fd, self._segment_bytes)  # it may have come from a crash, or a damaged directory
        finally:
            self._disk.close(fd)
        self._disk.rename(path_of(self._directory, segment.id), path_of(self._directory, fresh.id))
        del self.table[segment.id]
        self._add(fresh)
        try:
            self._disk.sync_directory(self._directory)
        except OSError:  # a crash may still bring the old segment back: it is as old as it was, and free
            fresh.state, fresh.first_seq, fresh.ghosts = State.FREE, segment.first_seq, segment.ghosts
            raise
        return fresh

    def unlink(self, segment: Segment) -> None:
        """Gives the bytes of a free segment back to the disk. Raises OSError."""
        assert segment.state is State.FREE and not segment.pins, f"segment {segment.id}: {segment.state} {segment.pins=}"
        self.close(segment)
        self._disk.unlink(path_of(self._directory, segment.id))
        del self.table[segment.id]
        self._disk.sync_directory(self._directory)

    def pin(self, number: int) -> Segment:
        """A segment with open descriptors that will stay as it is until it is unpinned. Raises OSError."""
        segment = self.table[number]
        self.open(segment)
        segment.pins += 1
        return segment

    def unpin(self, segment: Segment) -> None:
        assert segment.pins > 0, f"segment {segment.id} is not pinned"
        segment.pins -= 1

    def open(self, segment: Segment) -> None:
        """Opens its descriptors, if they are not; they may be closed again as soon as the lock is given back, unless pinned."""
        if segment.fd < 0:
            path = path_of(self._directory, segment.id)
            segment.fd = self._disk.open(path)
        if segment.direct_fd < 0 and self.direct:
            segment.direct_fd = self._try_direct(segment)
        self._open.pop(segment.id, None)
        self._open[segment.id] = segment
        if len(self._open) > _MAX_OPEN:
            idle = next((other for other in self._open.values() if not other.pins and other.state is not State.ACTIVE), None)
            if idle is not None and idle is not segment:
                self.close(idle)

    def close(self, segment: Segment) -> None:
        self._open.pop(segment.id, None)
        for fd in (segment.fd, segment.direct_fd):
            if fd >= 0:
                self._disk.close(fd)
        segment.fd = segment.direct_fd = -1

    def close_all(self) -> None:
        for segment in list(self._open.values()):
            self.close(segment)

    def _add(self, segment: Segment) -> Segment:
        self._next_id += 1
        self.table[segment.id] = segment
        return segment

    def _try_direct(self, segment: Segment) -> int:
        try:
            return self._disk.open(path_of(self._directory, segment.id), direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            return -1
