"""What the log must remember besides values: deletes, clears and revoked batches. No files.

    K written    K deleted as of 15    K written again
    ---- 5 -------------- 15 ---------------- 25 ----> seq

A mark is needed as long as any other segment holds batches older than it: without it, a value deleted there would come
back when the segments are read anew. Reclaim carries marks that are needed; in the oldest segment none is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from stepwell.store.api import KEY_BYTES, Space
from stepwell.store.log.format import Batch, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    kind: Kind
    space: Space
    key: bytes  # of revoked batches: the first and the last; of a clear: zeros
    as_of: int
    segment: int  # where it is written


_Name = tuple[Kind, bytes, bytes]


class Marks:
    """The marks that were not outlived yet, the latest for each key."""

    def __init__(self) -> None:
        self._marks: dict[_Name, Mark] = {}
        self._names: dict[int, set[_Name]] = {}  # of the marks written in a segment

    def __len__(self) -> int:
        return len(self._marks)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks.values())

    def take(self, batch: Batch) -> None:
        """Remembers what a batch of marks says."""
        for key, as_of in zip(batch.keys(), batch.entries["as_of"].tolist(), strict=True):
            self.add(Mark(kind=batch.kind, space=batch.space, key=key, as_of=as_of, segment=batch.segment))

    def add(self, mark: Mark) -> None:
        name = (mark.kind, mark.space.digest, mark.key)
        known = self._marks.get(name)
        if known is None or known.as_of <= mark.as_of:
            if known is not None:
                self._names[known.segment].discard(name)
            self._marks[name] = mark
            self._names.setdefault(mark.segment, set()).add(name)

    def num_within(self, segment: int) -> int:
        return len(self._names.get(segment, ()))

    def within(self, segment: int) -> list[Mark]:
        return [self._marks[name] for name in self._names.get(segment, ())]

    def needed(self, segment: int, oldest_elsewhere: int) -> list[Mark]:
        """Those written in a segment that must outlive it; `oldest_elsewhere` is the first seq of any other segment."""
        return [mark for mark in self.within(segment) if mark.as_of > oldest_elsewhere]

    def forget(self, segment: int) -> None:
        """A segment is no more, and the marks in it neither."""
        for name in self._names.pop(segment, ()):
            del self._marks[name]

    def revoked(self) -> list[range]:
        """The numbers of batches that must not be believed."""
        return [revoked_by(mark.key) for mark in self._marks.values() if mark.kind is Kind.REVOKE]


def revoking(numbers: range) -> bytes:
    """The key that revokes batches by their numbers."""
    return struct.pack("<QQ", numbers.start, numbers.stop).ljust(KEY_BYTES, b"\0")


def revoked_by(key: bytes) -> range:
    return range(*struct.unpack_from("<QQ", key))
