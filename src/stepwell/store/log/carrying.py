"""Values and marks of an old segment, copied to the active one as they are: stamps, parents, recency. Only for the writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepwell.store.api import Write
from stepwell.store.log.aligned import Scratch
from stepwell.store.log.appending import Appender
from stepwell.store.log.columns import Rows
from stepwell.store.log.disk import up_to_block
from stepwell.store.log.drafts import draft_marks, draft_values
from stepwell.store.log.format import INLINE_BYTES, Batch, footprint, header_size
from stepwell.store.log.marks import Group, is_marks
from stepwell.store.log.scan import scan
from stepwell.store.log.segments import Segment, path_of
from stepwell.store.log.state import LogState

_BATCH_BYTES = 16 << 20
_BATCH_VALUES = 800  # so that a header full of small values keeps its limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """What has to be carried out of a segment, batch by batch, and how many bytes that takes."""

    values: Sequence[Rows]
    marks: Sequence[Group]
    size_bytes: int


class Carrier:
    def __init__(self, state: LogState, appender: Appender) -> None:
        self._state, self._appender = state, appender
        self._scratch = Scratch()

    @property
    def room(self) -> int:
        return self._appender.room

    def load(self, rows: Rows, marks: Sequence[Group]) -> Load:
        """Plans it; changes nothing."""
        values = list(self._value_batches(rows))
        grouped = list(_mark_batches(marks))
        lengths = self._state.index.columns.length
        size = sum(header_size(len(group.marks), 0) for group in grouped)
        for batch in values:
            small = lengths[batch] <= INLINE_BYTES
            inline = int((-(-lengths[batch][small] // 8) * 8).sum())
            size += header_size(len(batch), inline) + sum(map(up_to_block, lengths[batch][~small].tolist()))
        return Load(values=values, marks=grouped, size_bytes=size)

    def carry(self, segment: Segment, load: Load) -> None:
        """Copies it. Returns when the copies are safe on disk and the index points to them. Raises OSError."""
        state = self._state
        for group in load.marks:
            draft = draft_marks(group.kind, group.space, group.marks, self.room)
            assert draft is not None and len(draft.entries) == len(group.marks), f"{len(group.marks)} marks were not carried"
            self._appender.append([draft])
        try:
            with state.lock:
                state.segments.pin(segment.id)
        except FileNotFoundError:  # somebody removed it: its values are misses, and it is not to stand in the way for ever
            for rows in load.values:
                self._forget(segment, rows)
            return
        try:
            for rows in load.values:
                self._carry_values(segment, rows)
        finally:
            with state.lock:
                state.segments.unpin(segment)

    def marks_in(self, segment: Segment) -> list[Batch]:
        """The marks of a segment, as they are written there."""
        state = self._state
        try:
            fd = state.disk.open(path_of(state.directory, segment.id), writable=False)
        except FileNotFoundError:  # somebody removed it, and all that was in it
            return []
        size = state.budget.segment_bytes
        try:
            items = scan(state.disk, fd, segment=segment.id, start=0, seed=state.seed, segment_bytes=size)
            return [item for item in items if isinstance(item, Batch) and item.offset < segment.end and is_marks(item)]
        finally:
            state.disk.close(fd)

    def _carry_values(self, segment: Segment, rows: Rows) -> None:
        state, columns = self._state, self._state.index.columns
        writes = self._read(segment, rows)
        draft = draft_values(state.index.space(int(columns.space[rows[0]])), writes, self.room) if writes else None
        if draft is not None:
            assert len(draft.entries) == len(writes), f"{len(writes) - len(draft.entries)} values were not carried"
            (batch,) = self._appender.append([draft])
            with state.lock:
                known = state.index.rows_of(batch.space.digest)
                state.ghosts.add(segment, state.index, np.array(list(map(known.__getitem__, batch.keys())), np.int64))
                state.index.put(batch, used=0)  # they are known, and stay as warm as they were
                state.counters.add("carried_values", len(writes))
                state.counters.add("carried_bytes", sum(len(write.data) for write in writes))
        self._scratch.give_back()

    def _read(self, segment: Segment, rows: Rows) -> list[Write]:
        """The values, read back. Those that the disk cannot give any more are forgotten."""
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
            writes.append(Write(key=key, data=data, stamp=stamp, parent=parent, depth=int(columns.depth[row])))
        if lost:
            self._forget(segment, np.array(lost, dtype=np.int64))
        return writes

    def _forget(self, segment: Segment, lost: Rows) -> None:
        state = self._state
        with state.lock:
            state.counters.add("lost_values", len(lost))
            state.ghosts.add(segment, state.index, lost)  # their headers may still tell of them
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


def _mark_batches(groups: Sequence[Group]) -> Iterator[Group]:
    """Marks of one kind and one space each, few enough for one batch."""
    for group in groups:
        for at in range(0, len(group.marks), _BATCH_VALUES):
            yield replace(group, marks=group.marks[at : at + _BATCH_VALUES])
