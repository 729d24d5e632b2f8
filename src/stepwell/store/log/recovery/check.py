"""Verifies every header and every value of a log: which data is damaged, where, and how much of it. Reads only.

A value is checked against its stamp, a header against its checksum and its place. Another process may have the log open: the
check ignores what that process overwrites meanwhile.

With a key, a namespace belongs to that key once one of its values proves it. Values in it that carry no key were planted, since
holders of the key write nothing without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.base.store_key import StoreKey
from stepwell.store.api import Space
from stepwell.store.keyed_seal import is_unkeyed, is_unproven, names, verify_with, verify_without_key
from stepwell.store.log.disk.files import BLOCK_BYTES
from stepwell.store.log.format import segment_list, snapshot
from stepwell.store.log.format.batch import Batch, is_of_another_store
from stepwell.store.log.format.scan import Gap, scan
from stepwell.store.log.format.segment_list import name_of, path_of
from stepwell.store.log.recovery.recover import Recovered
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import Segment
from stepwell.store.seal import Verdict

HEADER_DAMAGED = "the header that describes it is damaged"
UNREADABLE = "the disk cannot read it"
CUT_OFF = "the file ends before it does"
FILE_GONE = "the file is missing, with everything in it"
FILE_CUT = "the file ends too soon: what was written behind its end since the last full segment is lost"
OTHER_STORE = "the file was written by another store: what this one wrote there is lost"
SNAPSHOT_BROKEN = "the saved index cannot be used: an opening reads the whole log instead"
SEGMENT_LIST_BROKEN = "the list of segments cannot be used: missing segments may go unnoticed"
_NO_SEGMENT = 0
_Verify = Callable[[Space, bytes, memoryview, bytes], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One place that is not as it was written. Without a key it is a header, with whatever else it described."""

    file: str
    offset: int
    size_bytes: int
    reason: str
    segment: int
    space: Space | None = None
    key: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    segments: int
    batches: int
    values: int
    value_bytes: int
    damage: tuple[Damage, ...]
    left: tuple[Damage, ...] = ()  # what remains of the damage after a repair
    unproven_values: int = 0  # with a key given: not stamped with it; without: stamped with any. Their writer is unknown

    @property
    def damaged_values(self) -> int:
        return sum(damage.key is not None for damage in self.damage)

    @property
    def damaged_bytes(self) -> int:
        return sum(damage.size_bytes for damage in self.damage)


def check(
    state: LogState,
    on_progress: Callable[[int], None],
    *,
    only: Collection[int] | None = None,
    key: StoreKey | None = None,
) -> CheckReport:
    """Verifies everything that counts, or the content of some segments; calls `on_progress` with the size of each value.

    With a key, values stamped with it must have been written by a holder of it, and so must their neighbours.
    Raises OSError when a file cannot be opened.
    """
    damage: list[Damage] = []
    proven: set[bytes] = set()
    verify, seen_segments = _verifier(key, proven), []
    batches = 0
    for segment in [one for one in state.segments.table.values() if only is None or one.id in only]:
        try:
            fd = state.disk.open(path_of(state.directory, segment.id), writable=False)
        except FileNotFoundError:
            continue  # overwritten by the process that has the log open
        try:
            gaps, seen = _gaps(state, segment, fd)
            found = [_place(gap.segment, gap.offset, gap.size, "no valid header") for gap in gaps]
            found += _values(state, segment, fd, gaps, on_progress, verify)
            if not segment.end and _is_of_another_store(state, fd):
                found.append(_place(segment.id, 0, state.disk.size(fd), OTHER_STORE))
        finally:
            state.disk.close(fd)
        batches += seen
        if state.disk.file_size(path_of(state.directory, segment.id)) is not None:
            damage += found
            seen_segments.append(segment.id)
    planted = _planted(state, seen_segments, proven, known={(one.space.digest, one.key) for one in damage if one.space})
    columns, held = state.index.columns, state.index.columns.held()
    lengths = columns.length[held]
    return CheckReport(
        segments=len(state.segments.table), batches=batches, values=len(lengths), value_bytes=int(lengths.sum()),
        damage=(*damage, *planted), unproven_values=int(is_unproven(columns.stamp, key)[held].sum()) - len(planted),
    )  # fmt: skip


def lost_files(found: Recovered) -> list[Damage]:
    """Whole files that a log should have: its saved index, the list of its segments, and the segments that these name."""
    broken = [
        Damage(file=file, offset=0, size_bytes=0, reason=reason, segment=_NO_SEGMENT)
        for file, reason, is_broken in (
            (snapshot.NAME, SNAPSHOT_BROKEN, found.snapshot_broken),
            (segment_list.NAME, SEGMENT_LIST_BROKEN, found.segment_list is not None and not found.segment_list.usable),
        )
        if is_broken
    ]
    gone = [_place(info.id, 0, info.end, FILE_GONE) for info in found.gone]
    cut = [_place(gap.segment, gap.offset, gap.size, FILE_CUT) for gap in found.cut]
    return [*broken, *gone, *cut]


