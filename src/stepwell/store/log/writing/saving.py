"""When the index and the list of segments are saved, and how: within the budget, never at the price of the log.

Only for the writer.
"""

from __future__ import annotations

from stepwell.store.log.disk.files import replace_file
from stepwell.store.log.format import segment_list, snapshot
from stepwell.store.log.format.segment_list import NOTHING_YET, SegmentInfo, SegmentList
from stepwell.store.log.format.snapshot import Snapshot
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import Segment, State

# What a crash may leave to be read again: about two seconds' worth of headers. A snapshot costs in proportion to all
# values, so the more there are, the more have to come in between.
_MOST_BATCHES = 20_000
_MOST_VALUES = 100_000
_PART_OF_ALL = 4
_PART_OF_SEGMENT = 4  # of what was written to a segment, the list of segments may cost at most


def due(state: LogState, *, batches: int, values: int) -> bool:
    many = max(_MOST_BATCHES, state.index.num_values // _PART_OF_ALL)
    return batches >= many or values >= max(_MOST_VALUES, state.index.num_values // _PART_OF_ALL)


def save_snapshot(state: LogState) -> bool:
    """Puts a new snapshot in the place of the old; False, and counted, when the disk or the budget has no room for it."""
    with state.lock:
        table = state.segments.table
        last = state.active.id if state.active is not None else max(table, default=0)  # a failed creation may have left others
        oldest = min((segment.first_seq for segment in table.values()), default=0)
        if all(segment.first_seq < NOTHING_YET for segment in table.values()):  # else nobody knows how old what is there is
            state.revoked = [numbers for numbers in state.revoked if numbers.stop > oldest]
        spaces, columns = state.index.dump()
        fresh = Snapshot(
            segment=last, offset=table[last].end if last in table else 0, next_seq=state.next_seq, settled=state.settled,
            tick=state.index.tick, spaces=spaces, segments=[_info(segment) for segment in table.values()],
            revoked=state.revoked, columns=columns,
        )  # fmt: skip
    pieces = snapshot.encode(fresh)
    snapshot.sign(pieces, seed=state.seed)
    size = sum(map(len, pieces))
    try:
        old = state.snapshot_bytes()
        if state.budget.left_beside(len(table), size) < 0:
            state.counters.add("snapshots_skipped")
            return False
        if old and state.budget.left_beside(len(table), old, size) < 0:
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
    """Lists all segments that are not free. Comes before one is written over or removed, and when one is full.

    Where that cannot be done, there is no list. Raises OSError when an old one names what is free now, and cannot be removed.
    """
    listed = [segment for segment in state.segments.table.values() if segment.state is not State.FREE]
    fresh = SegmentList(
        generation=state.segment_list.generation + 1,
        last_number=state.segments.last_number,
        segments=tuple(map(_info, listed)),
    )
    room = segment_list.slot_bytes(state.budget.most_segments)
    try:
        if fresh.size_bytes <= min(room, state.budget.segment_bytes // _PART_OF_SEGMENT):
            segment_list.write(state.disk, state.directory, fresh, seed=state.seed, room=room)
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
    """After opening: a list that cannot be used, or takes up more than it may, makes way for another. Raises OSError."""
    size = state.disk.file_size(state.directory / segment_list.NAME)
    if size is not None and (size != 2 * segment_list.slot_bytes(state.budget.most_segments) or not state.segment_list.usable):
        state.disk.unlink(state.directory / segment_list.NAME)
        save_segment_list(state)
