"""What a check found, dropped for good: damaged values by a delete, damaged headers by a filler in their place."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from stepwell.store.log.check import Damage
from stepwell.store.log.disk import BLOCK_BYTES
from stepwell.store.log.format import ENTRY, NO_SPACE, Batch, Kind, write_header
from stepwell.store.log.state import LogState
from stepwell.store.log.writing import Writer


def drop(state: LogState, writer: Writer, damage: Iterable[Damage]) -> None:
    """Only for the one writer. Raises StoreError or OSError; what was dropped until then stays dropped."""
    values = [one for one in damage if one.key is not None and one.space is not None]
    for digest, same in groupby(sorted(values, key=_digest), key=_digest):
        of_space = list(same)
        assert of_space[0].space is not None, f"a value of no space: {digest!r}"
        writer.erase(of_space[0].space, [one.key for one in of_space if one.key is not None])
    writer.settle()
    for one in damage:
        if one.key is None:
            _fill(state, one)


def _digest(one: Damage) -> bytes:
    return one.space.digest if one.space is not None else b""


def _fill(state: LogState, gap: Damage) -> None:
    """Puts a header over a damaged one that says: nothing here. A crash leaves the damage, or the filler."""
    segment = state.segments.table.get(gap.segment)
    if segment is None or gap.offset + gap.size_bytes > state.budget.segment_bytes:
        return
    batch = Batch(
        kind=Kind.FILLER, segment=gap.segment, offset=gap.offset, header_bytes=BLOCK_BYTES, total_bytes=gap.size_bytes,
        seq=state.next_seq, settled=state.settled, space=NO_SPACE, entries=np.zeros(0, ENTRY),
    )  # fmt: skip
    header = memoryview(bytearray(BLOCK_BYTES))
    write_header(batch, header, seed=state.seed)
    with state.lock:
        state.segments.pin(segment.id)
    state.next_seq += 1
    try:
        state.disk.allocate(segment.fd, state.budget.segment_bytes)  # it may have been cut off
        state.disk.write(segment.fd, [header], gap.offset)
        state.disk.sync(segment.fd)
    finally:
        with state.lock:
            state.segments.unpin(segment)
    state.settled = batch.seq
