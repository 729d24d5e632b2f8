"""Copies live values and needed tombstones of an old segment to the active one; stamps, parents, levels and recency stay.

Only for the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepwell.base.ids import Level
from stepwell.store.api import Space, Write
from stepwell.store.log.disk.files import Scratch, up_to_block
from stepwell.store.log.format.batch import (
    INLINE_BYTES,
    SEQ_END,
    Batch,
    BatchKind,
    Tombstone,
    TombstoneGroup,
    footprint,
    has_tombstones,
    header_size,
    pack_tombstones,
    pack_values,
    split,
)
from stepwell.store.log.format.scan import scan
from stepwell.store.log.format.segment_list import path_of
from stepwell.store.log.state.columns import Rows
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import Segment
from stepwell.store.log.writing.appender import Appender

_BATCH_BYTES = 16 << 20
_BATCH_VALUES = 800  # so that a header full of small values keeps its limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relocation:
    """What has to be copied out of a segment, batch by batch, and its size."""

    values: Sequence[Rows]
    tombstones: Sequence[TombstoneGroup]
    size_bytes: int


class Relocator:
    def __init__(self, state: LogState, appender: Appender) -> None:
        self._state, self._appender = state, appender
        self._scratch = Scratch()

    @property
    def free_bytes(self) -> int:
        return self._appender.free_bytes

    def plan(self, rows: Rows, tombstones: Sequence[TombstoneGroup]) -> Relocation:
        """Plans a relocation; changes nothing."""
        values = list(self._value_batches(rows))
        grouped = list(_tombstone_batches(tombstones))
        lengths = self._state.index.columns.length
        size = sum(header_size(len(group.tombstones), 0) for group in grouped)
        for batch in values:
            small = lengths[batch] <= INLINE_BYTES
            inline = int((-(-lengths[batch][small] // 8) * 8).sum())
            size += header_size(len(batch), inline) + sum(map(up_to_block, lengths[batch][~small].tolist()))
        return Relocation(values=values, tombstones=grouped, size_bytes=size)

    def relocate(self, segment: Segment, plan: Relocation) -> None:
        """Copies what was planned. Returns when the copies are safe on disk and indexed. Raises OSError."""
        state = self._state
        for group in plan.tombstones:
            packed = pack_tombstones(group.kind, group.space, group.tombstones, self.free_bytes)
            assert packed is not None and len(packed.entries) == len(group.tombstones), (
                f"{len(group.tombstones)} tombstones were not relocated"
            )
            self._appender.append([packed])
        try:
            with state.lock:
                state.segments.pin(segment.id)
        except FileNotFoundError:  # it was removed: its values are misses, and it must not block reclaiming forever
            for rows in plan.values:
                self._drop(segment, rows)
            return
        try:
            for rows in plan.values:
                self._relocate_values(segment, rows)
        finally:
            with state.lock:
                state.segments.unpin(segment)

    def tombstones_in(self, segment: Segment) -> list[Batch]:
        """The tombstones of a segment, as they are written there."""
        state = self._state
        try:
            fd = state.disk.open(path_of(state.directory, segment.id), writable=False)
        except FileNotFoundError:  # it was removed with its content
            return []
        size = state.budget.segment_bytes
        try:
            items = scan(state.disk, fd, segment=segment.id, start=0, seed=state.seed, segment_bytes=size)
            return [item for item in items if isinstance(item, Batch) and item.offset < segment.end and has_tombstones(item)]
        finally:
            state.disk.close(fd)

    def _relocate_values(self, segment: Segment, rows: Rows) -> None:
        state, columns = self._state, self._state.index.columns
        writes = self._read(segment, rows)
        packed = pack_values(state.index.space(int(columns.space[rows[0]])), writes, self.free_bytes) if writes else None
        if packed is not None:
            assert len(packed.entries) == len(writes), f"{len(writes) - len(packed.entries)} values were not relocated"
            (batch,) = self._appender.append([packed])
            with state.changing():
                known = state.index.rows_of(batch.space.digest)
                state.stale.add(segment, state.index, np.array(list(map(known.__getitem__, batch.keys())), np.int64))
                state.index.put(batch, used=0)  # they are known, and keep their last use
                state.counters.add("carried_values", len(writes))
                state.counters.add("carried_bytes", sum(len(write.data) for write in writes))
        self._scratch.release()

    def _read(self, segment: Segment, rows: Rows) -> list[Write]:
        """Reads the values back. Values that the disk cannot read any more are dropped."""
        state, columns = self._state, self._state.index.columns
        writes, lost = [], []
        for row in rows.tolist():
            size = int(columns.length[row])
            data = self._scratch.take(size)[:size]
            try:
                whole = state.disk.read(segment.fd, [data], int(columns.offset[row])) == size
            except OSError:
                whole = False
            if not whole:
                lost.append(row)
                continue
            names = (getattr(columns, name)[row].tobytes() for name in ("key", "stamp", "parent"))
            key, stamp, parent = names
            depth, level = int(columns.depth[row]), Level(int(columns.level[row]))
            writes.append(Write(key=key, data=data, stamp=stamp, parent=parent, depth=depth, level=level))
        if lost:
            self._drop(segment, np.array(lost, dtype=np.int64))
        return writes

    def _drop(self, segment: Segment, lost: Rows) -> None:
        state = self._state
        with state.changing():
            state.counters.add("lost_values", len(lost))
            state.stale.add(segment, state.index, lost)  # their headers may still name them
            state.index.remove(lost)

    def _value_batches(self, rows: Rows) -> Iterator[Rows]:
        """Rows of one space each, in the order they lie on disk, few enough for one batch."""
        columns = self._state.index.columns
        rows = rows[np.lexsort((columns.offset[rows], columns.space[rows]))]
        sizes = footprint(columns.length[rows]).tolist()
        start, held = 0, 0
        for at in range(len(rows)):
            other = at > start and columns.space[rows[at]] != columns.space[rows[start]]
            if at > start and (other or held + sizes[at] > _BATCH_BYTES or at - start >= _BATCH_VALUES):
                yield rows[start:at]
                start, held = at, 0
            held += sizes[at]
        if start < len(rows):
            yield rows[start:]


def _tombstone_batches(groups: Sequence[TombstoneGroup]) -> Iterator[TombstoneGroup]:
    """Tombstones of one kind and one space each, few enough for one batch."""
    for group in groups:
        for at in range(0, len(group.tombstones), _BATCH_VALUES):
            yield replace(group, tombstones=group.tombstones[at : at + _BATCH_VALUES])


def needed(batches: Iterable[Batch], others: Sequence[Segment]) -> list[TombstoneGroup]:
    """The tombstones of one segment that must outlive it, given all other segments; one for each key."""
    order = sorted(others, key=lambda segment: segment.first_seq)
    firsts = np.array([segment.first_seq for segment in order], np.int64)
    lasts = np.maximum.accumulate(np.array([-1, *(segment.last_seq for segment in order)], np.int64))
    found: dict[tuple[BatchKind, bytes], tuple[Space, dict[bytes, Tombstone]]] = {}
    for batch in filter(has_tombstones, batches):
        as_of = batch.entries["as_of"].astype(np.int64)
        since = np.minimum(batch.entries["offset"], batch.entries["as_of"]).astype(np.int64)
        # is there a segment that begins before it takes effect and ends after the begin of what it hides?
        wanted = lasts[np.searchsorted(firsts, as_of)] >= since
        if batch.kind is BatchKind.REVOKE:  # a batch that failed is not the last of any segment
            wanted = as_of > firsts.min(initial=SEQ_END)
        _, latest = found.setdefault((batch.kind, batch.space.digest), (batch.space, {}))
        for key, begin, end in zip(
            split(batch.entries["key"][wanted]), since[wanted].tolist(), as_of[wanted].tolist(), strict=True
        ):
            known = latest.get(key, Tombstone(key=key, since=begin, as_of=end))
            latest[key] = Tombstone(key=key, since=min(begin, known.since), as_of=max(end, known.as_of))
    return [
        TombstoneGroup(kind=kind, space=space, tombstones=list(tombstones.values()))
        for (kind, _), (space, tombstones) in found.items()
        if tombstones
    ]
