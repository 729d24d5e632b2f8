"""The whole index as one file, so that opening reads it at once instead of every header in the log.

    | magic, version, checksum, counts, position | spaces | segments | marks | columns, one after the other |

True as of a position in the log; what came later is read from there. Its checksum covers everything; any bytes may be
given, and what does not verify is as good as no snapshot. Rows of segments that are gone are dropped by the reader.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.store.api import MAX_LABEL_BYTES, MAX_TENANT_BYTES, Space
from stepwell.store.log.columns import ROW_BYTES, SHAPES, Rows
from stepwell.store.log.disk import Disk
from stepwell.store.log.format import Kind
from stepwell.store.log.index import Index
from stepwell.store.log.marks import Mark, Marks
from stepwell.store.log.segments import NUMBERS_END

NAME = "snapshot"
VERSION = 1
MAGIC = b"SWsnap\0\x01"
_HEAD = struct.Struct("<8s11Q")
_CHECKED_FROM = 16
_SPACE = np.dtype([("digest", "u1", 32), ("tenant", f"S{MAX_TENANT_BYTES}"), ("label", f"S{MAX_LABEL_BYTES}")])
_SEGMENT = np.dtype([("id", "<u8"), ("first_seq", "<u8"), ("end", "<u8"), ("ghosts", "<u8")])
_MARK = np.dtype([("kind", "<u4"), ("space", "<u4"), ("as_of", "<u8"), ("segment", "<u8"), ("key", "u1", 32)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One segment as the log knows it."""

    id: int
    first_seq: int  # of its oldest batch
    end: int  # of its last batch
    ghosts: int  # values in it that were given up: they would come back if it was read anew


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    segment: int  # everything before this place in the log is in it
    offset: int
    next_seq: int
    settled: int
    tick: int
    spaces: list[Space]
    extents: list[Extent]
    marks: list[Mark]
    columns: dict[str, npt.NDArray[Any]]

    @property
    def last_number(self) -> int:
        """The highest number of a segment that it knows of."""
        return max([self.segment, int(self.columns["segment"].max(initial=0)), *(extent.id for extent in self.extents)])


def encode(index: Index, marks: Marks, extents: list[Extent], *, active: int, next_seq: int, settled: int) -> list[memoryview]:
    """The file's bytes, in pieces, without the checksum. Copies what it needs, so the index may change once it returns."""
    index.settle_uses()
    rows = index.columns.held()
    spaces, numbers = _spaces(index, marks, rows)
    offset = next((extent.end for extent in extents if extent.id == active), 0)
    table = np.array([(e.id, e.first_seq, e.end, e.ghosts) for e in extents], _SEGMENT)
    kept = np.zeros(len(marks), _MARK)
    for at, mark in enumerate(marks):
        kept[at] = (mark.kind, numbers[mark.space.digest], mark.as_of, mark.segment, np.frombuffer(mark.key, np.uint8))
    renumber = np.array([numbers.get(space.digest, 0) for space in index.spaces], np.int32)
    columns = {name: getattr(index.columns, name)[rows] for name in SHAPES}
    columns["space"] = renumber[columns["space"]] if len(rows) else columns["space"]
    body = [np.array(spaces, _SPACE), table, kept, *columns.values()]
    counts = (len(spaces), len(table), len(kept), len(rows))
    head = bytearray(_HEAD.pack(MAGIC, 0, VERSION, active, offset, next_seq, settled, index.tick, *counts))
    return [memoryview(head), *(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in body if len(part))]


def sign(pieces: list[memoryview], *, seed: int) -> None:
    """Puts the checksum in. Takes as long as the snapshot is large, and needs no lock."""
    checksum = xxhash.xxh3_64(pieces[0][_CHECKED_FROM:], seed)
    for piece in pieces[1:]:
        checksum.update(piece)
    struct.pack_into("<Q", pieces[0], len(MAGIC), checksum.intdigest())


def _spaces(index: Index, marks: Marks, rows: Rows) -> tuple[list[tuple[object, ...]], dict[bytes, int]]:
    """The spaces that still matter, renumbered."""
    used = {index.spaces[number] for number in np.unique(index.columns.space[rows]).tolist()} | {mark.space for mark in marks}
    order = sorted(used, key=lambda space: space.digest)
    numbers: dict[bytes, int] = {}
    table: list[tuple[object, ...]] = []
    for space in order:
        if space.digest not in numbers:
            numbers[space.digest] = len(table)
            table.append((np.frombuffer(space.digest, np.uint8), space.tenant.encode(), space.label.encode()))
    return table, numbers


