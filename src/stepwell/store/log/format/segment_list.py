"""Which segments the log has, and how far each is written: one small file, so that a check notices removed segments.

    | slot: magic, checksum, generation, last number, count; id, first seq, end of each segment | the same, one generation older |

Written whenever a segment is full, and before any that it names is removed: so its content is true of the directory after any
crash, which leaves one of the two slots intact. A snapshot would also do, but its cost grows with the values (180 MB for a
million), that of this file with the segments (24 KB for a thousand). Any bytes may be read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from stepwell.store.log.disk.files import BLOCK_BYTES, Disk, replace_file, up_to_block

NAME = "sealed"
SUFFIX = ".seg"
NOTHING_YET = 2**62  # first seq of a segment without batches
NUMBERS_END = 2**62  # of segments and of batches: a higher one is not ours
_MAGIC = b"SWseal\0\x01"
_HEAD = struct.Struct("<8s4Q")
_CHECKED_FROM = 16
_ENTRY = np.dtype([("id", "<u8"), ("first_seq", "<u8"), ("end", "<u8")])
_MOST_BYTES = 64 << 20


def name_of(number: int) -> str:
    return f"{number:016x}{SUFFIX}"


def path_of(directory: Path, number: int) -> Path:
    return directory / name_of(number)


def number_of(name: str) -> int | None:
    """The number of a segment by its file's name; None if the file is not a segment."""
    stem = name.removesuffix(SUFFIX)
    try:
        number = int(stem, 16)
    except ValueError:
        return None
    return number if 0 < number < NUMBERS_END and name == name_of(number) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """One segment as the log knows it."""

    id: int
    first_seq: int  # of its oldest batch
    end: int  # of its newest batch
    last_seq: int = 0  # of its newest batch
    stale: int = 0  # values in it that were evicted or copied elsewhere: they would come back if it was read again
    tombstones: int = 0  # deletes, clears and revocations in it
    newest_tombstone: int = 0  # the latest `as_of` of those


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentList:
    """The content of the file. Empty if it cannot be used."""

    generation: int = 0
    last_number: int = 0  # the highest of any segment at that time
    segments: tuple[SegmentInfo, ...] = ()
    usable: bool = True

    @property
    def size_bytes(self) -> int:
        return _HEAD.size + len(self.segments) * _ENTRY.itemsize


def slot_bytes(max_segments: int) -> int:
    """The size of a slot for this number of segments."""
    return up_to_block(_HEAD.size + max_segments * _ENTRY.itemsize)


def read(disk: Disk, directory: Path, *, seed: int, segment_bytes: int) -> SegmentList | None:
    """None if there is no file."""
    try:
        fd = disk.open(directory / NAME, writable=False)
    except FileNotFoundError:
        return None
    except OSError:
        return SegmentList(usable=False)
    try:
        size = disk.size(fd)
        if size > _MOST_BYTES or size % (2 * BLOCK_BYTES):
            return SegmentList(usable=False)
        content = memoryview(bytearray(size))
        content = content[: disk.read(fd, [content], 0)]
    except OSError:
        return SegmentList(usable=False)
    finally:
        disk.close(fd)
    slots = [content[: size // 2], content[size // 2 :]]
    whole = [found for slot in slots if (found := decode(slot, seed=seed, segment_bytes=segment_bytes)) is not None]
    if whole:
        return max(whole, key=lambda found: found.generation)
    return SegmentList(usable=any(not np.frombuffer(slot, np.uint8).any() for slot in slots))  # the very first write may be torn


def write(disk: Disk, directory: Path, listed: SegmentList, *, seed: int, slot_size: int) -> None:
    """Returns when it is safe on disk, in a file of two slots of this size. Raises OSError."""
    assert listed.size_bytes <= slot_size, f"{len(listed.segments)} segments in {slot_size=} bytes"
    path, content, offset = directory / NAME, encode(listed, seed=seed), listed.generation % 2 * slot_size
    if disk.file_size(path) != 2 * slot_size:  # never an empty file: a snapshot would be believed to be newer
        whole = memoryview(bytearray(2 * slot_size))
        whole[offset : offset + len(content)] = content
        return replace_file(disk, path, [whole])
    fd = disk.open(path)
    try:
        disk.write(fd, [content], offset)
        disk.sync(fd)
    finally:
        disk.close(fd)


def encode(listed: SegmentList, *, seed: int) -> memoryview:
    table = np.array([(e.id, e.first_seq, e.end) for e in listed.segments], _ENTRY)
    content = bytearray(_HEAD.pack(_MAGIC, 0, listed.generation, listed.last_number, len(table)) + table.tobytes())
    checksum = xxhash.xxh3_64_intdigest(memoryview(content)[_CHECKED_FROM:], seed)
    struct.pack_into("<Q", content, len(_MAGIC), checksum)
    return memoryview(content)


def decode(slot: memoryview, *, seed: int, segment_bytes: int) -> SegmentList | None:
    """The content of a slot; None unless it verifies."""
    if len(slot) < _HEAD.size:
        return None
    magic, checksum, generation, last_number, count = _HEAD.unpack_from(slot)
    end = _HEAD.size + count * _ENTRY.itemsize
    if magic != _MAGIC or end > len(slot) or xxhash.xxh3_64_intdigest(slot[_CHECKED_FROM:end], seed) != checksum:
        return None
    rows: Sequence[tuple[int, int, int]] = np.frombuffer(slot, _ENTRY, count, _HEAD.size).tolist()
    if max([last_number, *(number for number, _, _ in rows)]) >= NUMBERS_END:
        return None
    if any(first > NOTHING_YET or end > segment_bytes for _, first, end in rows):
        return None
    return SegmentList(
        generation=generation, last_number=last_number, segments=tuple(SegmentInfo(id=i, first_seq=f, end=e) for i, f, e in rows)
    )  # fmt: skip
