"""What the log must remember besides values: deletes, clears and revoked batches.

    K written    K deleted as of 15    K written again
    ---- 5 -------------- 15 ---------------- 25 ----> seq

A mark is needed as long as any other segment holds what it hides: without it, a value deleted there would come back when
the segments are read anew. It says how old that can be, so a delete soon after its write is needed for a short time only.
Reclaim carries marks that are needed; in the oldest segment none is.

Marks live in the log only, where reclaim reads them again: however many there are, memory and snapshots hold no more
than how many each segment has. Revoked batches, which are few, are known by their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepwell.store.api import KEY_BYTES, Space
from stepwell.store.log.format import SEQ_END, Batch, Kind, split

if TYPE_CHECKING:
    from stepwell.store.log.segments import Segment

_MARKS = (Kind.DELETE, Kind.CLEAR, Kind.REVOKE)


HOLDS_FROM_NOW = 0  # as_of of a mark that is new: becomes the number of its batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    key: bytes  # of revoked batches: the first and the last; of a clear: zeros
    since: int = 0  # nothing that it hides is older
    as_of: int = HOLDS_FROM_NOW  # nothing that it hides is as young


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Marks that may stand in one batch."""

    kind: Kind
    space: Space
    marks: list[Mark]


def is_marks(batch: Batch) -> bool:
    return batch.kind in _MARKS


def needed(batches: Iterable[Batch], others: Sequence[Segment]) -> list[Group]:
    """The marks of one segment that must outlive it, for all the others there are; one for each key."""
    order = sorted(others, key=lambda segment: segment.first_seq)
    firsts = np.array([segment.first_seq for segment in order], np.int64)
    lasts = np.maximum.accumulate(np.array([-1, *(segment.last_seq for segment in order)], np.int64))
    found: dict[tuple[Kind, bytes], tuple[Space, dict[bytes, Mark]]] = {}
    for batch in filter(is_marks, batches):
        as_of = batch.entries["as_of"].astype(np.int64)
        since = np.minimum(batch.entries["offset"], batch.entries["as_of"]).astype(np.int64)
        # of the segments that begin before it holds, does any end after what it hides begins?
        wanted = lasts[np.searchsorted(firsts, as_of)] >= since
        if batch.kind is Kind.REVOKE:  # a batch that failed counts for no segment's last
            wanted = as_of > firsts.min(initial=SEQ_END)
        _, latest = found.setdefault((batch.kind, batch.space.digest), (batch.space, {}))
        for key, begin, end in zip(
            split(batch.entries["key"][wanted]), since[wanted].tolist(), as_of[wanted].tolist(), strict=True
        ):
            known = latest.get(key, Mark(key=key, since=begin, as_of=end))
            latest[key] = Mark(key=key, since=min(begin, known.since), as_of=max(end, known.as_of))
    return [Group(kind=kind, space=space, marks=list(marks.values())) for (kind, _), (space, marks) in found.items() if marks]


def revoking(numbers: range) -> Mark:
    """The mark that revokes batches by their numbers."""
    return Mark(key=struct.pack("<QQ", numbers.start, numbers.stop).ljust(KEY_BYTES, b"\0"), as_of=numbers.stop)


def revoked_by(batch: Batch) -> list[range]:
    """The numbers of batches that must not be believed because of this one."""
    keys = split(batch.entries["key"]) if batch.kind is Kind.REVOKE else []
    return [range(*struct.unpack_from("<QQ", key)) for key in keys]
