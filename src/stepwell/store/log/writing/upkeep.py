"""What the one writer does after its turns: saves the index and the list of segments, and measures the fastest way to move bytes.

**Saving** stays within the budget and never takes space that the log needs.

**The probe** measures once after every opening whether this disk is faster with the page cache or with direct I/O: a few MiB, a
fifth of a second at most. It writes into the unused end of the active segment, where nothing is trusted, and never grows a file;
if that has too little space, it waits for the next segment. Until then, and if segments are too small to measure, bytes go
through the page cache, and no speed is reported.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from stepwell.base.errors import ConfigError
from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes
from stepwell.store.log.disk.files import BLOCK_BYTES, Disk, Scratch, replace_file
from stepwell.store.log.format import segment_list, snapshot, superblock
from stepwell.store.log.format.segment_list import NOTHING_YET, SegmentInfo, SegmentList
from stepwell.store.log.format.snapshot import Snapshot
from stepwell.store.log.state.log_state import IoMode, LogState
from stepwell.store.log.state.segments import Segment, State

log = logging.getLogger(__name__)

# What may have to be read again after a crash: about two seconds' worth of headers. A snapshot costs in proportion to all
# values, so with more values, more writes have to come in between.
_MOST_BATCHES = 20_000
_MOST_VALUES = 100_000
_PART_OF_ALL = 4
_PART_OF_SEGMENT = 4  # the most that the list of segments may cost, compared with what was written to a segment

# How much the probe moves, how often and for how long.
_MOST_BYTES, _LEAST_BYTES = 8 << 20, 1 << 20
_ROUNDS = 3  # the best counts
_AT_MOST_S = 0.1  # of writing, and of reading
_READERS = 4  # the number of reads at once for a request: the page cache can be faster for one and half as fast for four
_CLEARLY = 1.3  # how many times faster the page cache must be: direct I/O takes a fifth of the CPU and no memory


def due(state: LogState, *, batches: int, values: int) -> bool:
    many = max(_MOST_BATCHES, state.index.num_values // _PART_OF_ALL)
    return batches >= many or values >= max(_MOST_VALUES, state.index.num_values // _PART_OF_ALL)


def save_snapshot(state: LogState) -> bool:
    """Replaces the snapshot; False, and counted, if the disk or the budget has no space for a new one."""
    with state.lock:
        table = state.segments.table
        last = state.active.id if state.active is not None else max(table, default=0)  # a failed creation may have left others
        oldest = min((segment.first_seq for segment in table.values()), default=0)
        if all(segment.first_seq < NOTHING_YET for segment in table.values()):  # else the age of what is stored is unknown
            state.revoked = [numbers for numbers in state.revoked if numbers.stop > oldest]
        segments = [_info(segment) for segment in table.values()]
        state.index.settle_uses()
    spaces, columns = state.index.dump()
    fresh = Snapshot(
        segment=last, offset=table[last].end if last in table else 0, next_seq=state.next_seq, settled=state.settled,
        tick=state.index.tick, spaces=spaces, segments=segments, revoked=state.revoked, columns=columns,
    )  # fmt: skip  # fmt: skip  # the tick comes after the columns: nothing was used later than that
    pieces = snapshot.encode(fresh)
    snapshot.sign(pieces, seed=state.seed)
    size = sum(map(len, pieces))
    try:
        old = state.snapshot_bytes()
        if state.budget.left_with(len(table), size) < 0:
            state.counters.add("snapshots_skipped")
            return False
        if old and state.budget.left_with(len(table), old, size) < 0:
            state.drop_snapshot()  # both do not fit: a crash in between costs one long reading of the log
        replace_file(state.disk, state.directory / snapshot.NAME, pieces)
    except OSError:
        state.counters.add("snapshots_failed")
        return False
    state.counters.add("snapshots")
    return True


def _info(segment: Segment) -> SegmentInfo:
    return SegmentInfo(
        id=segment.id, first_seq=segment.first_seq, end=segment.end, last_seq=segment.last_seq, stale=segment.stale,
        tombstones=segment.tombstones, newest_tombstone=segment.newest_tombstone,
    )  # fmt: skip


def save_segment_list(state: LogState) -> None:
    """Lists all segments that are not free. Called before one is overwritten or removed, and when one is full.

    If that fails, there is no list. Raises OSError if an old list names segments that are free now, and cannot be removed.
    """
    listed = [segment for segment in state.segments.table.values() if segment.state is not State.FREE]
    fresh = SegmentList(
        generation=state.segment_list.generation + 1,
        last_number=state.segments.last_number,
        segments=tuple(map(_info, listed)),
    )
    slot_size = segment_list.slot_bytes(state.budget.most_segments)
    try:
        if fresh.size_bytes <= min(slot_size, state.budget.segment_bytes // _PART_OF_SEGMENT):
            segment_list.write(state.disk, state.directory, fresh, seed=state.seed, slot_size=slot_size)
            state.segment_list = fresh
            return
    except OSError:
        state.counters.add("sealed_failed")
    if not {info.id for info in state.segment_list.segments} <= {segment.id for segment in listed}:
        if state.disk.file_size(state.directory / segment_list.NAME) is not None:
            state.disk.unlink(state.directory / segment_list.NAME)
            state.disk.sync_directory(state.directory)
        state.segment_list = SegmentList(generation=fresh.generation)


def tidy_segment_list(state: LogState) -> None:
    """After opening: replaces a list that cannot be used, or exceeds its size limit. Raises OSError."""
    size = state.disk.file_size(state.directory / segment_list.NAME)
    if size is not None and (size != 2 * segment_list.slot_bytes(state.budget.most_segments) or not state.segment_list.usable):
        state.disk.unlink(state.directory / segment_list.NAME)
        save_segment_list(state)


# ---- the probe ----------------------------------------------------------------------------------


class Direct(Enum):
    """Whether bytes bypass the page cache."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Probe:
    """Measures both ways, as far as the options allow, and selects the faster one. Only for the one writer."""

    def __init__(self, state: LogState, direct: Direct, clock: Clock) -> None:
        """Raises ConfigError if direct=on is not possible."""
        self._state, self._clock, self._always = state, clock, direct is Direct.ON
        self._size = min(_MOST_BYTES, state.budget.segment_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES)
        self._waiting = self._size >= _LEAST_BYTES
        if self._always:
            _must_have_direct(state)
        state.segments.direct = direct is not Direct.OFF
        state.io_mode = IoMode(direct_writes=self._always, direct_reads=self._always)
        self.run()

    def run(self) -> None:
        """Runs the probe if it has not run yet and there is space."""
        state, active = self._state, self._state.active
        offset = state.budget.segment_bytes - self._size
        if not self._waiting or active is None or active.state is not State.ACTIVE or active.end > offset:
            return
        self._waiting = False
        try:
            with state.lock:
                state.segments.open(active)
            state.io_mode = mode = _try(state.disk, active, offset, self._size, self._always, self._clock)
            log.info("%s: reads %s, writes %s", state.directory, *_said(mode))
        except OSError:  # everything stays as it is, unmeasured
            state.counters.add("failed_probes")


