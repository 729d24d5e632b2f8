"""The page ids of one tier: pages of several sizes, each with a reference count and a state. Holds no bytes.

    FREE --alloc--> FILLING --ready--> READY          a page whose last reference is released is FREE again
                       '------fail---> DEAD

Every page is FREE or referenced, and the counts can be checked at any time (`audit`). A slab belongs to one kind until all its
pages are free, so no memory is set aside for a kind in advance. For one thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import ConfigError, NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.base.units import at_least, format_bytes
from stepwell.memory.layout import ArenaLayout
from stepwell.memory.slabs import SlabPool


class PageState(IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2
    DEAD = 3


# Plain integers for the hot paths, since indexing NumPy arrays with enum members is several times slower.
FREE, FILLING, READY, DEAD = (int(state) for state in PageState)

Need = Mapping[Kind, int]
_Index = npt.NDArray[np.intp]
_Counts = npt.NDArray[np.int32]


class PageUse(Protocol):
    """What a device arena reports about its PREFIX pages if their rows are separate pages (`row_pages.py`)."""

    def num_held(self) -> int: ...
    def on_use(self, ids: PageIds, *, begins: bool) -> None: ...
    def on_free(self, ids: PageIds) -> None: ...


class Arena:
    """Allocates the page ids of one tier, all or nothing, and counts references to them."""

    def __init__(self, tier: Tier, layout: ArenaLayout, *, on_free: Callable[[Tier, Kind, PageIds], None] | None = None) -> None:
        self.tier = tier
        self.layout = layout
        self._slabs = SlabPool(layout)
        self._empty = SlabPool(layout)  # nothing is ever allocated from it: it answers what fits an empty arena
        if self._empty.short(dict.fromkeys(layout.strides, 1)):
            raise ConfigError(
                f"{tier.label}_bytes of {format_bytes(layout.size_bytes)} cannot hold one page of each kind at the same time: "
                f"it must be at least {at_least(2 * len(layout.strides) * max(layout.strides.values()))}"
            )
        self._on_free = on_free
        self.refs = {kind: np.zeros(layout.rows(kind), np.int32) for kind in layout.strides}
        self.tree_refs = {kind: np.zeros(layout.rows(kind), np.int32) for kind in layout.strides}  # the tree's share of `refs`
        self.state = {kind: np.zeros(layout.rows(kind), np.uint8) for kind in layout.strides}
        self._busy = dict.fromkeys(layout.strides, 0)  # pages with references besides the tree's
        self.page_use: PageUse | None = None  # set by `RowPages` for a device whose rows may spill

    # ---- questions --------------------------------------------------------------------------------

    def fits(self, need: Need) -> bool:
        """Whether `alloc(need)` would succeed now."""
        return not self._slabs.short(need)

    def fits_when_empty(self, need: Need) -> bool:
        """Whether `alloc(need)` would succeed in an empty arena."""
        return not self._empty.short(need)

    def could_fit(self, need: Need, *, may_spill: bool = True) -> bool:
        """Whether there would be enough bytes for `need` if every idle page was evicted, however pages are spread over slabs.

        With `may_spill`, the rows of pages in use count as evictable too, since most of them are.
        """
        strides, busy_bytes = self.layout.strides, self.busy_bytes
        if self.page_use is not None and not may_spill:
            busy_bytes += (self.page_use.num_held() - self._busy[Kind.ROWS]) * strides[Kind.ROWS]
        return sum(strides[kind] * count for kind, count in need.items()) <= self.layout.size_bytes - busy_bytes

    def shortage(self, need: Need) -> dict[Kind, int]:
        """The number of pages missing for `need`, by kind, after idle slabs are assigned to it; empty if it fits."""
        return self._slabs.short(need)

    @property
    def busy_bytes(self) -> int:
        """Bytes of pages that requests and copies refer to, which no eviction can free."""
        return sum(self._busy[kind] * stride for kind, stride in self.layout.strides.items())

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated pages, including padding."""
        return sum(self.used_pages(kind) * stride for kind, stride in self.layout.strides.items())

    def used_pages(self, kind: Kind) -> int:
        return self._slabs.used(kind)

    def is_ready(self, kind: Kind, ids: PageIds) -> bool:
        return bool((self.state[kind][ids] == READY).all())

    # ---- orders -----------------------------------------------------------------------------------

    def alloc(self, need: Need) -> dict[Kind, PageIds]:
        """Allocates FILLING pages of every kind in `need`, with one reference each. Raises NoRoom, and then allocates none."""
        taken = self.alloc_if_fits(need)
        if taken is None:
            wanted = ", ".join(f"{count} {kind.label}" for kind, count in need.items() if count)
            raise NoRoom(f"the {self.tier.label} tier has no memory for {wanted} page(s)")
        return taken

    def alloc_if_fits(self, need: Need) -> dict[Kind, PageIds] | None:
        """Like `alloc`, but returns None if `need` does not fit."""
        taken = self._slabs.alloc(need)
        for kind, ids in (taken or {}).items():
            at = _at(ids)
            self.refs[kind][at] = 1
            self.state[kind][at] = FILLING
            self._busy[kind] += len(ids)
        return taken

    def unreserve(self) -> bool:
        """Makes the slabs reserved for windows of running requests available to all; false if none were reserved."""
        return self._slabs.unreserve()

    def retain(self, kind: Kind, ids: PageIds) -> None:
        """Adds one reference to each page. Ids must be distinct, and none may be free."""
        refs, at = self.refs[kind], _at(ids)
        counts = refs[at]
        assert np.count_nonzero(counts) == len(ids), f"retained a free {self.tier.label} {kind.label} page: {ids[counts == 0]}"
        begins = counts == self.tree_refs[kind][at]
        refs[at] = counts + 1
        self._note_use(kind, ids, begins, begins=True)

    def release(self, kind: Kind, ids: PageIds) -> PageIds:
        """Removes one reference to each page and frees those without any other; returns the freed ones."""
        if not len(ids):
            return NO_PAGES
        at = _at(ids)
        counts = self._decrement(kind, ids, at)
        self._note_use(kind, ids, counts == self.tree_refs[kind][at], begins=False)
        return self._free(kind, ids, at, counts)

    def retain_for_tree(self, kind: Kind, ids: PageIds) -> None:
        """Adds a reference of the tree to each page. Unlike others, it does not prevent eviction."""
        refs, tree_refs, at = self.refs[kind], self.tree_refs[kind], _at(ids)
        counts = refs[at]
        assert np.count_nonzero(counts) == len(ids), f"retained a free {self.tier.label} {kind.label} page: {ids[counts == 0]}"
        refs[at] = counts + 1
        tree_refs[at] += 1

    def transfer_to_tree(self, kind: Kind, ids: PageIds) -> None:
        """Turns one reference of the caller to each page into one of the tree."""
        tree_refs, at = self.tree_refs[kind], _at(ids)
        tree_refs[at] += 1
        self._note_use(kind, ids, self.refs[kind][at] == tree_refs[at], begins=False)

    def release_for_tree(self, kind: Kind, ids: PageIds) -> PageIds:
        """Removes the tree's reference to each page and frees those without any other; returns the freed ones."""
        if len(ids) <= 1:
            return self._release_one_for_tree(kind, ids) if len(ids) else NO_PAGES
        at = _at(ids)
        self.tree_refs[kind][at] -= 1
        return self._free(kind, ids, at, self._decrement(kind, ids, at))

    def _release_one_for_tree(self, kind: Kind, ids: PageIds) -> PageIds:
        """Like `release_for_tree` for a single page: scalars take a tenth of the time of arrays of length one."""
        at, refs, tree_refs = int(ids[0]), self.refs[kind], self.tree_refs[kind]
        count = refs.item(at) - 1
        assert count >= 0, f"released a free {self.tier.label} {kind.label} page: {ids}"
        tree_refs[at], refs[at] = tree_refs.item(at) - 1, count
        return self._set_free(kind, ids, at) if not count else NO_PAGES

    def _note_use(self, kind: Kind, ids: PageIds, changed: npt.NDArray[np.bool_], *, begins: bool) -> None:
        """Counts pages that became busy, or no longer are."""
        count = int(np.count_nonzero(changed))
        self._busy[kind] += count if begins else -count
        if count and self.page_use is not None and kind is Kind.PREFIX:
            self.page_use.on_use(ids[changed], begins=begins)

    def _decrement(self, kind: Kind, ids: PageIds, at: _Index) -> _Counts:
        """Removes one reference to each page; returns how many each has left."""
        refs = self.refs[kind]
        counts = refs[at]
        assert np.count_nonzero(counts) == len(ids), f"released a free {self.tier.label} {kind.label} page: {ids[counts == 0]}"
        counts -= 1
        refs[at] = counts
        return counts

    def _free(self, kind: Kind, ids: PageIds, at: _Index, counts: _Counts) -> PageIds:
        """Frees the pages whose count is 0; returns them."""
        num_held, freed = np.count_nonzero(counts), ids
        if num_held:
            free = counts == 0
            freed, at = ids[free], at[free]
            if not len(freed):
                return NO_PAGES
        return self._set_free(kind, freed, at)

    def _set_free(self, kind: Kind, freed: PageIds, at: _Index | int) -> PageIds:
        self.state[kind][at] = FREE
        self._slabs.free(kind, freed)
        if self._on_free:
            self._on_free(self.tier, kind, freed)
        if self.page_use is not None and kind is Kind.PREFIX:
            self.page_use.on_free(freed)
        return freed

    def mark_ready(self, kind: Kind, ids: PageIds) -> PageIds:
        """FILLING pages among these become READY and are returned; READY and DEAD pages stay as they are."""
        return self._mark(kind, ids, READY)

    def mark_dead(self, kind: Kind, ids: PageIds) -> None:
        """FILLING pages among these become DEAD: their bytes will never arrive. They are freed with their last reference."""
        self._mark(kind, ids, DEAD)

    def _mark(self, kind: Kind, ids: PageIds, outcome: int) -> PageIds:
        state, at = self.state[kind], _at(ids)
        before = state[at]
        assert np.count_nonzero(before) == len(ids), (
            f"a free {self.tier.label} {kind.label} page cannot change state: {ids[before == FREE]}"
        )
        filling = before == FILLING
        count = np.count_nonzero(filling)
        if not count:
            return NO_PAGES
        if count < len(ids):
            at, ids = at[filling], ids[filling]
        state[at] = outcome
        return ids

    # ---- self-check -------------------------------------------------------------------------------

    def audit(self) -> None:
        """Asserts that every page is either free or referenced, and that the budget holds."""
        self._slabs.audit()
        for kind in self.layout.strides:
            refs, state = self.refs[kind], self.state[kind]
            assert (refs >= self.tree_refs[kind]).all() and (self.tree_refs[kind] >= 0).all(), (
                f"negative references in {kind.label}"
            )
            busy = int(np.count_nonzero(refs > self.tree_refs[kind]))
            assert busy == self._busy[kind], f"{self.tier.label} {kind.label}: {busy} pages are busy, counted {self._busy[kind]}"
            assert ((refs == 0) == (state == FREE)).all(), f"{self.tier.label} {kind.label}: a page is both free and referenced"
            held = np.flatnonzero(refs).astype(np.int32)
            assert len(held) == self.used_pages(kind), f"{self.tier.label} {kind.label}: {len(held)=} {self.used_pages(kind)=}"
            self._slabs.audit_held(kind, held)
        assert self.used_bytes <= self.layout.size_bytes, f"{self.used_bytes=} exceeds {self.layout.size_bytes=}"


def _at(ids: PageIds) -> _Index:
    """`ids` as an index to use more than once: NumPy is several times faster with indices of its native width.

    This file counts zeros rather than call `all` or `min` because that is faster as well.
    """
    return ids.astype(np.intp)
