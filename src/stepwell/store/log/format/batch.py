"""Batches as bytes: the only thing a segment holds. Pure; takes any bytes and believes none that do not verify.

    | header, a multiple of 4 KiB                                   | payload | payload | ...    each at a multiple of 4 KiB
    | fixed 320 | entry 160 | entry 160 | ... | small values | zeros |

A batch belongs to one space. Its header names the segment and the offset it was written for, so bytes of a segment's
former life are never believed, and is covered by an XXH3-64 seeded with a secret of the store, so payloads cannot pass for
headers. `seq` numbers batches upwards for ever; all batches up to `settled` were synced, or revoked, before this
one was written: only later ones can be torn.

    PUT      values                                         DELETE   keys whose values before `as_of` do not count
    CLEAR    nothing in this space before `as_of` counts    REVOKE   batches (by seq) that failed and must not be believed
    FILLER   nothing: covers a place that was damaged

The `offset` of a tombstone is the seq that nothing it hides is older than.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stepwell.store.api import MAX_LABEL_BYTES, MAX_TENANT_BYTES, Space
from stepwell.store.log.disk.files import BLOCK_BYTES, up_to_block

FORMAT_VERSION = 1
MAGIC = b"SWbatch\x01"
MAX_HEADER_BYTES = 1 << 20
SEQ_END = 2**62  # numbers of batches are below: whatever says it is above is not ours
INLINE_BYTES = 1024  # values up to this many bytes live in the header: a manifest must not cost a whole block
NO_SPACE = Space(digest=bytes(32))

_FIXED = struct.Struct(f"<8sQHHIIIQQQQQ32s{MAX_TENANT_BYTES}s{MAX_LABEL_BYTES}s")
_ENTRIES_AT = 320
_CHECKED_FROM = 16  # magic and checksum are not part of what is checked
ENTRY = np.dtype(
    [("key", "u1", 32), ("parent", "u1", 32), ("stamp", "u1", 64), ("offset", "<u8"), ("length", "<u8"), ("as_of", "<u8"),
     ("depth", "<u4"), ("flags", "<u4")]
)  # fmt: skip
ENTRY_BYTES = ENTRY.itemsize
Entries = npt.NDArray[Any]  # of ENTRY

assert _FIXED.size <= _ENTRIES_AT and ENTRY_BYTES == 160


class BatchKind(IntEnum):
    PUT = 1
    DELETE = 2
    CLEAR = 3
    REVOKE = 4
    FILLER = 5


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


def inline_bytes(length: int) -> int:
    """What a value takes up inside the header; 0 when it has blocks of its own."""
    return -(-length // 8) * 8 if length <= INLINE_BYTES else 0


def footprint(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that values take up on disk, with their entries."""
    return ENTRY_BYTES + np.where(lengths <= INLINE_BYTES, -(-lengths // 8) * 8, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES)


def header_size(num_entries: int, inline: int) -> int:
    return up_to_block(_ENTRIES_AT + num_entries * ENTRY_BYTES + inline)


def inline_start(num_entries: int) -> int:
    """Where in a header its small values begin."""
    return _ENTRIES_AT + num_entries * ENTRY_BYTES


def write_header(batch: Batch, into: memoryview, *, seed: int) -> None:
    """Fills a header whose small values, and nothing else, are in place already. `into` is exactly as long as it."""
    assert len(into) == batch.header_bytes, f"{len(into)=} {batch.header_bytes=}"
    space = batch.space
    _FIXED.pack_into(
        into, 0, MAGIC, 0, FORMAT_VERSION, batch.kind, len(batch.entries), batch.header_bytes, 0, batch.segment, batch.offset,
        batch.total_bytes, batch.seq, batch.settled, space.digest, space.tenant.encode(), space.label.encode(),
    )  # fmt: skip
    into[_ENTRIES_AT : inline_start(len(batch.entries))] = batch.entries.tobytes()
    struct.pack_into("<Q", into, len(MAGIC), xxhash.xxh3_64_intdigest(into[_CHECKED_FROM:], seed))


def claimed_header_bytes(block: memoryview) -> int:
    """How long a header says it is, from its first block; 0 when it is none of ours. Nothing is verified yet."""
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
    if kind is not BatchKind.PUT and int(entries["as_of"].max(initial=0)) > seq:  # it holds from its own batch on at the latest
        return None
    return Batch(
        kind=kind, segment=segment, offset=offset, header_bytes=header_bytes, total_bytes=total, seq=seq, settled=settled,
        space=space, entries=entries,
    )  # fmt: skip


def _values_fit(entries: Entries, header_bytes: int, total: int) -> bool:
    """Whether every value lies where values may lie, and no key comes twice."""
    starts, lengths = entries["offset"], entries["length"]
    if not bool(np.all((lengths <= total) & (starts <= total))):  # so that the sums below cannot overflow
        return False
    ends, small = starts + lengths, lengths <= INLINE_BYTES
    inside = (starts >= inline_start(len(entries))) & (ends <= header_bytes)
    apart = (starts >= header_bytes) & (ends <= total) & (starts % BLOCK_BYTES == 0)
    return bool(np.all(np.where(small, inside, apart))) and len(set(split(entries["key"]))) == len(entries)