def _said(mode: IoMode) -> tuple[str, str]:
    ways = (mode.direct_reads, mode.read_bytes_per_s), (mode.direct_writes, mode.write_bytes_per_s)
    read, write = (f"{'past' if past else 'through'} the page cache at {format_bytes(rate)}/s" for past, rate in ways)
    return read, write


def _must_have_direct(state: LogState) -> None:
    try:
        state.disk.close(state.disk.open(state.directory / superblock.NAME, writable=False, direct=True))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ConfigError(f"the file system of {state.directory} has no direct I/O; use direct=auto or direct=off") from error


def _try(disk: Disk, segment: Segment, offset: int, size: int, always: bool, clock: Clock) -> IoMode:
    buffer = Scratch().take(size)
    buffer[:] = b"\xa5" * size  # not zeros: some disks store those for free
    by_cache, by_direct = segment.fd, segment.direct_fd

    def write(fd: int) -> None:
        disk.write(fd, [buffer], offset)
        disk.sync(segment.fd)

    def read(fd: int) -> None:
        disk.drop_cached(segment.fd, offset, size)
        list(pool.map(lambda at: disk.read(fd, [buffer[at : at + piece]], offset + at), range(0, size, piece)))

    piece = -(-size // _READERS // BLOCK_BYTES) * BLOCK_BYTES
    best_s: dict[tuple[Callable[[int], None], int], float] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for work in (write, read):
            started_s = clock.now()
            for _ in range(_ROUNDS):
                for fd in (by_direct,) if always else (by_cache, by_direct):
                    if fd >= 0:
                        begun_s = clock.now()
                        work(fd)
                        took_s = clock.now() - begun_s
                        best_s[work, fd] = min(took_s, best_s.get((work, fd), took_s))
                if clock.now() - started_s > _AT_MOST_S / _ROUNDS:
                    break

    def choice(work: Callable[[int], None]) -> tuple[bool, int]:
        took = {fd == by_direct: took_s for (tried, fd), took_s in best_s.items() if tried is work}
        direct = True in took and (False not in took or took[True] <= _CLEARLY * took[False])
        return direct, int(size / took[direct]) if took[direct] > 0 else 0

    (direct_writes, write_rate), (direct_reads, read_rate) = choice(write), choice(read)
    return IoMode(
        direct_writes=direct_writes, direct_reads=direct_reads, write_bytes_per_s=write_rate, read_bytes_per_s=read_rate
    )  # fmt: skip
