"""Free page ids of an arena, kept by slab: a slab serves one kind until it empties, then anyone may have it.

Low addresses are handed out first, so slabs at the high end drain and can change hands. Counts no
references and knows no page states.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np

from stepwell.base.ids import Kind
from stepwell.base.plan import NO_PAGES, PageIds
from stepwell.memory.layout import ArenaLayout


class _Slab:
    """A stack of free ids of the kind that holds this slab."""

    __slots__ = ("free", "kind", "num_free", "num_pages")

    def __init__(self, kind: Kind, ids: range) -> None:
        self.kind = kind
        self.num_pages = self.num_free = len(ids)
        self.free: PageIds = np.arange(ids.stop - 1, ids.start - 1, -1, dtype=np.int32)  # lowest id on top

    def pop(self, count: int) -> PageIds:
        self.num_free -= count
        return self.free[self.num_free : self.num_free + count][::-1].copy()

    def push(self, ids: PageIds) -> None:
        self.free[self.num_free : self.num_free + len(ids)] = ids
        self.num_free += len(ids)


class SlabPool:
    """Takes and gives page ids in batches, all or nothing."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._slabs: list[_Slab | None] = [None] * layout.num_slabs
        # Slabs that nobody holds; the tail of the arena may be too short to be of use to anyone.
        self._idle = np.array(
            [any(layout.pages_of_slab(slab, kind) for kind in layout.strides) for slab in range(layout.num_slabs)]
        )
        self._num_idle = int(self._idle.sum())
        self._open: dict[Kind, list[int]] = {kind: [] for kind in layout.strides}  # heaps of slabs that may have free pages
        self._listed: dict[Kind, set[int]] = {kind: set() for kind in layout.strides}  # what is in those heaps
        self._free = dict.fromkeys(layout.strides, 0)  # free pages in slabs that the kind holds
        self._used = dict.fromkeys(layout.strides, 0)

    def used(self, kind: Kind) -> int:
        return self._used[kind]

    def free(self, kind: Kind) -> int:
        """Free pages in the slabs that `kind` holds, and in those it could still have."""
        return self._free[kind] + self._num_idle * (self._layout.slab_bytes // self._layout.strides[kind])

    def fits(self, need: Mapping[Kind, int]) -> bool:
        return self._choose(need) is not None

    def take(self, need: Mapping[Kind, int]) -> dict[Kind, PageIds] | None:
        """Ids for every kind named, lowest addresses first; or None, with nothing changed."""
        chosen = self._choose(need)
        if chosen is None:
            return None
        for slab, kind in chosen.items():
            self._assign(slab, kind)
        return {kind: self._pop(kind, count) for kind, count in need.items()}

    def give(self, kind: Kind, ids: PageIds) -> None:
        """Takes ids back. A slab whose last page comes back is nobody's."""
        assert len(ids), "gave back no pages"
        self._used[kind] -= len(ids)
        if len(ids) == 1:
            self._push(int(ids[0]) * self._layout.strides[kind] // self._layout.slab_bytes, kind, ids)
            return
        slabs = ids.astype(np.int64) * self._layout.strides[kind] // self._layout.slab_bytes
        first = int(slabs[0])
        if (slabs == first).all():
            self._push(first, kind, ids)
            return
        order = np.argsort(slabs, kind="stable")
        slabs, ids = slabs[order], ids[order]
        cuts = ((slabs[1:] != slabs[:-1]).nonzero()[0] + 1).tolist()
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            self._push(int(slabs[start]), kind, ids[start:end])

    # ---- inside -----------------------------------------------------------------------------------

    def _choose(self, need: Mapping[Kind, int]) -> dict[int, Kind] | None:
        """Which idle slabs to hand to which kind so that `need` can be met; None when it cannot."""
        chosen: dict[int, Kind] = {}
        for kind, count in need.items():
            if count > self._free[kind]:
                break
        else:
            return chosen
        if not self._num_idle:
            return None
        short = {kind: count - self._free[kind] for kind, count in need.items() if count > self._free[kind]}
        for kind in sorted(short, key=lambda kind: -self._layout.strides[kind]):
            missing = short[kind]
            for slab in np.flatnonzero(self._idle).tolist():
                if missing <= 0:
                    break
                pages = len(self._layout.pages_of_slab(slab, kind))
                if pages and slab not in chosen:
                    chosen[slab] = kind
                    missing -= pages
            if missing > 0:
                return None
        return chosen

    def _assign(self, slab: int, kind: Kind) -> None:
        fresh = _Slab(kind, self._layout.pages_of_slab(slab, kind))
        self._slabs[slab] = fresh
        self._idle[slab] = False
        self._num_idle -= 1
        self._free[kind] += fresh.num_free
        self._list(slab, kind)

    def _list(self, slab: int, kind: Kind) -> None:
        if slab not in self._listed[kind]:
            self._listed[kind].add(slab)
            heappush(self._open[kind], slab)

    def _pop(self, kind: Kind, count: int) -> PageIds:
        pieces = []
        self._free[kind] -= count
        self._used[kind] += count
        while count:
            number = self._open[kind][0]
            slab = self._slabs[number]
            if slab is None or slab.kind is not kind or not slab.num_free:
                self._listed[kind].discard(heappop(self._open[kind]))  # it filled up or changed hands since it was listed
                continue
            pieces.append(slab.pop(min(count, slab.num_free)))
            count -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else NO_PAGES.copy()

    def _push(self, number: int, kind: Kind, ids: PageIds) -> None:
        slab = self._slabs[number]
        assert slab is not None and slab.kind is kind, f"slab {number} does not belong to {kind.label}"
        slab.push(ids)
        self._free[kind] += len(ids)
        if slab.num_free == slab.num_pages:
            self._slabs[number] = None
            self._idle[number] = True
            self._num_idle += 1
            self._free[kind] -= slab.num_pages
        else:
            self._list(number, kind)

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self) -> None:
        for number, slab in enumerate(self._slabs):
            assert slab is None or not self._idle[number], f"slab {number} is both idle and held"
        for kind in self._layout.strides:
            mine = [slab for slab in self._slabs if slab is not None and slab.kind is kind]
            free, total = sum(slab.num_free for slab in mine), sum(slab.num_pages for slab in mine)
            assert free == self._free[kind], f"{kind.label}: {free=} counted {self._free[kind]}"
            assert total - free == self._used[kind], f"{kind.label}: {total - free=} counted {self._used[kind]}"

    def audit_held(self, kind: Kind, held: PageIds) -> None:
        """Asserts that exactly the pages `held` are not in a free stack."""
        free = [slab.free[: slab.num_free] for slab in self._slabs if slab is not None and slab.kind is kind]
        free_ids = np.concatenate(free) if free else NO_PAGES
        assert len(np.unique(free_ids)) == len(free_ids), f"{kind.label}: a page is free twice"
        assert not len(np.intersect1d(free_ids, held)), f"{kind.label}: a referenced page is in a free stack"
