"""What the parts of one open log share. Holds; decides nothing.

`lock` guards everything here. Bytes are moved without it: by the one writer whose turn it is (`commit.py`), and by
readers whose segments are pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition

from stepwell.base.errors import StoreError
from stepwell.metrics.counters import Counters
from stepwell.store.log.budget import MIN_SEGMENTS, Budget
from stepwell.store.log.disk import Disk
from stepwell.store.log.index import Index
from stepwell.store.log.marks import Marks
from stepwell.store.log.segments import Segment, Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How bytes move on this disk, and how fast they did when it was tried; 0 for never tried."""

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
    marks: Marks
    segments: Segments
    next_seq: int  # of the next batch
    settled: int  # batches up to here are safe on disk; those after it and before the next one failed, and are to be revoked
    active: Segment | None = None
    ways: Ways = field(default_factory=Ways)
    counters: Counters = field(default_factory=Counters)
    closed: bool = False
    lock: Condition = field(default_factory=Condition)  # notified when a pin is given back

    def must_be_open(self) -> None:
        """Raises StoreError once the log was closed."""
        if self.closed:
            raise StoreError(f"the log store in {self.directory} was closed")

    @property
    def max_segments(self) -> int:
        """Never below what the log can work with: when snapshots do not fit beside that, there are none."""
        return max(MIN_SEGMENTS, self.budget.segments(self.index.num_values))
