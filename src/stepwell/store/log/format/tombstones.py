"""What the log must remember besides values: deletes, clears and revoked batches.

    K written    K deleted as of 15    K written again
    ---- 5 -------------- 15 ---------------- 25 ----> seq

A tombstone is needed as long as any other segment holds what it hides: without it, a value deleted there would come back when
the segments are read anew. It says how old that can be, so a delete soon after its write is needed for a short time only.
Reclaim copies tombstones that are needed; in the oldest segment none is.

Tombstones live in the log only, where reclaim reads them again: however many there are, memory and snapshots hold no more
than how many each segment has. Revoked batches, which are few, are known by their numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from stepwell.store.api import KEY_BYTES, Space
from stepwell.store.log.format.batch import Batch, BatchKind, split

_TOMBSTONES = (BatchKind.DELETE, BatchKind.CLEAR, BatchKind.REVOKE)
HOLDS_FROM_NOW = 0  # as_of of a tombstone that is new: becomes the number of its batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    key: bytes  # of revoked batches: the first and the last; of a clear: zeros
    since: int = 0  # nothing that it hides is older
    as_of: int = HOLDS_FROM_NOW  # nothing that it hides is as young


@dataclass(frozen=True, slots=True, kw_only=True)
class TombstoneGroup:
    """Tombstones that may stand in one batch."""

    kind: BatchKind
    space: Space
    tombstones: list[Tombstone]


def has_tombstones(batch: Batch) -> bool:
    return batch.kind in _TOMBSTONES


def revoking(numbers: range) -> Tombstone:
    """The tombstone that revokes batches by their numbers."""
    return Tombstone(key=struct.pack("<QQ", numbers.start, numbers.stop).ljust(KEY_BYTES, b"\0"), as_of=numbers.stop)


def revoked_by(batch: Batch) -> list[range]:
    """The numbers of batches that must not be believed because of this one."""
    keys = split(batch.entries["key"]) if batch.kind is BatchKind.REVOKE else []
    return [range(*struct.unpack_from("<QQ", key)) for key in keys]
