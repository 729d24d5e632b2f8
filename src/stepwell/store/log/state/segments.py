"""The segment files: how many fit a budget, which exist, which are full, which may be overwritten. Does not know values.

    (created) -> ACTIVE -> SEALED -> FREE -> (renamed to the next number) ACTIVE ...

Numbers only go up, so an overwritten file has a new name, and nothing of its former use is trusted. A segment that a reader
needs is held: it is not overwritten. One that is being read is pinned: it is not closed either. A number is never used twice,
even if its file was lost. Callers hold the lock.

The budget covers the whole directory. A snapshot grows with the number of values and spaces, so the number of segments shrinks
with it.

    | lock, store.json, sealed, their successors | snapshot | its successor | segment | segment | ... | segment |   <= budget
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes
from stepwell.store.log.disk.files import BLOCK_BYTES, Disk, up_to_block
from stepwell.store.log.format.batch import Batch, has_tombstones
from stepwell.store.log.format.segment_list import NOTHING_YET, path_of
from stepwell.store.log.format.snapshot import ROW_BYTES

MIN_SEGMENTS = 4  # one being written, one free to relocate into, and two to choose from
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 64 * 1024, 1 << 34
DEFAULT_SEGMENT_BYTES = 256 << 20
NEW_NAME = "segment.new"  # of a file that becomes a segment
FIXED_BYTES = 64 * 1024  # lock, store.json, sealed, and the blocks that a file system keeps for itself
_USUAL_SUPERBLOCK_BYTES = 16 * 1024  # of store.json, included above; one with many quotas is larger
_LISTED_BYTES = 4 * 24  # of a segment in two slots of `sealed`, and in those of its successor
_SPARE_BYTES = 1000 * ROW_BYTES + 16 * 1024  # the next snapshot may be an eighth and this much larger than one made now
_FDS_OF_SEGMENT = 2


class State(Enum):
    ACTIVE = "being written"
    SEALED = "full"
    FREE = "may be overwritten"


@dataclass(slots=True, eq=False)
class Segment:
    id: int
    first_seq: int  # of its oldest batch
    end: int  # where the next batch would go
    last_seq: int = 0  # of its newest batch
    state: State = State.SEALED
    stale: int = 0  # values in it that were evicted or moved, and would come back if it was read again
    tombstones: int = 0  # deletes, clears and revocations written in it
    newest_tombstone: int = 0  # the latest `as_of` of those
    pins: int = 0  # users that hold it
    readers: int = 0  # those among them that use its descriptors now
    fd: int = -1  # -1: closed
    direct_fd: int = -1  # -1: closed, or the file system has no direct transfers

    def note(self, batch: Batch) -> None:
        """Records a batch that was written to, or found at the end of, this segment."""
        self.end, self.last_seq, self.first_seq = batch.end, max(self.last_seq, batch.seq), min(self.first_seq, batch.seq)
        if has_tombstones(batch):
            self.tombstones += len(batch.entries)
            self.newest_tombstone = max(self.newest_tombstone, int(batch.entries["as_of"].max(initial=0)))


class Segments:
    """All segments of one directory, by number."""

    def __init__(self, disk: Disk, directory: Path, segment_bytes: int, found: list[Segment], *, last_number: int = 0) -> None:
        """`last_number` is the highest known number that was ever used."""
        self.table = {segment.id: segment for segment in sorted(found, key=lambda segment: segment.id)}
        self.direct = False  # whether to open descriptors for direct transfers
        self.last_number = max(last_number, max(self.table, default=0))
        self._disk, self._directory, self._segment_bytes = disk, directory, segment_bytes
        self._most_open = disk.most_open() // _FDS_OF_SEGMENT
        self._open: dict[int, Segment] = {}  # least recently used first

    def free(self) -> list[Segment]:
        return [segment for segment in self.table.values() if segment.state is State.FREE]

    def sealed(self) -> list[Segment]:
        return [segment for segment in self.table.values() if segment.state is State.SEALED]

    def sound(self, segment: Segment) -> bool:
        """Whether a file has its full length; an excess is truncated, to stay within the budget. Raises OSError."""
        path = path_of(self._directory, segment.id)
        size = self._disk.file_size(path)
        if size is not None and size > self._segment_bytes:
            self.open(segment)
            self._disk.allocate(segment.fd, self._segment_bytes)
        return self._disk.file_size(path) == self._segment_bytes

    def restore_length(self, segment: Segment) -> None:
        """Restores the full length of a truncated file, if the disk has space for that."""
        with suppress(OSError):
            self.open(segment)
            self._disk.allocate(segment.fd, self._segment_bytes)
            self._disk.sync(segment.fd)

    def others(self, segment: Segment) -> list[Segment]:
        """All other segments that still have their bytes, including free ones."""
        return [other for other in self.table.values() if other is not segment]

    def oldest_elsewhere(self, segment: Segment) -> int:
        """The first seq of any other segment."""
        return min((other.first_seq for other in self.others(segment)), default=NOTHING_YET)

    def create(self, first_seq: int) -> Segment:
        """A new file, fully allocated. Raises OSError, and leaves nothing; a file that cannot be removed is free, or is
        replaced by the next one.
        """
        segment = Segment(id=self._take_number(), first_seq=first_seq, end=0, state=State.ACTIVE)
        path = path_of(self._directory, segment.id)
        fresh = path.with_name(NEW_NAME)  # until it has its full length: a shorter segment counts as truncated
        if self._disk.file_size(fresh) is not None:
            self._disk.unlink(fresh)
        fd = self._disk.create(fresh)
        try:
            self._disk.allocate(fd, self._segment_bytes)
            self._disk.sync(fd)
            self._disk.rename(fresh, path)
            fresh = path
            self._disk.sync_directory(self._directory)
        except OSError:
            self._disk.close(fd)
            try:
                self._disk.unlink(fresh)
            except OSError:
                if fresh == path:
                    self.table[segment.id] = Segment(id=segment.id, first_seq=NOTHING_YET, end=0, state=State.FREE)
            raise
        segment.fd = fd
        self._open[segment.id] = self.table[segment.id] = segment
        return segment

    def reuse(self, segment: Segment, first_seq: int) -> Segment:
        """Reuses the file of a free segment for a new one. Its name is safe on disk before anything is written.

        Raises OSError. If the file was removed, the segment is dropped: the next attempt takes another.
        """
        assert segment.state is State.FREE and not segment.pins, f"segment {segment.id}: {segment.state} {segment.pins=}"
        self.close(segment)
        fresh = Segment(id=self._take_number(), first_seq=first_seq, end=0, state=State.ACTIVE)
        try:
            fd = self._disk.open(path_of(self._directory, segment.id))
        except FileNotFoundError:
            del self.table[segment.id]
            raise
        try:
            self._disk.allocate(fd, self._segment_bytes)  # it may come from a crash, or from a damaged directory
        finally:
            self._disk.close(fd)
        self._disk.rename(path_of(self._directory, segment.id), path_of(self._directory, fresh.id))
        del self.table[segment.id]
        self.table[fresh.id] = fresh
        try:
            self._disk.sync_directory(self._directory)
        except OSError:  # after a crash the old segment may be back: its age is unchanged, and it is free
            fresh.state, fresh.stale = State.FREE, segment.stale  # its tombstones are elsewhere
            fresh.first_seq, fresh.last_seq = segment.first_seq, segment.last_seq
            raise
        return fresh

    def unlink(self, segment: Segment) -> None:
        """Removes the file of a free segment. Raises OSError."""
        assert segment.state is State.FREE and not segment.pins, f"segment {segment.id}: {segment.state} {segment.pins=}"
        self.close(segment)
        with suppress(FileNotFoundError):  # it was removed already
            self._disk.unlink(path_of(self._directory, segment.id))
        del self.table[segment.id]
        self._disk.sync_directory(self._directory)

    def hold(self, number: int) -> Segment:
        """Returns a segment that will not be overwritten until it is released."""
        segment = self.table[number]
        segment.pins += 1
        return segment

    def release(self, segment: Segment) -> None:
        assert segment.pins > segment.readers, f"segment {segment.id} is not held: {segment.pins=} {segment.readers=}"
        segment.pins -= 1

    def pin(self, number: int) -> Segment:
        """Holds a segment and opens its descriptors, which stay open until unpinned. Raises OSError, and holds nothing then."""
        segment = self.table[number]
        self.open(segment)
        segment.pins += 1
        segment.readers += 1
        return segment

    def unpin(self, segment: Segment) -> None:
        assert segment.pins >= segment.readers > 0, f"segment {segment.id} is not pinned"
        segment.pins -= 1
        segment.readers -= 1
        self._close_idle()

    def open(self, segment: Segment) -> None:
        """Opens its descriptors if necessary; they may be closed again as soon as the lock is released, unless pinned."""
        if segment.fd < 0:
            path = path_of(self._directory, segment.id)
            segment.fd = self._disk.open(path)
        if segment.direct_fd < 0 and self.direct:
            segment.direct_fd = self._try_direct(segment)
        self._open.pop(segment.id, None)
        self._open[segment.id] = segment
        self._close_idle(but=segment)

    def close(self, segment: Segment) -> None:
        self._open.pop(segment.id, None)
        for fd in (segment.fd, segment.direct_fd):
            if fd >= 0:
                self._disk.close(fd)
        segment.fd = segment.direct_fd = -1

    def close_all(self) -> None:
        for segment in list(self._open.values()):
            self.close(segment)

    def _close_idle(self, but: Segment | None = None) -> None:
        """Closes those used longest ago, until the number of open ones is within the limit."""
        while len(self._open) > self._most_open:
            idle = (s for s in self._open.values() if not s.readers and s.state is not State.ACTIVE and s is not but)
            if (segment := next(idle, None)) is None:
                return
            self.close(segment)

    def _take_number(self) -> int:
        """Uses up a number, even if creating the file fails: a number must never mean two files."""
        self.last_number += 1
        return self.last_number

    def _try_direct(self, segment: Segment) -> int:
        try:
            return self._disk.open(path_of(self._directory, segment.id), direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            return -1


# ---- how many -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    total_bytes: int
    segment_bytes: int
    fixed_bytes: int = FIXED_BYTES

    @property
    def max_value_bytes(self) -> int:
        """Half a segment: next to the values relocated into a fresh segment, at most the other half, a value always fits."""
        return self.segment_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES - 2 * BLOCK_BYTES  # its header, and a revocation

    @property
    def relocate_bytes(self) -> int:
        """The most that reclaim copies to free one segment."""
        return self.segment_bytes // 2

    def segments(self, snapshot_bytes: int) -> int:
        """How many segments may exist in addition to a snapshot of this size and its successor."""
        snapshot = self.slot(snapshot_bytes + snapshot_bytes // 8 + _SPARE_BYTES)
        return (self.total_bytes - self.fixed_bytes - 2 * snapshot) // self._each

    def left_with(self, num_segments: int, *snapshots: int) -> int:
        """The rest of the budget after this number of segments and snapshots of these sizes; negative if they do not fit."""
        files = num_segments * self._each + sum(map(self.slot, snapshots))
        return self.total_bytes - self.fixed_bytes - files

    @property
    def most_segments(self) -> int:
        """An upper limit of the number of segments."""
        return max(MIN_SEGMENTS, self.total_bytes // self.segment_bytes)

    @property
    def _each(self) -> int:
        return self.slot(self.segment_bytes) + _LISTED_BYTES

    @staticmethod
    def slot(size: int) -> int:
        """The most that a file of this size may take up, with the file system's own metadata."""
        return up_to_block(size) + max(2 * BLOCK_BYTES, up_to_block(size // 1024))


def choose_budget(budget_bytes: int, segment_bytes: int | None, *, superblock_bytes: int = 0) -> Budget:
    """A valid budget, given the size of store.json. Raises ConfigError with the smallest one that would be valid."""
    if segment_bytes is None:
        segment_bytes = max(MIN_SEGMENT_BYTES, min(DEFAULT_SEGMENT_BYTES, budget_bytes // 16 // BLOCK_BYTES * BLOCK_BYTES))
    if segment_bytes % BLOCK_BYTES or not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
        bounds = f"from {format_bytes(MIN_SEGMENT_BYTES)} to {format_bytes(MAX_SEGMENT_BYTES)}"
        raise ConfigError(f"a segment has a multiple of {BLOCK_BYTES} bytes, {bounds}; got {segment_bytes}")
    larger = max(0, up_to_block(superblock_bytes) - _USUAL_SUPERBLOCK_BYTES)
    fixed_bytes = FIXED_BYTES + 2 * larger  # and its successor
    budget = Budget(total_bytes=budget_bytes, segment_bytes=segment_bytes, fixed_bytes=fixed_bytes)
    if budget.segments(0) < MIN_SEGMENTS:
        least = MIN_SEGMENTS * budget._each + fixed_bytes + 2 * budget.slot(_SPARE_BYTES)
        raise ConfigError(
            f"a budget of {format_bytes(budget_bytes)} is too small for segments of {format_bytes(segment_bytes)}; "
            f"give the log store at least {least} bytes ({format_bytes(least)}), or smaller segments"
        )
    return budget
