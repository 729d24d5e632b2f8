"""From a directory to everything that the log knew when it ended, however it ended. Reads only; never raises for its content.

A snapshot that verifies is loaded, and the log is read from its position; without one, all of it is read. Every batch
up to the highest `settled` of any header was safe on disk before that header was written, so its header is trusted.
The few later ones may be torn: each is trusted only if the batch before it is, and every value in it verifies. Batches that
are not trusted were never acknowledged; the next write revokes them for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepwell.store.keyed_seal import verify_without_key
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format import segment_list, snapshot
from stepwell.store.log.format.batch import Batch, BatchKind, revoked_by
from stepwell.store.log.format.scan import Gap, scan
from stepwell.store.log.format.segment_list import NOTHING_YET, SegmentInfo, SegmentList, name_of, path_of
from stepwell.store.log.format.segment_list import number_of as segment_number
from stepwell.store.log.format.superblock import Superblock
from stepwell.store.log.state.index import Index
from stepwell.store.log.state.segments import Segment
from stepwell.store.seal import Verdict

_BYTES_OF_ROWS = 2  # at most, for a byte of segments: a row is hardly larger than its entry in a header
_MOST_AHEAD = 2**32  # how far the number of an empty segment may be from the ones before


@dataclass(slots=True, kw_only=True)
class Recovered:
    """The result. Batches after `believed` and before `next_seq` must be revoked before anything else is settled."""

    index: Index = field(default_factory=Index)
    revoked: list[range] = field(default_factory=list)  # numbers of batches that must not be trusted
    segments: list[Segment] = field(default_factory=list)
    next_seq: int = 1
    settled: int = 0
    believed: int = 0
    doubtful: set[int] = field(default_factory=set)  # segments with trusted batches that may not be safe on disk yet
    damage: list[Gap] = field(default_factory=list)  # unreadable, with valid batches after it
    batches_read: int = 0
    from_snapshot: bool = False
    snapshot_broken: bool = False  # there is a file, but it cannot be used
    last_number: int = 0  # the highest known number of any segment
    segment_list: SegmentList | None = None  # the list of segments; None if there is none
    gone: list[SegmentInfo] = field(default_factory=list)  # segments that should exist
    cut: list[Gap] = field(default_factory=list)  # the missing ends of segments whose files are too short
    strays: list[str] = field(default_factory=list)  # files with numbers that a log never reaches by itself


@dataclass(slots=True)
class _Found:
    segment: Segment
    size: int = 0
    items: list[Batch | Gap] = field(default_factory=list)

    @property
    def holds_batches(self) -> bool:
        return any(isinstance(item, Batch) for item in self.items)


def recover(disk: Disk, directory: Path, block: Superblock, *, use_snapshot: bool = True) -> Recovered:
    """Everything that counts in a directory. Raises OSError only if the disk fails."""
    most_bytes = _BYTES_OF_ROWS * len(disk.names(directory)) * block.segment_bytes
    listed = segment_list.read(disk, directory, seed=block.seed, segment_bytes=block.segment_bytes)
    content = snapshot.read(disk, directory, seed=block.seed, most_bytes=most_bytes) if use_snapshot else None
    numbers = sorted(filter(None, map(segment_number, disk.names(directory))))  # later: what it names may be gone by then
    shot = snapshot.decode(content, seed=block.seed, segment_bytes=block.segment_bytes) if content else None
    result = Recovered()
    if shot is not None and not _load(result, shot, numbers):
        result, shot = Recovered(), None
    result.snapshot_broken = content is not None and shot is None
    infos = {info.id: info for info in shot.segments} if shot is not None else {}
    found = [_find(disk, directory, block, number, shot, infos.get(number)) for number in numbers]
    found = [one for one in found if one.size >= 0]
    remembered = [*([shot.last_number] if shot is not None else []), *([listed.last_number] if listed is not None else [])]
    reached = max([0, *remembered, *(one.segment.id for one in found if one.holds_batches)])
    result.strays = [name_of(one.segment.id) for one in found if one.segment.id > reached + _MOST_AHEAD]
    found = [one for one in found if one.segment.id <= reached + _MOST_AHEAD]
    result.last_number = max([reached, *(one.segment.id for one in found)])
    batches = [item for one in found for item in one.items if isinstance(item, Batch)]
    result.batches_read = len(batches)
    nothing_since = not batches and infos.keys() >= set(numbers)
    result.segment_list, result.gone = listed, _gone(shot, listed, set(numbers), nothing_since=nothing_since)
    result.next_seq = max([result.next_seq, *(batch.seq + 1 for batch in batches)])
    result.settled = max([result.settled, *(batch.settled for batch in batches)])
    revoked = [*result.revoked, *(numbers for batch in batches for numbers in revoked_by(batch))]
    result.believed = result.settled
    by_number = {one.segment.id: one.segment for one in found}
    sizes = {number: disk.file_size(path_of(directory, number)) for number in by_number}
    for one in found:
        _replay(disk, directory, result, one, revoked, by_number)
        result.segments.append(one.segment)
    for info in listed.segments if listed is not None else ():
        if (segment := by_number.get(info.id)) is not None:  # as far as it was written, even if less remains
            segment.end, segment.first_seq = max(segment.end, info.end), min(segment.first_seq, info.first_seq)
    for number, size in sizes.items():
        if size is not None and by_number[number].end <= size < block.segment_bytes:
            result.cut.append(Gap(segment=number, offset=size, size=block.segment_bytes - size))
    return result


def _load(result: Recovered, shot: snapshot.Snapshot, numbers: list[int]) -> bool:
    """Loads a snapshot, except for values in segments that no longer exist; False if it contradicts itself."""
    there = np.isin(shot.columns["segment"], np.array(numbers, np.int64))
    columns = shot.columns if there.all() else {name: column[there] for name, column in shot.columns.items()}
    result.next_seq, result.settled, result.from_snapshot = shot.next_seq, shot.settled, True
    result.revoked = list(shot.revoked)
    return result.index.load(shot.spaces, columns, shot.tick)


def _gone(
    shot: snapshot.Snapshot | None, listed: SegmentList | None, there: set[int], *, nothing_since: bool
) -> list[SegmentInfo]:
    """Segments that should exist, but do not.

    These are all that the list names, and those named by the snapshot that held valid data and are newer than the list. Without a
        list they are all that the snapshot names, if nothing was written since, so nothing was overwritten.
    """
    gone = {info.id: info for info in listed.segments if info.id not in there} if listed is not None else {}
    if shot is not None and (nothing_since or (listed is not None and listed.usable)):
        used, known = set(np.unique(shot.columns["segment"]).tolist()), listed.last_number if listed is not None else 0
        missing = [info for info in shot.segments if info.id not in there and info.id > known]
        gone |= {info.id: info for info in missing if info.id in used or info.tombstones}
    return [gone[number] for number in sorted(gone)]


def _find(
    disk: Disk, directory: Path, block: Superblock, number: int, shot: snapshot.Snapshot | None, info: SegmentInfo | None
) -> _Found:
    """What one segment holds beyond the snapshot."""
    start = 0
    segment = Segment(id=number, first_seq=NOTHING_YET, end=0)
    if info is not None:
        segment = Segment(
            id=number, first_seq=info.first_seq, end=info.end, last_seq=info.last_seq, stale=info.stale,
            tombstones=info.tombstones, newest_tombstone=info.newest_tombstone,
        )  # fmt: skip
        start = info.end
    one = _Found(segment)
    if shot is not None and number < shot.segment:
        return one  # nothing was written there since
    try:
        fd = disk.open(path_of(directory, number), writable=False)
    except FileNotFoundError:
        one.size = -1  # another process has the store open, and just overwrote it
        return one
    try:
        one.size = disk.size(fd)
        one.items = list(scan(disk, fd, segment=number, start=start, seed=block.seed, segment_bytes=block.segment_bytes))
    finally:
        disk.close(fd)
    return one


def _replay(
    disk: Disk, directory: Path, result: Recovered, one: _Found, revoked: list[range], segments: Mapping[int, Segment]
) -> None:
    """Applies the valid batches of a segment. Segments come in order, so batches do."""
    gap: Gap | None = None
    for item in one.items:
        if isinstance(item, Gap):
            gap = item
            continue
        if any(item.seq in numbers for numbers in revoked):
            continue
        if item.seq > result.settled:
            before = item.seq - 1
            follows = before <= result.believed or any(before in numbers for numbers in revoked)
            if not follows or not _whole(disk, directory, item):
                continue
            result.believed = item.seq
            result.doubtful.add(item.segment)
        if gap is not None:
            result.damage.append(gap)
            gap = None
        _note_moves(result.index, item, segments)
        for _ in result.index.apply(item):
            pass
        result.revoked += revoked_by(item)
        one.segment.note(item)


def _note_moves(index: Index, batch: Batch, segments: Mapping[int, Segment]) -> None:
    """Values that a batch holds again were copied there: their earlier bytes stay on disk as stale."""
    known = index.rows_of(batch.space.digest) if batch.kind is BatchKind.PUT else {}
    for key in known.keys() & batch.keys() if known else ():
        segments[int(index.columns.segment[known[key]])].stale += 1


def _whole(disk: Disk, directory: Path, batch: Batch) -> bool:
    """Whether every value of a batch matches its stamp. Reads all of them."""
    if batch.kind is not BatchKind.PUT:
        return True
    try:
        fd = disk.open(path_of(directory, batch.segment), writable=False)
    except FileNotFoundError:
        return False  # another process has the store open, and just overwrote it
    try:
        if batch.end > disk.size(fd):
            return False
        for entry in batch.entries:
            data = memoryview(bytearray(int(entry["length"])))
            got = disk.read(fd, [data], batch.offset + int(entry["offset"]))
            if (
                got < len(data)
                or verify_without_key(batch.space, entry["key"].tobytes(), data, entry["stamp"].tobytes()) is not Verdict.INTACT
            ):
                return False
        return True
    except OSError:
        return False
    finally:
        disk.close(fd)
