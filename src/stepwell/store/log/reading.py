"""Values from the disk into the caller's buffers. For any number of threads.

    wanted, in the order they lie on disk      | a | b |......| c |   -> one read of a, b, (padding and a header), c

Segments that are being read are pinned. A value is asked of the disk once; whether its bytes are right is for whoever
has the stamp (`seal.py`) to say. Buffers are not asked whether they suit direct transfers: the disk says so.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import local

import numpy as np

from stepwell.store.api import Read, ReadOutcome, ReadResult, Space
from stepwell.store.log.aligned import Scratch
from stepwell.store.log.disk import BLOCK_BYTES, up_to_block
from stepwell.store.log.format import INLINE_BYTES, split
from stepwell.store.log.segments import Segment
from stepwell.store.log.state import LogState

_RUN_BYTES = 8 << 20  # at once: so long may a cancellation go unheard
_RUN_VALUES = 256
_GAP_BYTES = 32 * 1024  # between two values, read for nothing rather than in two calls


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wanted:
    at: int  # in the batch
    segment: Segment
    offset: int
    end: int  # of the blocks it lies in; small values share theirs
    into: memoryview
    stamp: bytes
    direct: bool


class Reader:
    def __init__(self, state: LogState) -> None:
        self._state = state
        self._own = local()

    def read(self, space: Space, reads: Sequence[Read], cancelled: Callable[[], bool]) -> list[ReadResult]:
        state = self._state
        outcomes = [ReadOutcome.MISSING] * len(reads)
        pinned: dict[int, Segment] = {}
        try:
            with state.lock:
                state.must_be_open()
                wanted = self._find(space, reads, outcomes, pinned)
            for run in _runs(wanted):
                if cancelled():
                    break
                self._read_run(run, outcomes)
        finally:
            with state.lock:
                for segment in pinned.values():
                    state.segments.unpin(segment)
                state.lock.notify_all()
        stamps = {one.at: one.stamp for one in wanted if outcomes[one.at] is ReadOutcome.FOUND}
        with state.lock:
            state.counters.add("read_values", len(stamps))
            state.counters.add("read_bytes", sum(len(reads[at].into) for at in stamps))
        return [ReadResult(outcome=outcome, stamp=stamps.get(at, b"")) for at, outcome in enumerate(outcomes)]

    def _find(
        self, space: Space, reads: Sequence[Read], outcomes: list[ReadOutcome], pinned: dict[int, Segment]
    ) -> list[_Wanted]:
        """Where the values lie, their segments pinned; those that will not be read have their outcome. Counts as a use."""
        state, index, columns = self._state, self._state.index, self._state.index.columns
        known, wanted, direct = index.rows_of(space.digest), [], state.ways.direct_reads
        index.next_tick()
        found = [(at, row) for at, read in enumerate(reads) if (row := known.get(read.key)) is not None]
        rows = np.array([row for _, row in found], dtype=np.int64)
        places = (columns.segment[rows].tolist(), columns.offset[rows].tolist(), columns.length[rows].tolist())
        for (at, _), number, offset, length, stamp in zip(found, *places, split(columns.stamp[rows]), strict=True):
            into = reads[at].into
            if length != len(into):
                outcomes[at] = ReadOutcome.LENGTH
                continue
            try:
                segment = pinned.get(number) or state.segments.pin(number)
            except OSError:
                outcomes[at] = ReadOutcome.FAILED
                continue
            pinned[number] = segment
            outcomes[at] = ReadOutcome.CANCELLED  # until it is read
            index.touch(space.digest, reads[at].key)
            small = length <= INLINE_BYTES
            end = offset + (length if small else up_to_block(length))
            able = direct and not small and segment.direct_fd >= 0
            wanted.append(_Wanted(at=at, segment=segment, offset=offset, end=end, into=into, stamp=stamp, direct=able))
        return wanted

    def _read_run(self, run: Sequence[_Wanted], outcomes: list[ReadOutcome]) -> None:
        """One call for values that lie close together."""
        scratch, start = self._scratch(), run[0].offset
        junk = scratch.take(_GAP_BYTES)
        buffers: list[memoryview] = []
        tails: list[tuple[memoryview, memoryview]] = []
        position = start
        for one in run:
            if one.offset > position:
                buffers.append(junk[: one.offset - position])
            whole = len(one.into) // BLOCK_BYTES * BLOCK_BYTES if one.direct else len(one.into)
            buffers.append(one.into[:whole])
            if whole < len(one.into):
                tail = scratch.take(BLOCK_BYTES)
                buffers.append(tail)
                tails.append((one.into[whole:], tail))
            position = one.end if one.direct else one.offset + len(one.into)
        segment = run[0].segment
        try:
            got = self._state.disk.read(segment.direct_fd if run[0].direct else segment.fd, buffers, start)
        except OSError as error:
            if run[0].direct and error.errno == errno.EINVAL:  # a buffer that does not begin at a multiple of a block
                scratch.give_back()
                return self._read_run([replace(one, direct=False) for one in run], outcomes)
            got = -1
        for into, tail in tails:
            into[:] = tail[: len(into)]
        scratch.give_back()
        for one in run:
            whole_value = one.offset + len(one.into) - start <= got
            outcomes[one.at] = ReadOutcome.FOUND if whole_value else ReadOutcome.FAILED if got < 0 else ReadOutcome.DAMAGED

    def _scratch(self) -> Scratch:
        """Blocks of this thread's own."""
        scratch = getattr(self._own, "scratch", None)
        if scratch is None:
            scratch = self._own.scratch = Scratch()
        return scratch


def _runs(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """The values in the order they lie on disk, those that one read can bring together."""
    run: list[_Wanted] = []
    for one in sorted(wanted, key=lambda one: (one.segment.id, one.offset)):
        if run and not _joins(run, one):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _joins(run: Sequence[_Wanted], one: _Wanted) -> bool:
    first, last = run[0], run[-1]
    close = one.segment is first.segment and 0 <= one.offset - last.end <= _GAP_BYTES - BLOCK_BYTES
    return close and one.direct == first.direct and one.end - first.offset <= _RUN_BYTES and len(run) < _RUN_VALUES
