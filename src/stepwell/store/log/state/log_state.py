"""What the parts of one open log share. Holds state; decides nothing.

`lock` guards everything here. Bytes are moved without it: by the one writer whose turn it is (`store.GroupCommit`), and by
readers whose segments are pinned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition

from stepwell.base.errors import StoreError
from stepwell.base.meters import Counters
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.disk.locking import DirectoryLock
from stepwell.store.log.format import snapshot
from stepwell.store.log.format.segment_list import SegmentList
from stepwell.store.log.state.index import Index
from stepwell.store.log.state.segments import MIN_SEGMENTS, Budget, Segment, Segments
from stepwell.store.log.state.stale import StaleValues


@dataclass(frozen=True, slots=True, kw_only=True)
class IoMode:
    """How bytes move on this disk, and the measured speeds; 0 if not measured."""

    direct_writes: bool = False
    direct_reads: bool = False
    write_bytes_per_s: int = 0
    read_bytes_per_s: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LogState:
    disk: Disk
    directory: Path
    budget: Budget
    seed: int
    quotas: Mapping[str, int]
    index: Index
    revoked: list[range]  # numbers of batches that must not be trusted
    segments: Segments
    next_seq: int  # of the next batch
    settled: int  # batches up to here are safe on disk; those between it and the next one failed, and must be revoked
    active: Segment | None = None
    disk_full: bool = False  # the last attempt to create a segment found no space on the disk
    segment_list: SegmentList = field(default_factory=SegmentList)  # the list of segments in the directory
    stale: StaleValues = field(default_factory=StaleValues)
    io_mode: IoMode = field(default_factory=IoMode)
    counters: Counters = field(default_factory=Counters)
    directory_lock: DirectoryLock | None = None  # None: open for reading only, or closed
    torn: bool = False  # a change of the index was interrupted half-way
    closed: bool = False
    process: int = field(default_factory=os.getpid)  # the only one that may use it: a fork has the same descriptors
    lock: Condition = field(default_factory=Condition)  # notified when a pin is released

    def must_be_open(self) -> None:
        """Raises StoreError once the log is closed, and in a fork of the process that opened it. Takes no lock."""
        if os.getpid() != self.process:
            raise StoreError(
                f"the log store in {self.directory} belongs to process {self.process}; this is a fork of it; "
                "open it after the fork, in one of the two"
            )
        if self.closed:
            raise StoreError(f"the log store in {self.directory} is closed")
        if self.torn:
            raise StoreError(
                f"a change of the index of {self.directory} was interrupted half-way; close the store and open it again: "
                "what was acknowledged is safe on disk"
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The lock, around a change of values or segments. After an interruption, the state in memory is no longer used."""
        with self.lock:
            try:
                yield
            except BaseException:
                self.torn = True
                raise

    def must_be_ours(self) -> None:
        """Raises StoreError if the directory was removed or replaced: what is written to its files would be lost."""
        if self.directory_lock is not None and not self.directory_lock.is_ours():
            raise StoreError(
                f"{self.directory} was removed or replaced while the log store in it was open; nothing more is stored: "
                "restore it, or close the store and open it again"
            )

    def unlock(self) -> None:
        """Unlocks the directory. A second call does nothing."""
        lock, self.directory_lock = self.directory_lock, None
        if lock is not None:
            lock.close()

    @property
    def max_segments(self) -> int:
        """Never below the minimum that the log needs: if snapshots do not fit in addition, none are written."""
        return max(MIN_SEGMENTS, self.budget.segments(self.next_snapshot_bytes))

    @property
    def next_snapshot_bytes(self) -> int:
        """The most that a snapshot made now would take up."""
        return snapshot.size_bytes(
            values=self.index.num_values,
            revoked=len(self.revoked),
            spaces=self.index.num_spaces,
            segments=len(self.segments.table),
        )

    def snapshot_bytes(self) -> int:
        """The size of the snapshot in the directory; 0 if there is none. Raises OSError."""
        return self.disk.file_size(self.directory / snapshot.NAME) or 0

    def drop_snapshot(self) -> None:
        """Removes the snapshot. The next opening reads the whole log instead, and does not know the last uses. Raises OSError."""
        self.disk.unlink(self.directory / snapshot.NAME)
        self.counters.add("snapshots_dropped")
