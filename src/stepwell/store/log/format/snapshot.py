"""The whole index as one file, so that an opening reads one file instead of every header in the log.

    | magic, version, checksum, counts, position | spaces | segments | revoked | columns, one after the other |

It holds for a position in the log; what was written later is read from there. Its checksum covers everything. Accepts any
bytes: a file that does not verify, or has another version, counts as no snapshot. The reader drops rows of segments that no
longer exist.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.base.ids import Level
from stepwell.store.api import MAX_LABEL_BYTES, MAX_TENANT_BYTES, Space
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format.segment_list import NOTHING_YET, NUMBERS_END, SegmentInfo

NAME = "snapshot"
VERSION = 1
MAGIC = b"SWsnap\0\x01"

# name -> (type, bytes wide: 0 for one number per row); the order is the order in a snapshot
SHAPES: dict[str, tuple[str, int]] = {
    "segment": ("<i8", 0),
    "offset": ("<i8", 0),  # from the start of the segment
    "length": ("<i8", 0),
    "seq": ("<i8", 0),  # of the batch that holds it
    "used": ("<i8", 0),  # the tick of its last use
    "depth": ("<i4", 0),
    "space": ("<i4", 0),
    "key": ("u1", 32),
    "parent": ("u1", 32),
    "stamp": ("u1", 64),
    "level": ("u1", 0),
}
ROW_BYTES = sum(max(width, 1) * np.dtype(kind).itemsize for kind, width in SHAPES.values())

_HEAD = struct.Struct("<8s11Q")
_CHECKED_FROM = 16
_PIECE_BYTES = 4 << 20  # checked at once
_NOTHING = memoryview(b"")
_SPACE = np.dtype([("digest", "u1", 32), ("tenant", f"S{MAX_TENANT_BYTES}"), ("label", f"S{MAX_LABEL_BYTES}")])
_SEGMENT = np.dtype([(name, "<u8") for name in ("id", "first_seq", "end", "last_seq", "stale", "tombstones", "newest_tombstone")])
_REVOKED = np.dtype([("start", "<u8"), ("stop", "<u8")])
_WIDTHS = (_SPACE.itemsize, _SEGMENT.itemsize, _REVOKED.itemsize, ROW_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    segment: int  # everything before this place in the log is in it
    offset: int
    next_seq: int
    settled: int
    tick: int
    spaces: list[Space]
    segments: list[SegmentInfo]
    revoked: list[range]
    columns: dict[str, npt.NDArray[Any]]

    @property
    def last_number(self) -> int:
        """The highest number of a segment that it names."""
        return max([self.segment, int(self.columns["segment"].max(initial=0)), *(info.id for info in self.segments)])


def encode(snapshot: Snapshot) -> list[memoryview]:
    """The file's bytes, in pieces, without the checksum. Copies no columns: they must not change before it is written."""
    spaces = [(np.frombuffer(one.digest, np.uint8), one.tenant.encode(), one.label.encode()) for one in snapshot.spaces]
    table = [tuple(getattr(info, name) for name in _SEGMENT.names or ()) for info in snapshot.segments]
    revoked = [(numbers.start, numbers.stop) for numbers in snapshot.revoked]
    tables = [np.array(spaces, _SPACE), np.array(table, _SEGMENT), np.array(revoked, _REVOKED)]
    columns = [snapshot.columns[name] for name in SHAPES]
    head = _HEAD.pack(
        MAGIC, 0, VERSION, snapshot.segment, snapshot.offset, snapshot.next_seq, snapshot.settled, snapshot.tick,
        *map(len, tables), len(columns[0]),
    )  # fmt: skip
    body = [np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in (*tables, *columns) if len(part)]
    return [memoryview(bytearray(head)), *body]


def sign(pieces: list[memoryview], *, seed: int) -> None:
    """Inserts the checksum. Takes time in proportion to the size, and needs no lock."""
    checksum = xxhash.xxh3_64(pieces[0][_CHECKED_FROM:], seed)
    for piece in pieces[1:]:
        checksum.update(piece)
    struct.pack_into("<Q", pieces[0], len(MAGIC), checksum.intdigest())


def size_bytes(*, values: int, revoked: int, spaces: int, segments: int) -> int:
    """The size of a snapshot that holds this much."""
    return _HEAD.size + sum(count * width for count, width in zip((spaces, segments, revoked, values), _WIDTHS, strict=True))


