"""Space for new values: the next segment to write to, reclaimed from old ones when the budget is used up. Only for the writer.

    1. the active segment is full: the spare takes its place, a free segment without readers or a new file
    2. until there is a spare again: reclaim a victim (`victim.py`), copying its live values to the active segment

There is a spare before values use up the active segment, so there is space to copy to. A value that is used again outlives
its segment; a value that is never used again is evicted with it. Tombstones that are still needed are copied too: those in the
oldest segment never are, so it can always be reclaimed, with any number of tombstones.
"""

from __future__ import annotations

import errno
import logging
import os

import numpy as np

from stepwell.base.units import format_bytes
from stepwell.store.log.disk.files import BLOCK_BYTES
from stepwell.store.log.format.batch import ENTRY_BYTES, Batch, TombstoneGroup
from stepwell.store.log.state.columns import Rows
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import MIN_SEGMENTS, Segment, State
from stepwell.store.log.writing.appender import Appender
from stepwell.store.log.writing.relocate import Relocation, Relocator, needed
from stepwell.store.log.writing.upkeep import save_segment_list, tidy_segment_list
from stepwell.store.log.writing.victim import NO_ROWS, Victim, VictimOrder, evict_first

log = logging.getLogger(__name__)

NO_ROOM_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_TRY_AGAIN_AFTER = 16  # segments, after the disk had no space for a new file
_SLICE = 1024  # values evicted at once: readers may come in between
_READERS_WAIT_S = 1.0  # how long a writer waits if every segment is being read


