"""Appends batches to the active segment: written in the fewest calls possible, synced. Only for the one writer.

A value's bytes go from the caller's buffer to the disk. With direct transfers, the last partial block goes through a block of
ours; a caller's buffer that does not begin at a multiple of a block goes through the page cache instead. A failed append leaves
the end of the log where it was: the next one overwrites it, and revokes it first.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from stepwell.base.errors import StoreError
from stepwell.store.log.disk.files import BLOCK_BYTES, Scratch, is_aligned, up_to_block
from stepwell.store.log.format.batch import (
    HOLDS_FROM_NOW,
    INLINE_BYTES,
    NO_SPACE,
    Batch,
    BatchKind,
    PackedBatch,
    pack_tombstones,
    revoked_by,
    revoking,
    write_header,
)
from stepwell.store.log.format.segment_list import name_of
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import Segment, State


class Appender:
    """Writes batches at the end of the active segment. Not for two threads at once."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._scratch = Scratch()
        self._moved_on = False  # a segment was replaced by a new one since the last successful append

    @property
    def free_bytes(self) -> int:
        """Bytes left in the active segment, less the revocation that comes first; 0 if nothing can be appended there."""
        state, active = self._state, self._state.active
        if active is None or active.state is not State.ACTIVE:
            return 0
        return max(0, state.budget.segment_bytes - active.end - (BLOCK_BYTES if self.to_revoke else 0))

    @property
    def to_revoke(self) -> range:
        """Batches that failed, or were found torn: nothing else is settled before they are revoked."""
        return range(self._state.settled + 1, self._state.next_seq)

    def append(self, packed: Sequence[PackedBatch]) -> list[Batch]:
        """Writes the batches; returns them as they now are, safe on disk.

        Otherwise raises OSError, or StoreError if the directory or the file is gone, and none of them will ever be trusted.
        """
        state, active = self._state, self._state.active
        assert active is not None and sum(one.total_bytes for one in packed) <= self.free_bytes, f"not enough: {self.free_bytes=}"
        revocation = self._revocation()
        packed = [*revocation, *packed]
        batches = self._place(active, packed)
        try:
            self._write(active, packed, batches)
            self._must_last(active)
        except (OSError, StoreError):
            if not self._moved_on:  # the next attempt goes elsewhere, once: a disk that always fails must not cost all segments
                active.state = State.SEALED
                self._moved_on = True
            raise
        finally:
            self._scratch.release()
        self._moved_on = False
        with state.changing():
            state.settled = batches[-1].seq
            for batch in batches:
                active.note(batch)
                state.revoked += revoked_by(batch)
            state.counters.add("syncs")
        return batches[len(revocation) :]

    def _revocation(self) -> list[PackedBatch]:
        numbers = self.to_revoke
        one = pack_tombstones(BatchKind.REVOKE, NO_SPACE, [revoking(numbers)], BLOCK_BYTES) if numbers else None
        return [one] if one is not None else []

    def _place(self, segment: Segment, packed: Sequence[PackedBatch]) -> list[Batch]:
        """Assigns each batch its place and number. Numbers are used up even if the write fails."""
        state, batches, offset = self._state, [], segment.end
        for one in packed:
            batch = Batch(
                kind=one.kind, segment=segment.id, offset=offset, header_bytes=one.header_bytes,
                total_bytes=one.total_bytes, seq=state.next_seq, settled=state.settled, space=one.space,
                entries=one.entries,
            )  # fmt: skip
            if one.kind is not BatchKind.PUT:  # a tombstone that is not relocated takes effect now
                entries = one.entries.copy()
                entries["as_of"][entries["as_of"] == HOLDS_FROM_NOW] = batch.seq
                batch = replace(batch, entries=entries)
            batches.append(batch)
            offset, state.next_seq = batch.end, state.next_seq + 1
        return batches

    def _write(self, segment: Segment, packed: Sequence[PackedBatch], batches: Sequence[Batch]) -> None:
        disk, mode = self._state.disk, self._state.io_mode
        with self._state.lock:
            self._state.segments.open(segment)
        direct = mode.direct_writes and segment.direct_fd >= 0
        buffers: list[memoryview] = []
        for one, batch in zip(packed, batches, strict=True):
            buffers += self._buffers(one, batch)
        if direct:
            try:
                disk.write(segment.direct_fd, buffers, batches[0].offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = False  # a buffer is not aligned to blocks, or this disk requires a larger alignment
                if all(is_aligned(value) for one in packed for value in one.values if len(value) > INLINE_BYTES):
                    self._state.io_mode = replace(mode, direct_writes=False)
        if not direct:
            disk.write(segment.fd, buffers, batches[0].offset)
        disk.sync(segment.fd)

    def _must_last(self, segment: Segment) -> None:
        """Raises StoreError if the file or the directory was removed: nothing in it is acknowledged."""
        self._state.must_be_ours()
        if not self._state.disk.has_name(segment.fd):
            raise StoreError(
                f"{name_of(segment.id)} was removed from {self._state.directory} while it was written; its content is lost"
            )

    def _buffers(self, one: PackedBatch, batch: Batch) -> list[memoryview]:
        """The header with its small values, then each value up to its last whole block, and that block padded with zeros."""
        header = self._scratch.take_zeros(one.header_bytes)
        buffers = [header]
        lengths = batch.entries["length"]
        offsets = batch.entries["offset"].tolist() if one.values else []  # tombstones have entries without values
        if one.values and not (lengths % BLOCK_BYTES).any() and lengths.min() > INLINE_BYTES:
            buffers += one.values  # all of them whole blocks
            offsets = []
        for value, offset in zip(one.values if offsets else (), offsets, strict=True):
            if len(value) <= INLINE_BYTES:
                header[offset : offset + len(value)] = value
                continue
            whole = len(value) // BLOCK_BYTES * BLOCK_BYTES
            if whole == len(value):
                buffers.append(value)
                continue
            tail = self._scratch.take_zeros(BLOCK_BYTES)
            tail[: len(value) - whole] = value[whole:]
            buffers += [value[:whole], tail]
        write_header(batch, header, seed=self._state.seed)
        assert sum(map(len, buffers)) == batch.total_bytes == up_to_block(batch.total_bytes), f"{batch.total_bytes=}"
        return buffers
