"""Repairs what a check found: deletes damaged values, and covers damaged headers with a filler.

Intact values that only a damaged header and the saved index describe are copied elsewhere first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from stepwell.store.log.disk.files import BLOCK_BYTES
from stepwell.store.log.format.batch import ENTRY, NO_SPACE, Batch, BatchKind, footprint, write_header
from stepwell.store.log.format.superblock import Superblock
from stepwell.store.log.recovery.check import HEADER_DAMAGED, Damage
from stepwell.store.log.recovery.recover import recover
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.writing.writer import Writer


def repair(state: LogState, writer: Writer, damage: Sequence[Damage]) -> None:
    """Only for the one writer. Raises StoreError or OSError; what was dropped until then stays dropped."""
    values = [one for one in damage if one.key is not None and one.space is not None and one.reason != HEADER_DAMAGED]
    for digest, same in groupby(sorted(values, key=_digest), key=_digest):
        of_space = list(same)
        assert of_space[0].space is not None, f"a value of no space: {digest!r}"
        writer.erase(of_space[0].space, [one.key for one in of_space if one.key is not None])
    for number in {one.segment for one in damage if one.key is None}:
        _move_values(state, writer, number, [one for one in damage if one.segment == number and one.reason == HEADER_DAMAGED])
    if any(one.key is None for one in damage):
        _hide_again(state, writer)
    writer.settle()
    for one in damage:
        if one.key is None:
            _fill(state, one)


def _hide_again(state: LogState, writer: Writer) -> None:
    """Repeats deletions whose tombstones may be lost: a damaged header may be that of a delete or a clear."""
    budget = state.budget
    block = Superblock(budget_bytes=budget.total_bytes, segment_bytes=budget.segment_bytes, seed=state.seed)
    anew = recover(state.disk, state.directory, block, use_snapshot=False).index
    for space in filter(None, list(anew.spaces)):
        known = state.index.rows_of(space.digest)
        writer.hide(space, [key for key in anew.rows_of(space.digest) if key not in known])


def _move_values(state: LogState, writer: Writer, number: int, values: Sequence[Damage]) -> None:
    """Copies values of a segment elsewhere, a few at a time: with their headers, always less than a segment can hold."""
    offsets, columns = np.array([one.offset for one in values], np.int64), state.index.columns
    at_once = state.budget.relocate_bytes // (2 * BLOCK_BYTES)
    while (segment := state.segments.table.get(number)) is not None:
        rows = state.index.rows_in(number)
        rows = rows[np.isin(columns.offset[rows], offsets)][:at_once]
        if not len(rows):
            return
        sizes = np.cumsum(footprint(columns.length[rows]))
        few = max(1, int(np.searchsorted(sizes, state.budget.relocate_bytes // 3)))
        writer.reclaim.move(segment, rows[:few])


def _digest(one: Damage) -> bytes:
    return one.space.digest if one.space is not None else b""


def _fill(state: LogState, gap: Damage) -> None:
    """Replaces a damaged header with one that describes nothing. A crash leaves the damage, or the filler."""
    segment = state.segments.table.get(gap.segment)
    if segment is None or gap.offset + gap.size_bytes > state.budget.segment_bytes:
        return
    batch = Batch(
        kind=BatchKind.FILLER, segment=gap.segment, offset=gap.offset, header_bytes=BLOCK_BYTES, total_bytes=gap.size_bytes,
        seq=state.next_seq, settled=state.settled, space=NO_SPACE, entries=np.zeros(0, ENTRY),
    )  # fmt: skip
    header = memoryview(bytearray(BLOCK_BYTES))
    write_header(batch, header, seed=state.seed)
    with state.lock:
        state.segments.pin(segment.id)
    state.next_seq += 1
    try:
        state.disk.allocate(segment.fd, state.budget.segment_bytes)  # it may have been truncated
        state.disk.write(segment.fd, [header], gap.offset)
        state.disk.sync(segment.fd)
    finally:
        with state.lock:
            state.segments.unpin(segment)
    state.settled = batch.seq
