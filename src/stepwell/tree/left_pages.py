"""Pages of victims that have left the tree and that the arena has not been told about: what is left in use beside them.

Counts; frees nothing until it is told to.
"""

from __future__ import annotations

import numpy as np

from stepwell.base.ids import Kind
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import Arena

WINDOW = Kind.WINDOW


class SlabUse(dict[int, int]):
    """How many pages of each slab of a kind are in use, those that have left the tree taken off. Counted from the first on."""

    def __init__(self, arena: Arena, kind: Kind) -> None:
        self.stride, self.slab_bytes = arena.layout.strides[kind], arena.layout.slab_bytes
        self._arena, self._kind = arena, kind

    def __missing__(self, slab: int) -> int:
        return self._arena.used_in_slab(self._kind, slab)


class SharedWindows:
    """Window pages of checkpoints that have left the tree. Neighbours share them: each goes with the last that has it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._ids: list[PageIds] = []
        self.shared_bytes = 0  # of the last that left: what others have too
        self._refs, self._kept = arena.refs[WINDOW].data, arena.kept[WINDOW].data
        self._left: dict[int, int] = {}  # by page that checkpoints share, how many of them are left
        self._page_bytes = arena.layout.strides[WINDOW]
        self._until_unspared = arena.windows_until_unspared
        self._num_freed = 0

    @property
    def are_unspared(self) -> bool:
        """Whether so many came back that prefix pages may take a slab more."""
        return self._until_unspared is not None and self._num_freed >= self._until_unspared

    def let_go(self, ids: PageIds) -> list[int]:
        """A checkpoint with these pages left: returns those that nobody refers to any more."""
        refs, kept, left = self._refs, self._kept, self._left
        freed, num_shared = [], 0
        for each in ids.tolist():
            count = kept[each]
            if count > 1:
                left[each] = others = left.get(each, count) - 1
                if others:
                    num_shared += 1
                    continue
            if refs[each] == count:
                freed.append(each)
        self._ids.append(ids)
        self._num_freed += len(freed)
        self.shared_bytes = num_shared * self._page_bytes
        return freed

    def give_back(self) -> None:
        """Tells the arena. One checkpoint has no page twice, which is sooner done."""
        if len(self._ids) == 1:
            self._arena.drop(WINDOW, self._ids[0])
        else:
            self._arena.drop_repeated(WINDOW, np.concatenate(self._ids))
