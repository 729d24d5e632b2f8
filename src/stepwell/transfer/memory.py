"""The bytes of one tier on one rank: one block, seen as an ordinary table of pages for each kind.

Host memory is mapped once, page-aligned and touched at the start, so that no later write faults. Knows
nothing of which pages are in use.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.memory.layout import ArenaLayout

Bytes = npt.NDArray[np.uint8]


class PageMemory:
    """A block of host memory cut as its arena's layout says."""

    def __init__(self, spec: ModelSpec, layout: ArenaLayout) -> None:
        self._block = mmap.mmap(-1, layout.size_bytes)
        flat = np.frombuffer(self._block, np.uint8)
        flat[:: mmap.PAGESIZE] = 0  # touch every page of the machine now, not under a request
        self._rows = {
            kind: flat[: layout.rows(kind) * stride].reshape(-1, stride)[:, : spec.object_bytes(kind)]
            for kind, stride in layout.strides.items()
        }

    def rows(self, kind: Kind) -> Bytes:
        """All pages of a kind, `[page id][byte]`; writing through it writes the memory."""
        return self._rows[kind]

    @property
    def block(self) -> memoryview:
        """All of it, for stores that must know memory before they may use it."""
        return memoryview(self._block)

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy."""
        return memoryview(self._rows[kind][page])
