"""Batches as bytes: the only content of a segment. Pure; accepts any bytes and trusts none that do not verify.

    | header, a multiple of 4 KiB                                   | payload | payload | ...    each at a multiple of 4 KiB
    | fixed 320 | entry 160 | entry 160 | ... | small values | zeros |

A batch belongs to one space. Its header names the segment and the offset it was written for, so bytes of a segment's
former use are never trusted. An XXH3-64 seeded with a secret of the store covers the header, so payloads cannot pass for
headers. A number derived from that secret identifies headers of another store. `seq` numbers batches upwards forever; all
batches up to `settled` were synced, or revoked, before this one was written: only later ones can be torn.

    PUT      values                                         DELETE   keys whose values before `as_of` do not count
    CLEAR    nothing in this space before `as_of` counts    REVOKE   batches (by seq) that failed and must not be trusted
    FILLER   nothing: covers a damaged place

The `flags` of a value are its level, NORMAL as 0.

Deletes, clears and revocations are tombstones. The `offset` of a tombstone is the seq of the oldest data that it hides.

    K written    K deleted as of 15    K written again
    ---- 5 -------------- 15 ---------------- 25 ----> seq

A tombstone is needed as long as another segment holds data that it hides: without it, a value deleted there would come back
when the segments are read again. It records how old that data can be, so a delete soon after the write is needed for a short
time only. Reclaim copies the tombstones that are needed; in the oldest segment none is. Tombstones live in the log only, and
reclaim reads them from there: memory and snapshots hold only their number in each segment. Revoked batches are few, and their
numbers are known.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.base.ids import Level
from stepwell.store.api import KEY_BYTES, MAX_LABEL_BYTES, MAX_TENANT_BYTES, STAMP_BYTES, Space, Write
from stepwell.store.log.disk.files import BLOCK_BYTES, up_to_block

FORMAT_VERSION = 1
MAGIC = b"SWbatch\x01"
MAX_HEADER_BYTES = 1 << 20
SEQ_END = 2**62  # numbers of batches are below: a higher one is not ours
INLINE_BYTES = 1024  # values up to this many bytes live in the header: a manifest must not cost a whole block
NO_SPACE = Space(digest=bytes(32))
HOLDS_FROM_NOW = 0  # as_of of a new tombstone: becomes the number of its batch

_FIXED = struct.Struct(f"<8sQHHIIIQQQQQ32s{MAX_TENANT_BYTES}s{MAX_LABEL_BYTES}s")
_ENTRIES_AT = 320
_CHECKED_FROM = 16  # magic and checksum are not checked
_STORE_MARK_AT = 28
ENTRY = np.dtype(
    [("key", "u1", 32), ("parent", "u1", 32), ("stamp", "u1", 64), ("offset", "<u8"), ("length", "<u8"), ("as_of", "<u8"),
     ("depth", "<u4"), ("flags", "<u4")]
)  # fmt: skip
ENTRY_BYTES = ENTRY.itemsize
_LEVELS = (Level.NORMAL, Level.EXPENDABLE, Level.VALUABLE)  # indexed by `flags`
_FLAGS = np.argsort(_LEVELS).astype(np.uint32)  # the reverse
Entries = npt.NDArray[Any]  # of ENTRY

assert _FIXED.size <= _ENTRIES_AT and ENTRY_BYTES == 160


class BatchKind(IntEnum):
    PUT = 1
    DELETE = 2
    CLEAR = 3
    REVOKE = 4
    FILLER = 5


_TOMBSTONES = (BatchKind.DELETE, BatchKind.CLEAR, BatchKind.REVOKE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A batch as its header describes it. Offsets of entries count from the start of the batch."""

    kind: BatchKind
    segment: int
    offset: int
    header_bytes: int
    total_bytes: int
    seq: int
    settled: int
    space: Space
    entries: Entries

    @property
    def end(self) -> int:
        return self.offset + self.total_bytes

    def keys(self) -> list[bytes]:
        return split(self.entries["key"])


def split(column: npt.NDArray[np.uint8]) -> list[bytes]:
    """The rows of a two-dimensional column of bytes, each as one value."""
    values: list[bytes] = np.ascontiguousarray(column).view(f"V{column.shape[1]}").reshape(-1).tolist()
    return values


def levels_of(entries: Entries) -> npt.NDArray[np.uint8]:
    """The levels of the values of a batch when it was written."""
    levels: npt.NDArray[np.uint8] = np.array(_LEVELS, np.uint8)[entries["flags"]]
    return levels