def read(disk: Disk, directory: Path, *, seed: int, most_bytes: int) -> memoryview | None:
    """The file's bytes; empty if they do not verify, are too many, or cannot be read. None if there is no file.

    Nothing is trusted before it is checked: a file that claims to be huge costs no more memory than a small one.
    """
    try:
        fd = disk.open(directory / NAME, writable=False)
    except FileNotFoundError:
        return None
    except OSError:
        return _NOTHING
    try:
        head = memoryview(bytearray(_HEAD.size))
        size = disk.size(fd)
        if size > most_bytes or disk.read(fd, [head], 0) < len(head) or _claimed_bytes(head) != size:
            return _NOTHING
        if _checksum(disk, fd, seed) != struct.unpack_from("<Q", head, len(MAGIC))[0]:
            return _NOTHING
        content = memoryview(bytearray(size))
        return content[: disk.read(fd, [content], 0)]
    except (OSError, MemoryError):
        return _NOTHING
    finally:
        disk.close(fd)


def _checksum(disk: Disk, fd: int, seed: int) -> int:
    """The checksum of a whole file, read in pieces."""
    checksum, piece, at = xxhash.xxh3_64(seed=seed), memoryview(bytearray(_PIECE_BYTES)), _CHECKED_FROM
    while got := disk.read(fd, [piece], at):
        checksum.update(piece[:got])
        at += got
    return checksum.intdigest()


def _claimed_bytes(content: memoryview) -> int:
    """The length that a snapshot claims; 0 if it is not one of ours."""
    if len(content) < _HEAD.size or content[: len(MAGIC)] != MAGIC:
        return 0
    _, _, version, _, _, _, _, _, *counts = _HEAD.unpack_from(content)
    return _HEAD.size + sum(n * w for n, w in zip(counts, _WIDTHS, strict=True)) if version == VERSION else 0


def decode(content: memoryview, *, seed: int, segment_bytes: int) -> Snapshot | None:
    """The snapshot in these bytes; None unless all of it verifies and belongs to this store."""
    if not content or _claimed_bytes(content) != len(content):
        return None
    _, checksum, _, segment, offset, next_seq, settled, tick, *counts = _HEAD.unpack_from(content)
    if xxhash.xxh3_64_intdigest(content[_CHECKED_FROM:], seed) != checksum:
        return None
    at, tables = _HEAD.size, []
    for kind, count in zip((_SPACE, _SEGMENT, _REVOKED), counts, strict=False):
        tables.append(np.frombuffer(content, kind, count, at))
        at += kind.itemsize * count
    columns = _columns(content, at, counts[3])
    try:
        spaces = [Space(digest=d.tobytes(), tenant=t.decode(), label=name.decode()) for d, t, name in tables[0]]
    except ValueError:
        return None
    segments = [SegmentInfo(**dict(zip(_SEGMENT.names or (), row, strict=True))) for row in tables[1].tolist()]
    revoked = [range(start, stop) for start, stop in tables[2].tolist()]
    counted = (max(one.id, one.last_seq, one.stale, one.tombstones, one.newest_tombstone) for one in segments)
    if max([segment, next_seq, settled, tick, *counted]) >= NUMBERS_END or any(info.first_seq > NOTHING_YET for info in segments):
        return None
    if max([offset, *(info.end for info in segments)]) > segment_bytes:
        return None
    if len({space.digest for space in spaces}) < len(spaces) or not _plausible(columns, len(spaces), segment_bytes, tick):
        return None
    return Snapshot(
        segment=segment, offset=offset, next_seq=next_seq, settled=settled, tick=tick, spaces=spaces, segments=segments,
        revoked=revoked, columns=columns,
    )  # fmt: skip


def _columns(content: memoryview, at: int, count: int) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, (kind, width) in SHAPES.items():
        flat = np.frombuffer(content, kind, count * max(width, 1), at).copy()
        at += flat.nbytes
        columns[name] = flat.reshape(count, width) if width else flat
    return columns


def _plausible(columns: dict[str, npt.NDArray[Any]], num_spaces: int, segment_bytes: int, tick: int) -> bool:
    """Whether every row lies within a segment and a space, so that later readers need not check."""
    bounds = {
        "segment": (1, NUMBERS_END - 1), "offset": (0, segment_bytes), "length": (0, segment_bytes), "seq": (0, NUMBERS_END - 1),
        "used": (0, tick), "depth": (0, 2**31 - 1), "space": (0, num_spaces - 1),
        "level": (0, max(Level)),
    }  # fmt: skip
    if not len(columns["segment"]):
        return True
    for name, (low, high) in bounds.items():
        column = columns[name]
        if int(column.min()) < low or int(column.max()) > high:
            return False
    return int((columns["offset"] + columns["length"]).max()) <= segment_bytes
