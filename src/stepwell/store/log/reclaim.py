"""Room for more: the next segment to write to, won back from the old ones when there are no more. Only for the writer.

    1. the active segment is full: the free one takes its place
    2. until there is a free one again (or a new file still fits the budget):
         the full segment with least in it, if at most half of it counts: copy that to the active segment, and it is free
         otherwise: give up the values used longest ago, wherever they are, and look again

A value used again outlives its segment; a value never used again goes with it. Marks that are still needed are carried too.
"""

from __future__ import annotations

import errno

import numpy as np

from stepwell.store.log.appending import Appender
from stepwell.store.log.budget import MIN_SEGMENTS
from stepwell.store.log.carrying import Carrier
from stepwell.store.log.columns import Rows
from stepwell.store.log.segments import Segment, State
from stepwell.store.log.state import LogState

NO_ROOM_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_GIVE_UP_PART = 8  # of a segment: how much is given up before looking again
_TRY_AGAIN_AFTER = 16  # segments, once the disk had no room for a new file


class Reclaim:
    """Keeps a free segment at hand."""

    def __init__(self, state: LogState, appender: Appender) -> None:
        self._state = state
        self._carrier = Carrier(state, appender)
        self._disk_full_at: int | None = None  # as many segments as there were when the disk had no room for another
        self._patience = 0

    def next_segment(self) -> None:
        """Makes a segment with room for any value the active one. Raises OSError (ENOSPC when there is none to be had)."""
        state = self._state
        if not self._at_hand():  # after a crash in the middle of winning one
            self._win_one()
        with state.lock:
            self._seal()
            self._activate()
        while len(state.segments.table) > state.max_segments:  # more values need a larger snapshot
            self._shrink()
        while not self._at_hand():
            self._win_one()

    def prepare(self) -> None:
        """After opening: what is empty is free, the budget holds, and there is a segment to write to if one is at hand.

        Within its budget, a log gives up nothing by being opened. Raises OSError.
        """
        state = self._state
        for segment in state.segments.sealed():
            needed = state.marks.needed(segment.id, state.segments.oldest_elsewhere(segment))
            if not needed and not state.index.live_bytes.get(segment.id):
                self._free(segment)
        while len(state.segments.table) > state.max_segments:
            self._shrink()
        if state.active is None and self._at_hand():
            try:
                with state.lock:
                    self._activate()
            except OSError as error:
                if error.errno not in NO_ROOM_ERRNOS:
                    raise

    def give_up(self, rows: Rows) -> None:
        """Forgets values, without a trace on disk: they may come back if their segment is read anew."""
        state, columns = self._state, self._state.index.columns
        with state.lock:
            for number, count in zip(*np.unique(columns.segment[rows], return_counts=True), strict=True):
                state.segments.table[int(number)].ghosts += int(count)
            state.counters.add("dropped_values", len(rows))
            state.counters.add("dropped_bytes", int(columns.length[rows].sum()))
            state.index.remove(rows)

    # ---- inside -----------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """One step towards a smaller directory: a file less, or a fresh segment to carry into."""
        state = self._state
        if not state.segments.free():
            self._win_one()
        with state.lock:
            if self._carrier.room < state.budget.carry_bytes and len(state.segments.sealed()) > 1:
                self._seal()
                self._activate()
                return
            segment = state.segments.free()[0]
            self._wait_for_readers(segment)
            state.marks.forget(segment.id)
            state.segments.unlink(segment)

    def _seal(self) -> None:
        if self._state.active is not None:
            self._state.active.state = State.SEALED
            self._state.active = None

    def _may_grow(self) -> bool:
        """Whether the budget, and the disk as far as we know, have room for another file."""
        most = self._state.max_segments
        return len(self._state.segments.table) < (most if self._disk_full_at is None else min(most, self._disk_full_at))

    def _at_hand(self) -> bool:
        return self._may_grow() or bool(self._state.segments.free())

    def _activate(self) -> None:
        """A free segment that nobody reads, else a new file, else one that has to be waited for or emptied."""
        state = self._state
        self._patience -= 1
        if self._patience <= 0:
            self._disk_full_at = None
        idle = [segment for segment in state.segments.free() if not segment.pins]
        if not idle and self._may_grow() and self._create():
            return
        segment = (idle or state.segments.free() or [self._emptied()])[0]
        self._wait_for_readers(segment)
        state.marks.forget(segment.id)
        state.active = state.segments.reuse(segment, state.next_seq)

    def _create(self) -> bool:
        state = self._state
        try:
            state.active = state.segments.create(state.next_seq)
        except OSError as error:
            if error.errno not in NO_ROOM_ERRNOS:
                raise
            state.counters.add("disk_full")
            if len(state.segments.table) < MIN_SEGMENTS - 1:
                raise
            self._disk_full_at, self._patience = len(state.segments.table), _TRY_AGAIN_AFTER
        return state.active is not None

    def _emptied(self) -> Segment:
        """The oldest full segment, all of it given up: no mark in the oldest is needed any more."""
        state = self._state
        oldest = min(state.segments.sealed(), key=lambda segment: segment.first_seq)
        assert not state.marks.needed(oldest.id, state.segments.oldest_elsewhere(oldest)), (
            f"segment {oldest.id} is not the oldest"
        )
        self.give_up(state.index.rows_in(oldest.id))
        self._free(oldest)
        return oldest

    def _win_one(self) -> None:
        """Frees one segment, carrying what counts. Raises OSError."""
        state = self._state
        while True:
            victim, most = self._least(), min(state.budget.carry_bytes, self._carrier.room)
            live = state.index.live_bytes.get(victim.id, 0)
            if live <= most:
                marks = state.marks.needed(victim.id, state.segments.oldest_elsewhere(victim))
                load = self._carrier.load(state.index.rows_in(victim.id), marks)
                if load.size_bytes <= most:
                    self._carrier.carry(victim, load)
                    return self._free(victim)
            with state.lock:
                cold = state.index.coldest(state.budget.segment_bytes // _GIVE_UP_PART)
            if not live or not len(cold):  # marks alone are too many, or there is no room to carry anything
                self._emptied()
                return None
            self.give_up(cold)

    def _free(self, segment: Segment) -> None:
        with self._state.lock:
            left = self._state.index.live_bytes.pop(segment.id, 0)
            assert not left, f"segment {segment.id} still holds {left} bytes"
            segment.state = State.FREE

    def _least(self) -> Segment:
        """The full segment with least in it that counts, the older of two."""
        live = self._state.index.live_bytes
        return min(self._state.segments.sealed(), key=lambda segment: (live.get(segment.id, 0), segment.id))

    def _wait_for_readers(self, segment: Segment) -> None:
        """Gives the lock to those who still read a segment; nobody new can find anything in it."""
        while segment.pins:
            self._state.lock.wait()