def inline_bytes(length: int) -> int:
    """The bytes that a value takes up inside the header; 0 if it has blocks of its own."""
    return -(-length // 8) * 8 if length <= INLINE_BYTES else 0


def footprint(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that values take up on disk, with their entries."""
    return ENTRY_BYTES + np.where(lengths <= INLINE_BYTES, -(-lengths // 8) * 8, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES)


def header_size(num_entries: int, inline: int) -> int:
    return up_to_block(_ENTRIES_AT + num_entries * ENTRY_BYTES + inline)


def inline_start(num_entries: int) -> int:
    """Where the small values begin in a header."""
    return _ENTRIES_AT + num_entries * ENTRY_BYTES


# ---- on disk ------------------------------------------------------------------------------------


def write_header(batch: Batch, into: memoryview, *, seed: int) -> None:
    """Fills a header in which only the small values are in place. `into` has exactly its length."""
    assert len(into) == batch.header_bytes, f"{len(into)=} {batch.header_bytes=}"
    space = batch.space
    _FIXED.pack_into(
        into, 0, MAGIC, 0, FORMAT_VERSION, batch.kind, len(batch.entries), batch.header_bytes, _store_mark(seed), batch.segment,
        batch.offset, batch.total_bytes, batch.seq, batch.settled, space.digest, space.tenant.encode(), space.label.encode(),
    )  # fmt: skip
    into[_ENTRIES_AT : inline_start(len(batch.entries))] = batch.entries.tobytes()
    struct.pack_into("<Q", into, len(MAGIC), xxhash.xxh3_64_intdigest(into[_CHECKED_FROM:], seed))


def is_of_another_store(block: memoryview, *, seed: int) -> bool:
    """Whether a block begins a header that another store wrote. Old headers do not identify their store."""
    if not claimed_header_bytes(block):
        return False
    mark = struct.unpack_from("<I", block, _STORE_MARK_AT)[0]
    return mark not in (0, _store_mark(seed))


def _store_mark(seed: int) -> int:
    """A number that identifies a store; never 0."""
    return xxhash.xxh3_64_intdigest(b"stepwell store", seed) % (2**32 - 1) + 1


def claimed_header_bytes(block: memoryview) -> int:
    """The length of a header as claimed in its first block; 0 if it is not one of ours. Nothing is verified yet."""
    if len(block) < BLOCK_BYTES or block[: len(MAGIC)] != MAGIC:
        return 0
    version, header_bytes = struct.unpack_from("<H", block, 16)[0], struct.unpack_from("<I", block, 24)[0]
    usable = version == FORMAT_VERSION and 0 < header_bytes <= MAX_HEADER_BYTES and header_bytes % BLOCK_BYTES == 0
    return int(header_bytes) if usable else 0


def parse_header(header: memoryview, *, seed: int, segment: int, offset: int, segment_bytes: int) -> Batch | None:
    """The batch that a whole header describes; None unless it verifies and was written for exactly this place."""
    if not header or claimed_header_bytes(header) != len(header):
        return None
    if xxhash.xxh3_64_intdigest(header[_CHECKED_FROM:], seed) != struct.unpack_from("<Q", header, len(MAGIC))[0]:
        return None
    (_, _, _, kind, count, header_bytes, _, at_segment, at_offset, total, seq, settled, digest, tenant, label) = (
        _FIXED.unpack_from(header)
    )
    placed = at_segment == segment and at_offset == offset and total % BLOCK_BYTES == 0
    if not placed or not header_bytes <= total <= segment_bytes - offset or inline_start(count) > header_bytes or settled >= seq:
        return None
    if seq >= SEQ_END:
        return None
    try:
        kind = BatchKind(kind)
        space = Space(digest=digest, tenant=tenant.rstrip(b"\0").decode(), label=label.rstrip(b"\0").decode())
    except ValueError:
        return None
    entries = np.frombuffer(header, ENTRY, count, _ENTRIES_AT).copy()
    if kind is BatchKind.PUT and not _values_fit(entries, header_bytes, total):
        return None
    if kind is not BatchKind.PUT and int(entries["as_of"].max(initial=0)) > seq:  # effective from its own batch at the latest
        return None
    return Batch(
        kind=kind, segment=segment, offset=offset, header_bytes=header_bytes, total_bytes=total, seq=seq, settled=settled,
        space=space, entries=entries,
    )  # fmt: skip


def _values_fit(entries: Entries, header_bytes: int, total: int) -> bool:
    """Whether every value lies where values may lie and has a valid level, and no key is repeated."""
    if int(entries["flags"].max(initial=0)) >= len(_LEVELS):
        return False
    starts, lengths = entries["offset"], entries["length"]
    if not bool(np.all((lengths <= total) & (starts <= total))):  # so that the sums below cannot overflow
        return False
    ends, small = starts + lengths, lengths <= INLINE_BYTES
    inside = (starts >= inline_start(len(entries))) & (ends <= header_bytes)
    apart = (starts >= header_bytes) & (ends <= total) & (starts % BLOCK_BYTES == 0)
    return bool(np.all(np.where(small, inside, apart))) and len(set(split(entries["key"]))) == len(entries)


# ---- tombstones ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    key: bytes  # of revoked batches: the first and the last; of a clear: zeros
    since: int = 0  # it hides nothing older
    as_of: int = HOLDS_FROM_NOW  # it hides nothing of this seq or younger


@dataclass(frozen=True, slots=True, kw_only=True)
class TombstoneGroup:
    """Tombstones that can share one batch."""

    kind: BatchKind
    space: Space
    tombstones: list[Tombstone]


def has_tombstones(batch: Batch) -> bool:
    return batch.kind in _TOMBSTONES


def revoking(numbers: range) -> Tombstone:
    """The tombstone that revokes batches by their numbers."""
    return Tombstone(key=struct.pack("<QQ", numbers.start, numbers.stop).ljust(KEY_BYTES, b"\0"), as_of=numbers.stop)


def revoked_by(batch: Batch) -> list[range]:
    """The numbers of batches that this one revokes."""
    keys = split(batch.entries["key"]) if batch.kind is BatchKind.REVOKE else []
    return [range(*struct.unpack_from("<QQ", key)) for key in keys]


# ---- packing: batches that have no place yet ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """A batch that has no place yet."""

    kind: BatchKind
    space: Space
    entries: Entries
    header_bytes: int
    total_bytes: int
    values: Sequence[memoryview] = ()


def pack_values(space: Space, writes: Sequence[Write], free_bytes: int) -> PackedBatch | None:
    """A batch of the first values that fit; None if not even one does."""
    values = [write.data for write in writes]
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    small = lengths <= INLINE_BYTES
    inline = np.cumsum(np.where(small, -(-lengths // 8) * 8, 0))  # inside the header, up to and including each
    blocks = np.cumsum(np.where(small, 0, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES))  # behind it
    headers = -(-(inline_start(0) + ENTRY_BYTES * np.arange(1, len(writes) + 1) + inline) // BLOCK_BYTES) * BLOCK_BYTES
    fits = (headers <= MAX_HEADER_BYTES) & (headers + blocks <= free_bytes)
    count = len(writes) if fits[-1] else int(np.argmin(fits))  # sizes only grow
    if not count:
        return None
    chosen, header_bytes = writes[:count], int(headers[count - 1])
    entries = _entries(chosen)
    entries["length"] = lengths[:count]
    before = np.concatenate((np.zeros((2, 1), np.int64), np.stack((inline, blocks))[:, : count - 1]), axis=1)
    entries["offset"] = np.where(small[:count], inline_start(count) + before[0], header_bytes + before[1])
    return PackedBatch(
        kind=BatchKind.PUT, space=space, entries=entries, header_bytes=header_bytes,
        total_bytes=header_bytes + int(blocks[count - 1]), values=values[:count],
    )  # fmt: skip


def _entries(writes: Sequence[Write]) -> Entries:
    entries = np.zeros(len(writes), ENTRY)
    keys, _, stamps, parents, depths, _, levels = zip(*writes, strict=True)
    for name, width, parts in (("key", KEY_BYTES, keys), ("parent", KEY_BYTES, parents), ("stamp", STAMP_BYTES, stamps)):
        entries[name] = np.frombuffer(b"".join(parts), np.uint8).reshape(len(writes), width)
    entries["depth"] = depths
    entries["flags"] = _FLAGS[list(levels)]
    return entries


def pack_tombstones(kind: BatchKind, space: Space, tombstones: Sequence[Tombstone], free_bytes: int) -> PackedBatch | None:
    """A batch of the first tombstones that fit, all of one kind and space; None if not even one does."""
    usable = min(free_bytes, MAX_HEADER_BYTES) // BLOCK_BYTES * BLOCK_BYTES - inline_start(0)
    count = min(len(tombstones), usable // ENTRY_BYTES)
    if count <= 0:
        return None
    entries = np.zeros(count, ENTRY)
    entries["key"] = np.frombuffer(b"".join(tombstone.key for tombstone in tombstones[:count]), np.uint8).reshape(count, 32)
    entries["as_of"] = [tombstone.as_of for tombstone in tombstones[:count]]
    entries["offset"] = [tombstone.since for tombstone in tombstones[:count]]
    size = header_size(count, 0)
    return PackedBatch(kind=kind, space=space, entries=entries, header_bytes=size, total_bytes=size)
