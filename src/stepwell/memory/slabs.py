"""The free page ids of an arena, by slab. A slab serves one kind until all its pages are free, then any kind may use it.

Low addresses are allocated first, so slabs at the high end drain and can change to another kind. Counts no references and knows
no page states.

Running requests allocate many window pages at a time and free them again. The largest number of idle slabs that they ever took
stays reserved for them: otherwise prefix pages, which stay, would fill these slabs in between, and the next request would find
memory only by evicting checkpoints.
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

MOST_RESERVED = 1 / 16  # of all slabs
FEW_PAGES = 32  # up to this number, pages are mostly of one slab, which is found faster without arrays


class SlabPool:
    """Allocates and frees page ids in batches, all or nothing."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._holders: list[Kind | None] = [None] * layout.num_slabs
        self._num_free = [0] * layout.num_slabs  # free pages of the kind that holds the slab
        # Each slab's stack of free ids, stored at the indices of the slab's own ids.
        #     slab 0        |7|3|4| | | | | |        three of its pages 0 .. 7 are free, and 4 is allocated next
        self._stacks = {kind: np.empty(layout.rows(kind), np.int32) for kind in layout.strides}
        slabs = range(layout.num_slabs)
        self._first = {kind: [layout.pages_of_slab(slab, kind).start for slab in slabs] for kind in layout.strides}
        # Slabs whose stack must be written before use; a slab that empties without having been shuffled still has it in order.
        self._shuffled = {kind: set(slabs) for kind in layout.strides}
        self._sizes = {kind: layout.pages_of_slabs(kind) for kind in layout.strides}
        self._most = {kind: max(sizes, default=0) for kind, sizes in self._sizes.items()}  # pages of a slab
        self._largest_first = sorted(layout.strides, key=lambda kind: -layout.strides[kind])
        # Slabs that belong to no kind, in order; the tail of the arena may be too short for a page of any kind.
        self._idle = [slab for slab, sizes in enumerate(zip(*self._sizes.values(), strict=True)) if any(sizes)]
        self._open: dict[Kind, list[int]] = {kind: [] for kind in layout.strides}  # heaps of slabs that may have free pages
        self._listed: dict[Kind, set[int]] = {kind: set() for kind in layout.strides}  # the slabs in those heaps
        self._free = dict.fromkeys(layout.strides, 0)  # free pages in slabs that the kind holds
        self._used = dict.fromkeys(layout.strides, 0)
        self._reserved = 0  # idle slabs that prefix pages may not use

    def used(self, kind: Kind) -> int:
        return self._used[kind]

    def short(self, need: Mapping[Kind, int]) -> dict[Kind, int]:
        """The number of missing pages by kind, after idle slabs are assigned for `need`; empty if it fits."""
        return self._choose(need)[1]

    def alloc(self, need: Mapping[Kind, int]) -> dict[Kind, PageIds] | None:
        """Ids of every kind in `need`, lowest addresses first; or None, with nothing changed."""
        chosen, short = self._choose(need)
        if short:
            return None
        for slab, kind in chosen.items():
            self._assign(slab, kind)
        if need.get(Kind.WINDOW):
            slabs = -(-need[Kind.WINDOW] // self._most[Kind.WINDOW])
            self._reserved = max(self._reserved, min(slabs, int(len(self._holders) * MOST_RESERVED)))
        return {kind: self._pop(kind, count) for kind, count in need.items()}

    def free(self, kind: Kind, ids: PageIds) -> None:
        """Frees pages. A slab whose pages are all free belongs to no kind."""
        assert len(ids), "freed no pages"
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

    def unreserve(self) -> bool:
        """Lets prefix pages use all idle slabs until windows are allocated again; false if they could already."""
        reserved, self._reserved = self._reserved, 0
        return reserved > 0

    # ---- inside -----------------------------------------------------------------------------------

    def _choose(self, need: Mapping[Kind, int]) -> tuple[dict[int, Kind], dict[Kind, int]]:
        """The idle slabs to assign for `need`, the kind with the largest pages first; and the number of pages still missing."""
        free = self._free
        short = {kind: count - free[kind] for kind, count in need.items() if count > free[kind]}
        chosen: dict[int, Kind] = {}
        if not short or not self._idle:
            return chosen, short
        for kind in [kind for kind in self._largest_first if kind in short]:
            sizes, missing = self._sizes[kind], short[kind]
            reserved = self._num_reserved() if kind is Kind.PREFIX else 0
            for slab in islice(self._idle, max(len(self._idle) - reserved, 0)):
                if missing <= 0:
                    break
                if sizes[slab] and slab not in chosen:
                    chosen[slab] = kind
                    missing -= sizes[slab]
            short[kind] = missing
        return chosen, {kind: missing for kind, missing in short.items() if missing > 0}

    def _num_reserved(self) -> int:
        """The number of idle slabs that prefix pages may not use, less the free capacity of window slabs."""
        return max(self._reserved - self._free[Kind.WINDOW] // self._most[Kind.WINDOW], 0) if self._reserved else 0

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
                self._listed[kind].discard(heappop(listed))  # it filled up or changed its kind since it was listed
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
        assert before + count <= size, f"freed {count} pages of slab {slab}, which already had {before} of {size} free"
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
