"""One tier's memory: pages of several sizes, each with a reference count and a state. Holds no bytes.

    FREE --alloc--> FILLING --ready--> READY          what nobody refers to any more is FREE again
                       '------fail---> DEAD

Every page is FREE or referenced, and the counts can be checked at any time (`audit`). Slabs belong to one
kind until they empty, so no share of memory is set aside for any kind. One thread only.
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


# Plain integers for the hot paths: indexing NumPy arrays with enum members is several times slower.
FREE, FILLING, READY, DEAD = (int(state) for state in PageState)

Need = Mapping[Kind, int]
_Index = npt.NDArray[np.intp]
_Counts = npt.NDArray[np.int32]


class PageUse(Protocol):
    """What a device arena reports of its PREFIX pages, where their rows are pages of their own (`row_pages.py`)."""

    def num_held(self) -> int: ...
    def on_use(self, ids: PageIds, *, begins: bool) -> None: ...
    def on_free(self, ids: PageIds) -> None: ...


class Arena:
    """Page ids of one tier, handed out all or nothing and counted by reference."""

    def __init__(self, tier: Tier, layout: ArenaLayout, *, on_free: Callable[[Tier, Kind, PageIds], None] | None = None) -> None:
        self.tier = tier
        self.layout = layout
        self._slabs = SlabPool(layout)
        self._empty = SlabPool(layout)  # never taken from: what the arena is like with nothing in it
        if self._empty.short(dict.fromkeys(layout.strides, 1)):
            raise ConfigError(
                f"{tier.label}_bytes of {format_bytes(layout.size_bytes)} cannot hold one page of each kind side by side: "
                f"it must be at least {at_least(2 * len(layout.strides) * max(layout.strides.values()))}"
            )
        self._on_free = on_free
        self.refs = {kind: np.zeros(layout.rows(kind), np.int32) for kind in layout.strides}
        self.kept = {kind: np.zeros(layout.rows(kind), np.int32) for kind in layout.strides}  # of those, the tree's
        self.state = {kind: np.zeros(layout.rows(kind), np.uint8) for kind in layout.strides}
        self._busy = dict.fromkeys(layout.strides, 0)  # pages that somebody beside the tree refers to
        self.page_use: PageUse | None = None  # of a device whose rows may spill: set by `RowPages`

    # ---- questions --------------------------------------------------------------------------------

    def fits(self, need: Need) -> bool:
        """Whether `alloc(need)` would succeed now."""
        return not self._slabs.short(need)

    def fits_when_empty(self, need: Need) -> bool:
        """Whether `need` could ever be met, with nothing else in the arena."""
        return not self._empty.short(need)

    def could_fit(self, need: Need, *, may_spill: bool = True) -> bool:
        """Whether `need` could be met by evicting all that nobody uses, were it not for how that is spread over slabs.

        With `may_spill`, rows that belong to pages in use count as what could go too: most can.
        """
        strides, busy_bytes = self.layout.strides, self.busy_bytes
        if self.page_use is not None and not may_spill:
            busy_bytes += (self.page_use.num_held() - self._busy[Kind.ROWS]) * strides[Kind.ROWS]
        return sum(strides[kind] * count for kind, count in need.items()) <= self.layout.size_bytes - busy_bytes

    def shortage(self, need: Need) -> dict[Kind, int]:
        """How many pages of which kinds `need` lacks, once idle slabs have gone where they are needed; empty when it fits."""
        return self._slabs.short(need)

    @property
    def busy_bytes(self) -> int:
        """Bytes that requests and copies hold, so that no eviction could free them."""
        return sum(self._busy[kind] * stride for kind, stride in self.layout.strides.items())

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that are handed out, padding included."""
        return sum(self.used_pages(kind) * stride for kind, stride in self.layout.strides.items())

    def used_pages(self, kind: Kind) -> int:
        return self._slabs.used(kind)

    def is_ready(self, kind: Kind, ids: PageIds) -> bool:
        return bool((self.state[kind][ids] == READY).all())

    # ---- orders -----------------------------------------------------------------------------------

    def alloc(self, need: Need) -> dict[Kind, PageIds]:
        """Hands out FILLING pages with one reference each, for every kind named; or raises NoRoom and hands out none."""
        taken = self.alloc_if_fits(need)
        if taken is None:
            wanted = ", ".join(f"{count} {kind.label}" for kind, count in need.items() if count)
            raise NoRoom(f"the {self.tier.label} tier has no room for {wanted} page(s)")
        return taken

    def alloc_if_fits(self, need: Need) -> dict[Kind, PageIds] | None:
        """As `alloc`, but hands out nothing and says so when there is no room."""
        taken = self._slabs.take(need)
        for kind, ids in (taken or {}).items():
            at = _at(ids)
            self.refs[kind][at] = 1
            self.state[kind][at] = FILLING
            self._busy[kind] += len(ids)
        return taken

    def spare_none(self) -> bool:
        """Gives up the slabs that are spared for windows of running requests; false when none were."""
        return self._slabs.spare_none()

    def retain(self, kind: Kind, ids: PageIds) -> None:
        """Adds one reference to each page. Ids are distinct and none is free."""
        refs, at = self.refs[kind], _at(ids)
        counts = refs[at]
        assert np.count_nonzero(counts) == len(ids), f"retained a free {self.tier.label} {kind.label} page: {ids[counts == 0]}"
        begins = counts == self.kept[kind][at]
        refs[at] = counts + 1
        self._note_use(kind, ids, begins, begins=True)

    def release(self, kind: Kind, ids: PageIds) -> PageIds:
        """Takes one reference from each page and frees those without any; returns the freed ones."""
        if not len(ids):
            return NO_PAGES
        at = _at(ids)
        counts = self._lessened(kind, ids, at)
        self._note_use(kind, ids, counts == self.kept[kind][at], begins=False)
        return self._free(kind, ids, at, counts)

    def keep(self, kind: Kind, ids: PageIds) -> None:
        """Adds the tree's reference to each page: one that does not stand in the way of eviction."""
        refs, kept, at = self.refs[kind], self.kept[kind], _at(ids)
        counts = refs[at]
        assert np.count_nonzero(counts) == len(ids), f"kept a free {self.tier.label} {kind.label} page: {ids[counts == 0]}"
        refs[at] = counts + 1
        kept[at] += 1

    def hand_over(self, kind: Kind, ids: PageIds) -> None:
        """Makes the caller's reference to each page the tree's."""
        kept, at = self.kept[kind], _at(ids)
        kept[at] += 1
        self._note_use(kind, ids, self.refs[kind][at] == kept[at], begins=False)

    def drop(self, kind: Kind, ids: PageIds) -> PageIds:
        """Takes the tree's reference from each page and frees those without any; returns the freed ones."""
        if len(ids) <= 1:
            return self._drop_one(kind, ids) if len(ids) else NO_PAGES
        at = _at(ids)
        self.kept[kind][at] -= 1
        return self._free(kind, ids, at, self._lessened(kind, ids, at))

    def _drop_one(self, kind: Kind, ids: PageIds) -> PageIds:
        """As `drop`, for a page alone: numbers take a tenth of the time of arrays of one."""
        at, refs, kept = int(ids[0]), self.refs[kind], self.kept[kind]
        count = refs.item(at) - 1
        assert count >= 0, f"released a free {self.tier.label} {kind.label} page: {ids}"
        kept[at], refs[at] = kept.item(at) - 1, count
        return self._set_free(kind, ids, at) if not count else NO_PAGES

    def _note_use(self, kind: Kind, ids: PageIds, changed: npt.NDArray[np.bool_], *, begins: bool) -> None:
        """Pages became busy, or are no longer."""
        count = int(np.count_nonzero(changed))
        self._busy[kind] += count if begins else -count
        if count and self.page_use is not None and kind is Kind.PREFIX:
            self.page_use.on_use(ids[changed], begins=begins)

    def _lessened(self, kind: Kind, ids: PageIds, at: _Index) -> _Counts:
        """Takes one reference from each page; returns how many are left of each."""
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
        self._slabs.give(kind, freed)
        if self._on_free:
            self._on_free(self.tier, kind, freed)
        if self.page_use is not None and kind is Kind.PREFIX:
            self.page_use.on_free(freed)
        return freed

    def mark_ready(self, kind: Kind, ids: PageIds) -> PageIds:
        """FILLING pages have their bytes: returns those. READY pages stay so; a DEAD page never comes back."""
        return self._mark(kind, ids, READY)

    def mark_dead(self, kind: Kind, ids: PageIds) -> None:
        """FILLING pages will never have their bytes; they stay referenced until everyone let go."""
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
        """Asserts that every page is free or referenced, and that nothing exceeds the budget."""
        self._slabs.audit()
        for kind in self.layout.strides:
            refs, state = self.refs[kind], self.state[kind]
            assert (refs >= self.kept[kind]).all() and (self.kept[kind] >= 0).all(), f"negative references in {kind.label}"
            busy = int(np.count_nonzero(refs > self.kept[kind]))
            assert busy == self._busy[kind], f"{self.tier.label} {kind.label}: {busy} pages are busy, counted {self._busy[kind]}"
            assert ((refs == 0) == (state == FREE)).all(), f"{self.tier.label} {kind.label}: a page is both free and referenced"
            held = np.flatnonzero(refs).astype(np.int32)
            assert len(held) == self.used_pages(kind), f"{self.tier.label} {kind.label}: {len(held)=} {self.used_pages(kind)=}"
            self._slabs.audit_held(kind, held)
        assert self.used_bytes <= self.layout.size_bytes, f"{self.used_bytes=} exceeds {self.layout.size_bytes=}"


def _at(ids: PageIds) -> _Index:
    """How to index an array with `ids`, more than once: NumPy is several times faster with indices of its own width.

    For the same reason zeros are counted here rather than looked for with `all` or `min`.
    """
    return ids.astype(np.intp)
