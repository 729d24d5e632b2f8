"""Bytes on disk that belong to no value any more, and to no tombstone: evicted, or copied elsewhere. No files.

They would come back if their segment was read again, so a delete or a clear has to cover them. Recorded since the log was
opened, by space and eight bytes of each key. From earlier openings only the number of stale values is known: until those
segments are overwritten, any key may have stale bytes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stepwell.store.api import KEY_BYTES
from stepwell.store.log.format.batch import SEQ_END
from stepwell.store.log.state.columns import Rows
from stepwell.store.log.state.index import Index
from stepwell.store.log.state.segments import Segment


class StaleValues:
    def __init__(self) -> None:
        self._prints: dict[int, dict[bytes, set[bytes]]] = {}  # segment -> space -> keys
        self._known: dict[int, int] = {}  # segment -> the number of those

    def add(self, segment: Segment, index: Index, rows: Rows) -> None:
        """Records the values in these rows, of this segment, before they are removed or moved: their bytes stay."""
        segment.stale += len(rows)
        spaces, of_segment = index.columns.space[rows], self._prints.setdefault(segment.id, {})
        for number in np.unique(spaces).tolist():
            keys = index.columns.key[rows[spaces == number]]
            assert keys.shape[1] == KEY_BYTES, f"{keys.shape=}"
            prints = np.ascontiguousarray(keys[:, :8]).view("V8").reshape(-1).tolist()
            of_space = of_segment.setdefault(index.space(number).digest, set())
            before = len(of_space)
            of_space.update(prints)
            self._known[segment.id] = self._known.get(segment.id, 0) + len(of_space) - before

    def drop_segment(self, segment: int) -> None:
        """Drops a segment whose bytes no longer exist."""
        self._prints.pop(segment, None)
        self._known.pop(segment, None)

    def oldest(self, digest: bytes, keys: Sequence[bytes], segments: Iterable[Segment]) -> dict[bytes, int]:
        """The keys that may have bytes in one of these segments, each with the oldest possible seq."""
        found: dict[bytes, int] = {}
        for segment in segments:
            prints = self._prints.get(segment.id, {}).get(digest, set())
            unknown = self._has_unknown(segment)
            if unknown or prints:
                for key in keys:
                    if unknown or key[:8] in prints:
                        found[key] = min(found.get(key, segment.first_seq), segment.first_seq)
        return found

    def oldest_of_space(self, digest: bytes, segments: Iterable[Segment]) -> int:
        """The oldest possible seq of all stale bytes of a space; beyond all if it has none."""
        theirs = (s for s in segments if self._has_unknown(s) or digest in self._prints.get(s.id, {}))
        return min((segment.first_seq for segment in theirs), default=SEQ_END)

    def _has_unknown(self, segment: Segment) -> bool:
        return segment.stale > self._known.get(segment.id, 0)
