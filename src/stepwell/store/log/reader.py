"""Values from the disk into the caller's buffers. For any number of threads.

    wanted, in the order they lie on disk      | a | b |......| c |   -> one read of a, b, (padding and a header), c

Segments are held until all is read, and pinned one at a time. Each value is read from the disk once; the caller verifies its
stamp (`seal.py`). Buffers are not checked for direct transfers in advance: the disk reports those that do not suit. Data in the
page cache is read from there, however the rest is read.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from threading import local

import numpy as np

from stepwell.store.api import Read, ReadOutcome, ReadResult, Space
from stepwell.store.log.disk.files import BLOCK_BYTES, Scratch
from stepwell.store.log.format.batch import INLINE_BYTES, split
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import Segment

_RUN_BYTES = 8 << 20  # at once: a cancellation may take effect only after this much
_RUN_VALUES = 256
_GAP_BYTES = 32 * 1024  # between two values, read and discarded to save a call
_WITHOUT = {outcome: ReadResult(outcome=outcome) for outcome in ReadOutcome}
_NOWHERE = -1  # the row of a missing key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wanted:
    """Values in the order they lie on disk, one entry for each in every list."""

    at: list[int]  # index in the batch
    segments: list[Segment]
    offsets: list[int]
    ends: list[int]  # end of its blocks; small values share theirs
    into: list[memoryview]
    stamps: list[bytes]
    direct: list[bool]
    joins: list[bool]  # whether it lies close behind the one before, and is read the same way

    @property
    def in_order(self) -> bool:
        """Whether all of the batch is wanted, and lies on disk in its order."""
        return self.at == list(range(len(self.at)))


_NOTHING = _Wanted(at=[], segments=[], offsets=[], ends=[], into=[], stamps=[], direct=[], joins=[])


class _Own(local):
    """The scratch memory of each thread."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class Reader:
    def __init__(self, state: LogState) -> None:
        self._state = state
        self._own = _Own()

    def read(self, space: Space, reads: Sequence[Read], cancelled: Callable[[], bool]) -> list[ReadResult]:
        state, wanted = self._state, _NOTHING
        outcomes = [ReadOutcome.MISSING] * len(reads)
        held: dict[int, Segment] = {}
        try:
            with state.lock:
                state.must_be_open()
                wanted = self._find(space, reads, outcomes, held)
            self._read_all(wanted, outcomes, cancelled)
        finally:
            found, num_found = ReadOutcome.FOUND, outcomes.count(ReadOutcome.FOUND)
            came = [outcomes[at] is found for at in wanted.at] if num_found < len(wanted.at) else repeat(True)
            with state.lock:
                for segment in held.values():
                    state.segments.release(segment)
                state.counters.add("read_values", num_found)
                state.counters.add("read_bytes", sum(map(len, compress(wanted.into, came))))
                state.lock.notify_all()
        if num_found == len(reads) and wanted.in_order:
            return list(map(ReadResult, repeat(found), wanted.stamps))
        stamps = dict(zip(wanted.at, wanted.stamps, strict=True))
        return [ReadResult(found, stamps[at]) if outcome is found else _WITHOUT[outcome] for at, outcome in enumerate(outcomes)]

    def _find(self, space: Space, reads: Sequence[Read], outcomes: list[ReadOutcome], held: dict[int, Segment]) -> _Wanted:
        """Where the values lie, with their segments held; those that will not be read have their outcome. Counts as a use."""
        state, index, columns = self._state, self._state.index, self._state.index.columns
        known = index.rows_of(space.digest)
        keys, buffers = zip(*reads, strict=True)
        rows = np.array([known.get(key, _NOWHERE) for key in keys], dtype=np.int64)
        (at,) = np.nonzero(rows != _NOWHERE)
        rows = rows[at]

        def drop(bad: np.ndarray[tuple[int], np.dtype[np.bool_]], outcome: ReadOutcome) -> None:
            nonlocal at, rows
            if bad.any():
                for one in at[bad].tolist():
                    outcomes[one] = outcome
                at, rows = at[~bad], rows[~bad]

        sizes = np.array(list(map(len, buffers)), dtype=np.int64)
        drop(columns.length[rows] != sizes[at], ReadOutcome.LENGTH)
        if not len(rows):
            return _NOTHING
        order = np.lexsort((columns.offset[rows], columns.segment[rows]))
        places, rows = at[order].tolist(), rows[order]
        index.next_tick()
        index.use(space.digest, [keys[one] for one in places], rows)
        for one in places:
            outcomes[one] = ReadOutcome.CANCELLED  # until it is read
        held.update((number, state.segments.hold(number)) for number in set(columns.segment[rows].tolist()))
        numbers, offsets, lengths = columns.segment[rows], columns.offset[rows], columns.length[rows]
        small = lengths <= INLINE_BYTES
        ends = offsets + np.where(small, lengths, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES)
        direct = ~small if state.io_mode.direct_reads and state.segments.direct else np.zeros(len(rows), bool)
        gaps = offsets[1:] - ends[:-1]
        close = (gaps >= 0) & (gaps <= _GAP_BYTES - BLOCK_BYTES)
        joins = close & (numbers[1:] == numbers[:-1]) & (direct[1:] == direct[:-1])
        return _Wanted(
            at=places, segments=[held[number] for number in numbers.tolist()], offsets=offsets.tolist(),
            ends=ends.tolist(), into=[buffers[one] for one in places], stamps=split(columns.stamp[rows]),
            direct=direct.tolist(), joins=[False, *joins.tolist()],
        )  # fmt: skip

    def _read_all(self, wanted: _Wanted, outcomes: list[ReadOutcome], cancelled: Callable[[], bool]) -> None:
        """Reads run by run; the descriptors of only one segment are open at a time."""
        state = self._state
        for segment, runs in groupby(_runs(wanted), key=lambda run: wanted.segments[run[0]]):
            try:
                with state.lock:
                    state.segments.pin(segment.id)
            except OSError:
                for run in runs:
                    for one in run:
                        outcomes[wanted.at[one]] = ReadOutcome.FAILED
                continue
            try:
                for run in runs:
                    if cancelled():
                        return
                    self._read_run(wanted, run, outcomes)
            finally:
                with state.lock:
                    state.segments.unpin(segment)

    def _read_run(self, wanted: _Wanted, run: range, outcomes: list[ReadOutcome], *, by_cache: bool = False) -> None:
        """One call for values that lie close together."""
        scratch, start, segment = self._own.scratch, wanted.offsets[run[0]], wanted.segments[run[0]]
        end = wanted.ends[run[-1]]
        direct = wanted.direct[run[0]] and segment.direct_fd >= 0 and not by_cache
        if direct and self._state.disk.is_cached(segment.fd, start, end - start):
            direct = False  # a copy in memory is faster than any disk
        values = wanted.into[run.start : run.stop]
        tails: list[tuple[memoryview, memoryview]] = []
        if sum(map(len, values)) == end - start:  # whole blocks, one behind the other
            buffers = values
        else:
            buffers = self._with_gaps(wanted, run, tails, direct=direct)
        try:
            got = self._state.disk.read(segment.direct_fd if direct else segment.fd, buffers, start)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:  # a buffer does not begin at a multiple of a block
                scratch.release()
                return self._read_run(wanted, run, outcomes, by_cache=True)
            got = -1
        for into, tail in tails:
            into[:] = tail[: len(into)]
        scratch.release()
        if got == end - start:
            for at in wanted.at[run.start : run.stop]:
                outcomes[at] = ReadOutcome.FOUND
            return
        missed = ReadOutcome.FAILED if got < 0 else ReadOutcome.DAMAGED
        for at, offset, into in zip(wanted.at[run.start : run.stop], wanted.offsets[run.start : run.stop], values, strict=True):
            outcomes[at] = ReadOutcome.FOUND if offset + len(into) - start <= got else missed

    def _with_gaps(
        self, wanted: _Wanted, run: range, tails: list[tuple[memoryview, memoryview]], *, direct: bool
    ) -> list[memoryview]:
        """The buffers of a run: those of the values, and scratch for the bytes between them and up to the end of their blocks."""
        buffers: list[memoryview] = []
        position = wanted.offsets[run[0]]
        for one in run:
            into, offset = wanted.into[one], wanted.offsets[one]
            if offset > position:
                buffers.append(self._own.scratch.take(_GAP_BYTES)[: offset - position])
            position = offset + len(into)
            if not direct or not len(into) % BLOCK_BYTES:
                buffers.append(into)
                continue
            whole = len(into) // BLOCK_BYTES * BLOCK_BYTES
            tails.append((into[whole:], self._own.scratch.take(BLOCK_BYTES)))
            buffers += [into[:whole], tails[-1][1]]
            position = wanted.ends[one]
        return buffers


def _runs(wanted: _Wanted) -> Iterator[range]:
    """The groups of values that one read can fetch together."""
    first = 0
    for one in range(1, len(wanted.at)):
        too_much = wanted.ends[one] - wanted.offsets[first] > _RUN_BYTES or one - first >= _RUN_VALUES
        if too_much or not wanted.joins[one]:
            yield range(first, one)
            first = one
    if wanted.at:
        yield range(first, len(wanted.at))
