"""Which keys were given up while their bytes stay on disk: without a mark, a delete of one of them would not last. No files.

Remembered since the log was opened, by eight bytes of each key. What an earlier opening gave up is only known by number:
until those segments are written over, any key may be a ghost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stepwell.store.api import KEY_BYTES
from stepwell.store.log.columns import Bytes2D
from stepwell.store.log.segments import Segment


class Ghosts:
    def __init__(self) -> None:
        self._prints: dict[int, set[bytes]] = {}

    def add(self, segment: int, keys: Bytes2D) -> None:
        self._prints.setdefault(segment, set()).update(_prints(keys))

    def forget(self, segment: int) -> None:
        """The bytes of a segment are no more."""
        self._prints.pop(segment, None)

    def among(self, keys: Sequence[bytes], segments: Iterable[Segment]) -> set[bytes]:
        """Those of the keys that may have bytes in one of these segments."""
        found: set[bytes] = set()
        for segment in segments:
            known = self._prints.get(segment.id, set())
            if segment.ghosts > len(known):
                return set(keys)
            found.update(key for key in keys if known and key[:8] in known)
        return found


def _prints(keys: Bytes2D) -> list[bytes]:
    assert keys.shape[1] == KEY_BYTES, f"{keys.shape=}"
    prints: list[bytes] = np.ascontiguousarray(keys[:, :8]).view("V8").reshape(-1).tolist()
    return prints