def size_bytes(*, values: int, marks: int, spaces: int, segments: int) -> int:
    """Of a snapshot that holds so much."""
    tables = spaces * _SPACE.itemsize + segments * _SEGMENT.itemsize + marks * _MARK.itemsize
    return _HEAD.size + tables + values * ROW_BYTES


def read(disk: Disk, directory: Path) -> bytes | None:
    """The file's bytes; none of them where it is not as long as it says, or cannot be read. None when there is no file."""
    try:
        fd = disk.open(directory / NAME, writable=False)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        head = memoryview(bytearray(_HEAD.size))
        size = disk.size(fd)
        if disk.read(fd, [head], 0) < len(head) or _claimed_bytes(head) != size:
            return b""
        content = memoryview(bytearray(size))
        return bytes(content[: disk.read(fd, [content], 0)])
    except (OSError, MemoryError):
        return b""
    finally:
        disk.close(fd)


def _claimed_bytes(content: bytes | memoryview) -> int:
    """How long a snapshot says it is; 0 when it is none of ours."""
    if len(content) < _HEAD.size or content[: len(MAGIC)] != MAGIC:
        return 0
    _, _, version, _, _, _, _, _, *counts = _HEAD.unpack_from(content)
    widths = (_SPACE.itemsize, _SEGMENT.itemsize, _MARK.itemsize, ROW_BYTES)
    return _HEAD.size + sum(n * w for n, w in zip(counts, widths, strict=True)) if version == VERSION else 0


def decode(content: bytes, *, seed: int, segment_bytes: int) -> Snapshot | None:
    """The snapshot in these bytes; None unless all of it verifies and belongs to this store."""
    if not content or _claimed_bytes(content) != len(content):
        return None
    _, checksum, _, segment, offset, next_seq, settled, tick, *counts = _HEAD.unpack_from(content)
    if xxhash.xxh3_64_intdigest(memoryview(content)[_CHECKED_FROM:], seed) != checksum:
        return None
    at, tables = _HEAD.size, []
    for kind, count in zip((_SPACE, _SEGMENT, _MARK), counts, strict=False):
        tables.append(np.frombuffer(content, kind, count, at))
        at += kind.itemsize * count
    columns = _columns(content, at, counts[3])
    try:
        spaces = [Space(digest=d.tobytes(), tenant=t.decode(), label=name.decode()) for d, t, name in tables[0]]
        marks = [
            Mark(kind=Kind(kind), space=spaces[space], key=key.tobytes(), as_of=int(as_of), segment=int(home))
            for kind, space, as_of, home, key in tables[2]
        ]
    except (ValueError, IndexError):
        return None
    extents = [Extent(id=i, first_seq=f, end=e, ghosts=g) for i, f, e, g in tables[1].tolist()]
    largest = max(segment, next_seq, settled, tick, *(n for e in extents for n in (e.id, e.ghosts)), *(m.segment for m in marks))
    if largest >= NUMBERS_END or max([offset, *(extent.end for extent in extents)]) > segment_bytes:
        return None
    if not _plausible(columns, len(spaces), segment_bytes, tick):
        return None
    return Snapshot(
        segment=segment, offset=offset, next_seq=next_seq, settled=settled, tick=tick, spaces=spaces, extents=extents,
        marks=marks, columns=columns,
    )  # fmt: skip


def _columns(content: bytes, at: int, count: int) -> dict[str, npt.NDArray[Any]]:
    columns = {}
    for name, (kind, width) in SHAPES.items():
        flat = np.frombuffer(content, kind, count * max(width, 1), at).copy()
        at += flat.nbytes
        columns[name] = flat.reshape(count, width) if width else flat
    return columns


def _plausible(columns: dict[str, npt.NDArray[Any]], num_spaces: int, segment_bytes: int, tick: int) -> bool:
    """Whether every row lies within a segment and a space: a later reader must not have to ask."""
    bounds = {
        "segment": (1, NUMBERS_END - 1), "offset": (0, segment_bytes), "length": (0, segment_bytes), "seq": (0, NUMBERS_END - 1),
        "used": (0, tick), "depth": (0, 2**31 - 1), "space": (0, num_spaces - 1),
    }  # fmt: skip
    if not len(columns["segment"]):
        return True
    for name, (low, high) in bounds.items():
        column = columns[name]
        if int(column.min()) < low or int(column.max()) > high:
            return False
    return int((columns["offset"] + columns["length"]).max()) <= segment_bytes
