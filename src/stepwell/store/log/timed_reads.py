"""How fast a log reads what it holds: it reads a small part when it is opened, in the way that requests would read it.

One turn alone, then several by the number of threads that a request uses; a tenth of a second and 64 MiB at most. A log that
holds too little for this uses the speed of its disk in the probe (`writing/upkeep.Probe`). Changes the last uses.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from stepwell.base.meters import Clock
from stepwell.store.api import Read, ReadOutcome, Space, TimedRead
from stepwell.store.log.disk.files import Scratch
from stepwell.store.log.reader import Reader
from stepwell.store.log.state.log_state import IoMode, LogState

READERS = 4
TURN_BYTES, TURNS = 8 << 20, 8
LEAST_BYTES = 4 << 20  # less would measure the start of a read more than the read
AT_MOST_S = 0.1
MOST_VALUES = 4096  # of a stretch
_PROBED_BYTES = 8 << 20


class _Turn(NamedTuple):
    space: Space
    reads: list[Read]


def tried_reads(mode: IoMode) -> tuple[TimedRead, ...]:
    """The speed of the disk in the probe; nothing before the probe ran."""
    rate = mode.read_bytes_per_s
    return (TimedRead(_PROBED_BYTES, _PROBED_BYTES / rate),) if rate else ()


def timed_reads(state: LogState, reader: Reader, clock: Clock) -> tuple[TimedRead, ...]:
    turns = _turns(state)
    if sum(len(read.into) for turn in turns for read in turn.reads) < LEAST_BYTES:
        return ()
    end_s = clock.now() + AT_MOST_S

    def timed(turns: list[_Turn]) -> TimedRead:
        began_s = clock.now()
        size_bytes = sum(pool.map(lambda turn: _read(reader, turn, lambda: clock.now() > end_s), turns))
        return TimedRead(size_bytes, clock.now() - began_s)

    with ThreadPoolExecutor(READERS) as pool:
        tried = timed(turns[:1]), timed(turns[1:])
    return tuple(each for each in tried if each.size_bytes and each.seconds > 0)


def _turns(state: LogState) -> list[_Turn]:
    """Stretches of stored values, evenly spread, each of one space and within one segment."""
    scratch, turns = Scratch(), []
    with state.lock:
        columns = state.index.columns
        rows = columns.held()
        step = max(len(rows) // TURNS, 1)
        for start in range(0, len(rows), step):
            first, reads, size = int(rows[start]), list[Read](), 0
            for row in rows[start : start + min(step, MOST_VALUES)].tolist():
                length = int(columns.length[row])
                if columns.segment[row] != columns.segment[first] or columns.space[row] != columns.space[first]:
                    continue
                if size + length > TURN_BYTES:
                    break
                reads.append(Read(columns.key[row].tobytes(), scratch.take_zeros(length)[:length]))
                size += length
            if reads:
                turns.append(_Turn(state.index.space(int(columns.space[first])), reads))
    return turns


def _read(reader: Reader, turn: _Turn, cancelled: Callable[[], bool]) -> int:
    found = reader.read(turn.space, turn.reads, cancelled)
    return sum(len(read.into) for read, result in zip(turn.reads, found, strict=True) if result.outcome is ReadOutcome.FOUND)
