"""Free page ids of an arena, kept by slab: a slab serves one kind until it empties, then anyone may have it.

Low addresses are handed out first, so slabs at the high end drain and can change hands. Counts no
references and knows no page states.

Running requests take many window pages at a time and give them back. As many idle slabs as they took at most are spared for
them: prefix pages, which stay, would fill these in between, and the next request would have room only in place of checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from stepwell.base.ids import Kind
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.layout import ArenaLayout

MOST_SPARED = 1 / 16  # of all slabs
FEW_PAGES = 32  # mostly of one slab, which is found sooner without arrays


class SlabPool:
    """Takes and gives page ids in batches, all or nothing."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._holders: list[Kind | None] = [None] * layout.num_slabs
        self._num_free = [0] * layout.num_slabs  # free pages of the kind that holds the slab
        # Each slab's stack of free ids. It takes the places of the slab's own ids, from the first of them on.
        #     slab 0        |7|3|4| | | | | |        three of its pages 0 .. 7 are free, and 4 is handed out next
        self._stacks = {kind: np.empty(layout.rows(kind), np.int32) for kind in layout.strides}
        slabs = range(layout.num_slabs)
        self._first = {kind: [layout.pages_of_slab(slab, kind).start for slab in slabs] for kind in layout.strides}
        # Slabs whose stack must be written before they are handed out; one that comes back whole still has it in order.
        self._shuffled = {kind: set(slabs) for kind in layout.strides}
        self._sizes = {kind: layout.pages_of_slabs(kind) for kind in layout.strides}
        self._most = {kind: max(sizes, default=0) for kind, sizes in self._sizes.items()}  # pages of a slab
        self._largest_first = sorted(layout.strides, key=lambda kind: -layout.strides[kind])
        # Slabs that nobody holds, in order; the tail of the arena may be too short to be of use to anyone.
        self._idle = [slab for slab, sizes in enumerate(zip(*self._sizes.values(), strict=True)) if any(sizes)]
        self._open: dict[Kind, list[int]] = {kind: [] for kind in layout.strides}  # heaps of slabs that may have free pages
        self._listed: dict[Kind, set[int]] = {kind: set() for kind in layout.strides}  # what is in those heaps
        self._free = dict.fromkeys(layout.strides, 0)  # free pages in slabs that the kind holds
        self._used = dict.fromkeys(layout.strides, 0)
        self._spared = 0  # idle slabs that prefix pages are not to take

    def used(self, kind: Kind) -> int:
        return self._used[kind]

    def short(self, need: Mapping[Kind, int]) -> dict[Kind, int]:
        """How many pages of which kinds are missing when idle slabs go where they are needed; empty when `need` fits."""
        return self._choose(need)[1]

    def take(self, need: Mapping[Kind, int]) -> dict[Kind, PageIds] | None:
        """Ids for every kind named, lowest addresses first; or None, with nothing changed."""
        chosen, short = self._choose(need)
        if short:
            return None
        for slab, kind in chosen.items():
            self._assign(slab, kind)
        if need.get(Kind.WINDOW):
            slabs = -(-need[Kind.WINDOW] // self._most[Kind.WINDOW])
            self._spared = max(self._spared, min(slabs, int(len(self._holders) * MOST_SPARED)))
        return {kind: self._pop(kind, count) for kind, count in need.items()}

    def give(self, kind: Kind, ids: PageIds) -> None:
        """Takes ids back. A slab whose last page comes back is nobody's."""
        assert len(ids), "gave back no pages"
        self._used[kind] -= len(ids)
        stride, slab_bytes = self._layout.strides[kind], self._layout.slab_bytes
        if len(ids) <= FEW_PAGES:
            slabs_of_few = {each * stride // slab_bytes for each in ids.tolist()}
            if len(slabs_of_few) == 1:
                self._push(slabs_of_few.pop(), kind, ids)
                return
        slabs = ids.astype(np.int64) * stride // slab_bytes
        order = slabs.argsort(kind="stable")
        slabs, ids = slabs[order], ids[order]
        cuts = ((slabs[1:] != slabs[:-1]).nonzero()[0] + 1).tolist()
        starts = [0, *cuts]
        for slab, start, end in zip(slabs[starts].tolist(), starts, [*cuts, len(ids)], strict=True):
            self._push(slab, kind, ids[start:end])

    def spare_none(self) -> bool:
        """Lets prefix pages have all idle slabs, until windows are taken again; false when they could already."""
        spared, self._spared = self._spared, 0
        return spared > 0

    # ---- inside -----------------------------------------------------------------------------------

    def _choose(self, need: Mapping[Kind, int]) -> tuple[dict[int, Kind], dict[Kind, int]]:
        """Which idle slabs to hand to which kind for `need`, the largest pages first; and how many pages are missing still."""
        free = self._free
        short = {kind: count - free[kind] for kind, count in need.items() if count > free[kind]}
        chosen: dict[int, Kind] = {}
        if not short or not self._idle:
            return chosen, short
        for kind in [kind for kind in self._largest_first if kind in short]:
            sizes, missing = self._sizes[kind], short[kind]
            to_leave = self._to_spare() if kind is Kind.PREFIX else 0
            for slab in islice(self._idle, max(len(self._idle) - to_leave, 0)):
                if missing <= 0:
                    break
                if sizes[slab] and slab not in chosen:
                    chosen[slab] = kind
                    missing -= sizes[slab]
            short[kind] = missing
        return chosen, {kind: missing for kind, missing in short.items() if missing > 0}

    def _to_spare(self) -> int:
        """Idle slabs to keep from prefix pages: less what window slabs have free."""
        return max(self._spared - self._free[Kind.WINDOW] // self._most[Kind.WINDOW], 0) if self._spared else 0

    def _assign(self, slab: int, kind: Kind) -> None:
        first, size = self._first[kind][slab], self._sizes[kind][slab]
        if slab in self._shuffled[kind]:
            self._shuffled[kind].discard(slab)
            self._stacks[kind][first : first + size] = np.arange(first + size - 1, first - 1, -1)  # lowest id on top
        self._holders[slab], self._num_free[slab] = kind, size
        del self._idle[bisect_left(self._idle, slab)]
        self._free[kind] += size
        self._list(slab, kind)

    def _list(self, slab: int, kind: Kind) -> None:
        if slab not in self._listed[kind]:
            self._listed[kind].add(slab)
            heappush(self._open[kind], slab)

    def _pop(self, kind: Kind, count: int) -> PageIds:
        stack, first, listed = self._stacks[kind], self._first[kind], self._open[kind]
        pieces = []
        self._free[kind] -= count
        self._used[kind] += count
        while count:
            slab = listed[0]
            num_free = self._num_free[slab]
            if not num_free or self._holders[slab] is not kind:
                self._listed[kind].discard(heappop(listed))  # it filled up or changed hands since it was listed
                continue
            taken = min(count, num_free)
            top = first[slab] + num_free
            pieces.append(stack[top - taken : top][::-1])
            self._num_free[slab] -= taken
            count -= taken
        return np.concatenate(pieces) if pieces else NO_PAGES.copy()

    def _push(self, slab: int, kind: Kind, ids: PageIds) -> None:
        assert self._holders[slab] is kind, f"slab {slab} does not belong to {kind.label}"
        count, before, size = len(ids), self._num_free[slab], self._sizes[kind][slab]
        assert before + count <= size, f"slab {slab} got {count} pages back, and has {before} of {size}"
        if before + count == size:
            self._holders[slab], self._num_free[slab] = None, 0
            insort(self._idle, slab)
            self._free[kind] -= before
            return
        top = self._first[kind][slab] + before
        self._stacks[kind][top : top + count] = ids
        self._shuffled[kind].add(slab)
        self._num_free[slab] += count
        self._free[kind] += count
        self._list(slab, kind)

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self) -> None:
        assert self._idle == sorted(set(self._idle)), f"idle slabs are out of order: {self._idle}"
        for slab in self._idle:
            assert self._holders[slab] is None, f"slab {slab} is both idle and held"
        usable = sum(any(sizes) for sizes in zip(*self._sizes.values(), strict=True))
        held = sum(holder is not None for holder in self._holders)
        assert len(self._idle) + held == usable, f"{len(self._idle)=} {held=} {usable=}"
        for kind in self._layout.strides:
            mine = self._held_by(kind)
            free, total = sum(self._num_free[slab] for slab in mine), sum(self._sizes[kind][slab] for slab in mine)
            assert free == self._free[kind], f"{kind.label}: {free=} counted {self._free[kind]}"
            assert total - free == self._used[kind], f"{kind.label}: {total - free=} counted {self._used[kind]}"

    def audit_held(self, kind: Kind, held: PageIds) -> None:
        """Asserts that exactly the pages `held` are not in a free stack."""
        stack, first = self._stacks[kind], self._first[kind]
        free = [stack[first[slab] : first[slab] + self._num_free[slab]] for slab in self._held_by(kind)]
        free_ids = np.concatenate(free) if free else NO_PAGES
        assert len(np.unique(free_ids)) == len(free_ids), f"{kind.label}: a page is free twice"
        assert not len(np.intersect1d(free_ids, held)), f"{kind.label}: a referenced page is in a free stack"

    def _held_by(self, kind: Kind) -> list[int]:
        return [slab for slab, holder in enumerate(self._holders) if holder is kind]
