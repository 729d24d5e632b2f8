"""What the log must remember besides values: deletes, clears and revoked batches.

    K written    K deleted as of 15    K written again
    ---- 5 -------------- 15 ---------------- 25 ----> seq

A mark is needed as long as any other segment holds batches older than it: without it, a value deleted there would come
back when the segments are read anew. Reclaim carries marks that are needed; in the oldest segment none is.

Marks live in the log only, where reclaim reads them again: however many there are, memory and snapshots hold no more
than how many each segment has. Revoked batches, which are few, are known by their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.store.api import KEY_BYTES, Space
from stepwell.store.log.format import Batch, Kind, split

_MARKS = (Kind.DELETE, Kind.CLEAR, Kind.REVOKE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    kind: Kind
    space: Space
    key: bytes  # of revoked batches: the first and the last; of a clear: zeros
    as_of: int


def is_marks(batch: Batch) -> bool:
    return batch.kind in _MARKS


def needed(batches: Iterable[Batch], oldest_elsewhere: int) -> list[Mark]:
    """The marks of one segment that must outlive it, the latest for each key; `oldest_elsewhere`: the first seq of any other."""
    latest: dict[tuple[Kind, bytes, bytes], Mark] = {}
    for batch in filter(is_marks, batches):
        for key, as_of in zip(batch.keys(), batch.entries["as_of"].tolist(), strict=True):
            name = (batch.kind, batch.space.digest, key)
            if as_of > oldest_elsewhere and (name not in latest or latest[name].as_of <= as_of):
                latest[name] = Mark(kind=batch.kind, space=batch.space, key=key, as_of=as_of)
    return list(latest.values())


def revoking(numbers: range) -> bytes:
    """The key that revokes batches by their numbers."""
    return struct.pack("<QQ", numbers.start, numbers.stop).ljust(KEY_BYTES, b"\0")


def revoked_by(batch: Batch) -> list[range]:
    """The numbers of batches that must not be believed because of this one."""
    keys = split(batch.entries["key"]) if batch.kind is Kind.REVOKE else []
    return [range(*struct.unpack_from("<QQ", key)) for key in keys]