class Reclaim:
    """Keeps a spare segment."""

    def __init__(self, state: LogState, appender: Appender) -> None:
        self._state = state
        self._relocator = Relocator(state, appender)
        self._order = VictimOrder(state.index, state.segments, state.budget.relocate_bytes)
        self._disk_full_at: int | None = None  # the number of segments when the disk had no space for another
        self._patience = 0
        self._read_last: tuple[Segment, list[Batch]] | None = None  # a segment and its tombstones: plans ask repeatedly
        self._promised = 0  # segments that may exist, independent of what is written until the active one is full
        self._credit = MIN_SEGMENTS  # how often a segment may be reclaimed that frees little: in the long run as often as others

    def next_segment(self) -> None:
        """Activates a segment that can hold any value. Raises OSError (ENOSPC if there is no such segment)."""
        state = self._state
        ready = self._activate()
        if not ready and len(state.segments.table) == 1:  # all would be lost with it: the disk is tried once more
            self._patience = 0
            ready = self._activate()
        if not ready:  # after a crash in the middle of reclaiming one, or the disk had no space for a new file
            self._reclaim_one()
            if not self._activate():
                raise _no_space("every segment is being read")
        while len(state.segments.table) > state.max_segments and self._shrink():  # more values need a larger snapshot
            pass
        self._promised = 0
        self.keep_spare()
        self._promised = len(state.segments.table) + self._may_grow()

    def keep_spare(self) -> None:
        """Reclaims segments until there is a spare, if that needs no waiting and there is space to copy to. Raises OSError."""
        while self._relocator.free_bytes and not self._has_spare():
            plan = self._plan()
            if plan is None:
                return
            self._reclaim(*plan)

    def prepare(self) -> None:
        """After opening: frees empty segments, enforces the budget, and activates a segment if there is a spare.

        Within its budget, a log evicts nothing when it is opened. Raises OSError.
        """
        state = self._state
        for segment in state.segments.sealed():
            if not state.index.live_bytes.get(segment.id) and not self._has_needed(segment):
                self._free(segment)
        tidy_segment_list(state)
        while len(state.segments.table) > state.max_segments and self._shrink():
            pass
        if state.budget.left_with(len(state.segments.table), state.snapshot_bytes()) < 0:
            state.drop_snapshot()
        if state.active is None and self._has_spare():
            try:
                self._activate()
            except OSError as error:
                if error.errno not in NO_ROOM_ERRNOS:
                    raise

    def move(self, segment: Segment, rows: Rows) -> bool:
        """Copies some of a segment to the active one. False, and nothing copied, if the active segment had to be replaced first:
        the values may have moved by then. Raises OSError."""
        plan = self._relocator.plan(rows, [])
        if plan.size_bytes > self._relocator.free_bytes:
            self.next_segment()
            return False
        self._relocator.relocate(segment, plan)
        return True

    def evict(self, rows: Rows) -> None:
        """Evicts values, each after its dependents, without a trace on disk: they may come back if their segment is read
        again. Releases the lock now and then."""
        for start in range(0, len(rows), _SLICE):
            with self._state.changing():
                self._evict_some(rows[start : start + _SLICE])

    def keep_quota(self, tenant: str, quota_bytes: int) -> None:
        """Evicts the first values of a tenant, in the order of eviction, until it is within this quota. Releases the lock now
        and then."""
        state = self._state
        while state.index.tenant_bytes(tenant) > quota_bytes:
            with state.changing():
                rows = evict_first(state.index, tenant, state.index.tenant_bytes(tenant) - quota_bytes, most=_SLICE)
                self._evict_some(rows)

    def _evict_some(self, rows: Rows) -> None:
        state, columns = self._state, self._state.index.columns
        for number in np.unique(columns.segment[rows]).tolist():
            state.stale.add(state.segments.table[number], state.index, rows[columns.segment[rows] == number])
        state.counters.add("dropped_values", len(rows))
        state.counters.add("dropped_bytes", int(columns.length[rows].sum()))
        state.index.remove(rows)

    # ---- the segment to write to ------------------------------------------------------------------

    def _has_spare(self) -> bool:
        return self._may_grow() or bool(self._idle())

    def _may_grow(self) -> bool:
        """Whether the budget, and as far as known the disk, have space for another file."""
        budget, number, most = self._state.budget, len(self._state.segments.table), self._state.max_segments
        if number < self._promised and budget.left_with(self._promised) >= 0:
            most = max(most, self._promised)
        return number < (most if self._disk_full_at is None else min(most, self._disk_full_at))

    def _idle(self) -> list[Segment]:
        return [segment for segment in self._state.segments.free() if not segment.pins]

    def _activate(self) -> bool:
        """Activates a free segment without readers, else a new file; False if there is neither. Seals the previous one.

        A disk that was full is tried again now and then, while there still is a free segment.
        """
        state, before = self._state, self._state.active
        if state.segments.table and self._has_spare():
            save_segment_list(state)
        with state.lock:
            self._patience -= 1
            idle, again = self._idle(), self._disk_full_at is not None and self._patience <= 0
            fresh = None
            if (again and len(state.segments.table) < state.max_segments) or (not idle and self._may_grow()):
                fresh = self._create()
            if fresh is None and idle:
                self._drop_records(idle[0])
                fresh = state.segments.reuse(idle[0], state.next_seq)
            if fresh is None:
                return False
            if before is not None:
                before.state = State.SEALED
            state.active = fresh
        save_segment_list(state)  # from now on a check notices if it is missing
        return True

    def _create(self) -> Segment | None:
        """A new file, if it fits with all others and the next snapshot; None if the disk has no space for it."""
        state = self._state
        number, old = len(state.segments.table), state.snapshot_bytes()
        if old and state.budget.left_with(number + 1, old, state.next_snapshot_bytes) < 0:
            state.drop_snapshot()
        try:
            fresh = state.segments.create(state.next_seq)
        except OSError as error:
            if error.errno not in NO_ROOM_ERRNOS:
                raise
            state.counters.add("disk_full")
            if not state.disk_full:
                taken, whole = (format_bytes(each) for each in (number * state.budget.segment_bytes, state.budget.total_bytes))
                log.warning(
                    "the disk of %s is full: the log goes on with %s of its budget of %s; free space, or set a smaller budget",
                    state.directory, taken, whole,
                )  # fmt: skip
            state.disk_full = True
            if not number:
                raise
            self._disk_full_at, self._patience = number, _TRY_AGAIN_AFTER
            return None
        if state.disk_full:
            log.info("the disk of %s has space again", state.directory)
        state.disk_full, self._disk_full_at = False, None
        return fresh

    def _shrink(self) -> bool:
        """One step towards a smaller directory: a file less, or a fresh segment to copy into. False if readers prevent it."""
        state = self._state
        if not self._idle():
            self._reclaim_one()
        idle = self._idle()
        if not idle:
            return False
        if self._relocator.free_bytes < state.budget.relocate_bytes and len(state.segments.sealed()) > 1:
            return self._activate()
        save_segment_list(state)
        with state.lock:
            self._drop_records(idle[0])
            state.segments.unlink(idle[0])
        return True

    def _drop_records(self, segment: Segment) -> None:
        """Drops all records that refer to the bytes of a segment, before it is overwritten or removed."""
        self._state.stale.drop_segment(segment.id)

    # ---- reclaiming one ---------------------------------------------------------------------------

    def _reclaim_one(self) -> None:
        """Frees one segment, relocating its valid content. Raises OSError (ENOSPC if readers prevent it, or there is none)."""
        state = self._state
        if not state.segments.sealed() and state.active is not None:  # the only one there is
            state.active.state, state.active = State.SEALED, None
        self._wait_for_readers()
        plan = self._plan()
        if plan is None:
            raise _no_space("every segment that could be reclaimed is being read")
        self._reclaim(*plan)

    def _reclaim(self, victim: Victim, plan: Relocation) -> None:
        state = self._state
        segment, most = state.segments.table[victim.segment], len(state.segments.table)
        self._credit = self._credit - 1 if plan.size_bytes > state.budget.relocate_bytes else min(self._credit + 1, most)
        self.evict(victim.drop)
        self._relocator.relocate(segment, plan)
        self._free(segment)
        self._read_last = None
        with state.lock:  # for readers that found something in it before; no new ones will
            state.lock.wait_for(lambda: not segment.pins, _READERS_WAIT_S)

    def _plan(self) -> tuple[Victim, Relocation] | None:
        """The segment to reclaim, and what to relocate; None if every segment is being read, or has too many tombstones."""
        state, free_bytes = self._state, min(self._state.budget.relocate_bytes, self._relocator.free_bytes)
        barred = set[int]()
        with state.lock:
            self._order.take_notice()
        while True:
            number = self._order.choose(lambda each: None if each.id in barred else self._needs(each, free_bytes), free_bytes)
            if number is None:
                return None
            segment = state.segments.table[number]
            tombstones, for_values = self._needed(segment), free_bytes - self._tombstone_bytes(segment)
            while True:
                victim = self._order.victim(number, for_values, state.budget.segment_bytes)
                plan = self._relocator.plan(victim.keep, tombstones)
                if plan.size_bytes <= free_bytes:
                    return (self._without_loss() if len(victim.drop) else None) or (victim, plan)
                if not len(victim.keep):
                    break
                for_values -= max(plan.size_bytes - free_bytes, BLOCK_BYTES)  # headers take up space, too
            barred.add(number)

    def _without_loss(self) -> tuple[Victim, Relocation] | None:
        """While values fill less than half of the segments, none is evicted for tombstones: the oldest segment, with its content.

        That frees little or nothing by itself, but tombstones in other segments come closer to being the oldest.
        """
        state = self._state
        half_full = 2 * state.index.total_bytes > len(state.segments.table) * state.budget.segment_bytes
        if half_full or self._credit <= 0:
            return None
        with state.lock:
            unread = [segment for segment in state.segments.sealed() if not segment.pins]
        if not unread:
            return None
        oldest = min(unread, key=lambda segment: segment.first_seq)
        victim = Victim(segment=oldest.id, keep=state.index.rows_in(oldest.id), drop=NO_ROWS)
        plan = self._relocator.plan(victim.keep, self._needed(oldest))
        return (victim, plan) if plan.size_bytes <= self._relocator.free_bytes else None

    def _needs(self, segment: Segment, free_bytes: int) -> int | None:
        """Bytes of the tombstones that must outlive a segment; None if those do not fit, or it is being read."""
        size = self._tombstone_bytes(segment)
        return size if not segment.pins and size <= free_bytes else None

    def _tombstone_bytes(self, segment: Segment) -> int:
        """An upper limit of the bytes of tombstones that must be relocated out of a segment."""
        count = segment.tombstones if self._has_needed(segment) else 0
        return count * ENTRY_BYTES + BLOCK_BYTES * (count > 0)

    def _has_needed(self, segment: Segment) -> bool:
        """Whether a segment may have tombstones that must outlive it. Reads nothing."""
        return bool(segment.tombstones) and segment.newest_tombstone > self._state.segments.oldest_elsewhere(segment)

    def _needed(self, segment: Segment) -> list[TombstoneGroup]:
        """The tombstones of a segment that must outlive it, read from it."""
        state = self._state
        if not self._has_needed(segment):
            return []
        if self._read_last is None or self._read_last[0] is not segment:
            self._read_last = (segment, self._relocator.tombstones_in(segment))
        return needed(self._read_last[1], state.segments.others(segment))

    def _wait_for_readers(self) -> None:
        """Waits until one of the full segments has no readers, or until the time limit."""
        state = self._state
        with state.lock:
            state.lock.wait_for(
                lambda: not state.segments.sealed() or any(not each.pins for each in state.segments.sealed()), _READERS_WAIT_S
            )

    def _free(self, segment: Segment) -> None:
        with self._state.changing():
            self._state.index.drop_segment(segment.id)
            segment.state = State.FREE
        self._order.drop_segment(segment.id)


def _no_space(why: str) -> OSError:
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {why}")
