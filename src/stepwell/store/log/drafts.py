"""Batches that have no place yet: which values or marks go together, and where in the batch each will lie. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.store.api import STAMP_BYTES, Space, Write
from stepwell.store.log.disk import BLOCK_BYTES, up_to_block
from stepwell.store.log.format import (
    ENTRY,
    ENTRY_BYTES,
    INLINE_BYTES,
    MAX_HEADER_BYTES,
    Entries,
    Kind,
    header_size,
    inline_bytes,
    inline_start,
)

HOLDS_FROM_NOW = 0  # as_of of a mark that is new: becomes the number of its batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A batch that has no place yet."""

    kind: Kind
    space: Space
    entries: Entries
    header_bytes: int
    total_bytes: int
    values: Sequence[memoryview] = ()


def draft_values(space: Space, writes: Sequence[Write], room: int) -> Draft | None:
    """A batch of as many of the first values as fit; None when not one does."""
    count, inline, payload = 0, 0, 0
    for write in writes:
        small = inline_bytes(len(write.data))
        blocks = 0 if len(write.data) <= INLINE_BYTES else up_to_block(len(write.data))
        header = header_size(count + 1, inline + small)
        if header > MAX_HEADER_BYTES or header + payload + blocks > room:
            break
        count, inline, payload = count + 1, inline + small, payload + blocks
    if not count:
        return None
    chosen, header_bytes = writes[:count], header_size(count, inline)
    return Draft(
        kind=Kind.PUT, space=space, entries=_entries(chosen, header_bytes), header_bytes=header_bytes,
        total_bytes=header_bytes + payload, values=[write.data for write in chosen],
    )  # fmt: skip


def _entries(writes: Sequence[Write], header_bytes: int) -> Entries:
    entries = np.zeros(len(writes), ENTRY)
    for name, width, parts in (
        ("key", 32, [write.key for write in writes]),
        ("parent", 32, [write.parent for write in writes]),
        ("stamp", STAMP_BYTES, [write.stamp for write in writes]),
    ):
        entries[name] = np.frombuffer(b"".join(parts), np.uint8).reshape(len(writes), width)
    entries["depth"] = [write.depth for write in writes]
    entries["length"] = [len(write.data) for write in writes]
    small, large, offsets = inline_start(len(writes)), header_bytes, []
    for write in writes:
        if len(write.data) <= INLINE_BYTES:
            offsets.append(small)
            small += inline_bytes(len(write.data))
        else:
            offsets.append(large)
            large += up_to_block(len(write.data))
    entries["offset"] = offsets
    return entries


def draft_marks(kind: Kind, space: Space, keys: Sequence[bytes], as_of: Sequence[int], room: int) -> Draft | None:
    """A batch of as many of the first marks as fit; None when not one does."""
    count = min(len(keys), (min(room, MAX_HEADER_BYTES) // BLOCK_BYTES * BLOCK_BYTES - inline_start(0)) // ENTRY_BYTES)
    if count <= 0:
        return None
    entries = np.zeros(count, ENTRY)
    entries["key"] = np.frombuffer(b"".join(keys[:count]), np.uint8).reshape(count, 32)
    entries["as_of"] = as_of[:count]
    size = header_size(count, 0)
    return Draft(kind=kind, space=space, entries=entries, header_bytes=size, total_bytes=size)
