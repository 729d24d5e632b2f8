"""When the index is saved, and how: within the budget, and never at the price of the log. Only for the writer."""

from __future__ import annotations

from stepwell.store.log import snapshot
from stepwell.store.log.disk import replace_file
from stepwell.store.log.segments import NOTHING_YET
from stepwell.store.log.snapshot import Extent
from stepwell.store.log.state import LogState

# What a crash may leave to be read again: about two seconds' worth of headers. A snapshot costs in proportion to all
# values, so the more there are, the more have to come in between.
_MOST_BATCHES = 20_000
_MOST_VALUES = 100_000
_PART_OF_ALL = 4


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
        extents = [
            Extent(id=s.id, first_seq=s.first_seq, end=s.end, ghosts=s.ghosts, marks=s.marks, newest_mark=s.newest_mark)
            for s in table.values()
        ]
        pieces = snapshot.encode(
            state.index, state.revoked, extents, active=last, next_seq=state.next_seq,
            settled=state.settled,
        )  # fmt: skip
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
