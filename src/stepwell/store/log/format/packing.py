"""Batches that have no place yet: which values or tombstones go together, and where in the batch each will lie. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.store.api import KEY_BYTES, STAMP_BYTES, Space, Write
from stepwell.store.log.disk.files import BLOCK_BYTES
from stepwell.store.log.format.batch import (
    ENTRY,
    ENTRY_BYTES,
    INLINE_BYTES,
    MAX_HEADER_BYTES,
    BatchKind,
    Entries,
    header_size,
    inline_start,
)
from stepwell.store.log.format.tombstones import Tombstone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """A batch that has no place yet."""

    kind: BatchKind
    space: Space
    entries: Entries
    header_bytes: int
    total_bytes: int
    values: Sequence[memoryview] = ()


def pack_values(space: Space, writes: Sequence[Write], room: int) -> PackedBatch | None:
    """A batch of as many of the first values as fit; None when not one does."""
    lengths = np.array([len(write.data) for write in writes], dtype=np.int64)
    small = lengths <= INLINE_BYTES
    inline = np.cumsum(np.where(small, -(-lengths // 8) * 8, 0))  # inside the header, up to and with each
    blocks = np.cumsum(np.where(small, 0, -(-lengths // BLOCK_BYTES) * BLOCK_BYTES))  # behind it
    headers = -(-(inline_start(0) + ENTRY_BYTES * np.arange(1, len(writes) + 1) + inline) // BLOCK_BYTES) * BLOCK_BYTES
    fits = (headers <= MAX_HEADER_BYTES) & (headers + blocks <= room)
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
        total_bytes=header_bytes + int(blocks[count - 1]), values=[write.data for write in chosen],
    )  # fmt: skip


def _entries(writes: Sequence[Write]) -> Entries:
    entries = np.zeros(len(writes), ENTRY)
    keys, _, stamps, parents, depths, _ = zip(*writes, strict=True)
    for name, width, parts in (("key", KEY_BYTES, keys), ("parent", KEY_BYTES, parents), ("stamp", STAMP_BYTES, stamps)):
        entries[name] = np.frombuffer(b"".join(parts), np.uint8).reshape(len(writes), width)
    entries["depth"] = depths
    return entries


def pack_tombstones(kind: BatchKind, space: Space, tombstones: Sequence[Tombstone], room: int) -> PackedBatch | None:
    """A batch of as many of the first tombstones, all of one kind and space, as fit; None when not one does."""
    count = min(len(tombstones), (min(room, MAX_HEADER_BYTES) // BLOCK_BYTES * BLOCK_BYTES - inline_start(0)) // ENTRY_BYTES)
    if count <= 0:
        return None
    entries = np.zeros(count, ENTRY)
    entries["key"] = np.frombuffer(b"".join(tombstone.key for tombstone in tombstones[:count]), np.uint8).reshape(count, 32)
    entries["as_of"] = [tombstone.as_of for tombstone in tombstones[:count]]
    entries["offset"] = [tombstone.since for tombstone in tombstones[:count]]
    size = header_size(count, 0)
    return PackedBatch(kind=kind, space=space, entries=entries, header_bytes=size, total_bytes=size)