def _place(number: int, offset: int, size: int, reason: str) -> Damage:
    """A part of a segment that is not as it was written."""
    return Damage(file=name_of(number), offset=offset, size_bytes=size, reason=reason, segment=number)


def _gaps(state: LogState, segment: Segment, fd: int) -> tuple[list[Gap], int]:
    """Places without a valid header before the end of the written part, and the number of batches."""
    seed, size = state.seed, state.budget.segment_bytes
    gaps, batches = [], 0
    there = state.disk.size(fd) // BLOCK_BYTES * BLOCK_BYTES
    for item in scan(state.disk, fd, segment=segment.id, start=0, seed=seed, segment_bytes=size):
        if isinstance(item, Batch):
            batches += item.offset < segment.end
            there = max(there, item.end)  # a file may have been truncated within a batch
        elif item.offset < segment.end:
            gaps.append(Gap(segment=segment.id, offset=item.offset, size=min(item.size, segment.end - item.offset)))
    if there < segment.end:
        gaps.append(Gap(segment=segment.id, offset=there, size=segment.end - there))
    return gaps, batches


def _is_of_another_store(state: LogState, fd: int) -> bool:
    block = memoryview(bytearray(BLOCK_BYTES))
    return is_of_another_store(block[: state.disk.read(fd, [block], 0)], seed=state.seed)


def _values(
    state: LogState, segment: Segment, fd: int, gaps: list[Gap], on_progress: Callable[[int], None], verify: _Verify
) -> Iterator[Damage]:
    """The damaged values of a segment, in the order they lie there."""
    columns, rows = state.index.columns, state.index.rows_in(segment.id)
    rows = rows[np.argsort(columns.offset[rows], kind="stable")]
    buffer = memoryview(bytearray(int(columns.length[rows].max()) if len(rows) else 0))
    for row in rows.tolist():
        offset, size = int(columns.offset[row]), int(columns.length[row])
        space, key = state.index.space(int(columns.space[row])), columns.key[row].tobytes()
        data = buffer[:size]
        try:
            whole = state.disk.read(fd, [data], offset) == size
            reason = verify(space, key, data, columns.stamp[row].tobytes()).value if whole else CUT_OFF
        except OSError:
            reason = UNREADABLE
        if reason == Verdict.INTACT.value and any(gap.offset <= offset < gap.offset + gap.size for gap in gaps):
            reason = HEADER_DAMAGED  # served as long as the snapshot knows it, and lost with it
        if reason != Verdict.INTACT.value:
            yield _value_damage(state, row, reason)
        on_progress(size)


def _verifier(key: StoreKey | None, proven: set[bytes]) -> _Verify:
    """The function that judges values; adds to `proven` the namespaces in which a holder of the key wrote a value."""
    if key is None:
        return verify_without_key

    def verify(space: Space, name: bytes, data: memoryview, stamped: bytes) -> Verdict:
        verdict = verify_with(key, space, name, data, stamped)
        if verdict is Verdict.INTACT and names(key, stamped):
            proven.add(space.digest)
        return verdict

    return verify


def _planted(
    state: LogState, segments: Sequence[int], proven: Collection[bytes], known: Collection[tuple[bytes, bytes | None]]
) -> list[Damage]:
    """The values without a key in proven namespaces, except those known to be damaged already."""
    if not proven:
        return []
    columns, index = state.index.columns, state.index
    numbers = [number for number, space in enumerate(index.spaces) if space is not None and space.digest in proven]
    rows = columns.held()
    rows = rows[np.isin(columns.space[rows], numbers) & np.isin(columns.segment[rows], segments)]
    rows = rows[is_unkeyed(columns.stamp[rows])]
    found = [_value_damage(state, row, Verdict.OTHER_KEY.value) for row in rows.tolist()]
    return [one for one in found if one.space is not None and (one.space.digest, one.key) not in known]


def _value_damage(state: LogState, row: int, reason: str) -> Damage:
    columns, segment = state.index.columns, int(state.index.columns.segment[row])
    return Damage(
        file=name_of(segment), offset=int(columns.offset[row]), size_bytes=int(columns.length[row]), reason=reason,
        segment=segment, space=state.index.space(int(columns.space[row])), key=columns.key[row].tobytes(),
    )  # fmt: skip
