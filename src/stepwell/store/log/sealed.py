"""Which segments the log has, and how far each is written: one small file, so that a check misses what was taken away.

    | slot: magic, checksum, turn, last number, count; id, first seq, end of each segment | the same, one turn older |

Written whenever a segment is full, and before any that it names goes: whatever it says is true of the directory after any
crash, which leaves one of the two slots whole. A snapshot would say it too, but costs as much as there are values (180 MB
for a million), this as much as there are segments (24 KB for a thousand). Any bytes may be read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from stepwell.store.log.disk import BLOCK_BYTES, Disk, replace_file, up_to_block
from stepwell.store.log.segments import NOTHING_YET, NUMBERS_END
from stepwell.store.log.snapshot import Extent

NAME = "sealed"
_MAGIC = b"SWseal\0\x01"
_HEAD = struct.Struct("<8s4Q")
_CHECKED_FROM = 16
_ENTRY = np.dtype([("id", "<u8"), ("first_seq", "<u8"), ("end", "<u8")])
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What the file says. Nothing, where it cannot be used."""

    turn: int = 0
    last_number: int = 0  # the highest that any segment had then
    extents: tuple[Extent, ...] = ()
    usable: bool = True

    @property
    def size_bytes(self) -> int:
        return _HEAD.size + len(self.extents) * _ENTRY.itemsize


def slot_bytes(max_segments: int) -> int:
    """Room for so many segments."""
    return up_to_block(_HEAD.size + max_segments * _ENTRY.itemsize)


def read(disk: Disk, directory: Path, *, seed: int, segment_bytes: int) -> Sealed | None:
    """None when there is no file."""
    try:
        fd = disk.open(directory / NAME, writable=False)
    except FileNotFoundError:
        return None
    except OSError:
        return Sealed(usable=False)
    try:
        size = disk.size(fd)
        if size > _MOST_BYTES or size % (2 * BLOCK_BYTES):
            return Sealed(usable=False)
        content = memoryview(bytearray(size))
        content = content[: disk.read(fd, [content], 0)]
    except OSError:
        return Sealed(usable=False)
    finally:
        disk.close(fd)
    slots = [content[: size // 2], content[size // 2 :]]
    whole = [found for slot in slots if (found := decode(slot, seed=seed, segment_bytes=segment_bytes)) is not None]
    if whole:
        return max(whole, key=lambda found: found.turn)
    return Sealed(usable=any(not np.frombuffer(slot, np.uint8).any() for slot in slots))  # the very first writing may be torn


def write(disk: Disk, directory: Path, sealed: Sealed, *, seed: int, room: int) -> None:
    """Returns when it is safe on disk, in a file of two slots with so much room each. Raises OSError."""
    assert sealed.size_bytes <= room, f"{len(sealed.extents)} segments in {room=} bytes"
    path = directory / NAME
    if disk.file_size(path) != 2 * room:
        replace_file(disk, path, [memoryview(bytes(2 * room))])
    fd = disk.open(path)
    try:
        disk.write(fd, [encode(sealed, seed=seed)], sealed.turn % 2 * room)
        disk.sync(fd)
    finally:
        disk.close(fd)


def encode(sealed: Sealed, *, seed: int) -> memoryview:
    table = np.array([(e.id, e.first_seq, e.end) for e in sealed.extents], _ENTRY)
    content = bytearray(_HEAD.pack(_MAGIC, 0, sealed.turn, sealed.last_number, len(table)) + table.tobytes())
    checksum = xxhash.xxh3_64_intdigest(memoryview(content)[_CHECKED_FROM:], seed)
    struct.pack_into("<Q", content, len(_MAGIC), checksum)
    return memoryview(content)


def decode(slot: memoryview, *, seed: int, segment_bytes: int) -> Sealed | None:
    """What a slot says; None unless it verifies."""
    if len(slot) < _HEAD.size:
        return None
    magic, checksum, turn, last_number, count = _HEAD.unpack_from(slot)
    end = _HEAD.size + count * _ENTRY.itemsize
    if magic != _MAGIC or end > len(slot) or xxhash.xxh3_64_intdigest(slot[_CHECKED_FROM:end], seed) != checksum:
        return None
    rows: Sequence[tuple[int, int, int]] = np.frombuffer(slot, _ENTRY, count, _HEAD.size).tolist()
    if max([last_number, *(number for number, _, _ in rows)]) >= NUMBERS_END:
        return None
    if any(first > NOTHING_YET or end > segment_bytes for _, first, end in rows):
        return None
    return Sealed(
        turn=turn, last_number=last_number, extents=tuple(Extent(id=i, first_seq=f, end=e) for i, f, e in rows)
    )  # fmt: skip
