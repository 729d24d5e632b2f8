"""Which part of a run may be evicted from its tier. Looks at one run at a time; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.memory.arena import READY, Arena
from stepwell.tree.node import ABSENT, Run

_NO_REFS = np.zeros(0, np.int32)


class EvictableSuffix(NamedTuple):
    """The part of a run that may be evicted: its pages from index `start`."""

    start: int
    unreachable: bool
    duplicate: bool = False  # the device has all of it too


class Idle(NamedTuple):
    """Pages of a run that can be freed at once: all `num_pages` that it has from index `start` on."""

    start: int
    num_pages: int


class EvictableSuffixes:
    """Finds the evictable suffixes of one tree's runs."""

    def __init__(self, spec: ModelSpec, arenas: Mapping[Tier, Arena], *, evict_duplicates_first: bool) -> None:
        """With `evict_duplicates_first`, the host may evict what the device has too, whatever depends on it on the host."""
        self._arenas = arenas
        # A list by tier, because every candidate is looked up several times.
        self._refs = [arenas[tier].refs[Kind.PREFIX] if tier in arenas else _NO_REFS for tier in CACHED_TIERS]
        self._evict_duplicates_first = evict_duplicates_first
        self._needs_checkpoints = spec.free_step is None  # prefix pages behind the last checkpoint are useless

    def of(self, run: Run, *, ignore_other_tier: bool = False) -> EvictableSuffix | None:
        """The part of a run that may be evicted now, regardless of references; None if something depends on all of it.

        With `ignore_other_tier`, the part may be required by pages of the other tier: they would be lost with it.
        """
        node, tier = run.node, run.tier
        kids = node.kids
        if not run.num_pages or node.parent is None:
            return None
        if self._evict_duplicates_first and tier is Tier.HOST and (first := self._duplicate_from(run)) is not None:
            return EvictableSuffix(first, unreachable=False, duplicate=True)
        if kids and (kids.below[tier] or kids.anchored[tier]):
            return None
        if self._evict_duplicates_first and tier is Tier.DEVICE and run.leaving and self._host_has(run):
            return EvictableSuffix(0, unreachable=False, duplicate=True)
        # Pages that the host's pages require are saved before they are evicted; if saving failed, they must stay.
        saved_first = self._evict_duplicates_first and tier is Tier.DEVICE and not run.unsaved
        start = reached = 0 if ignore_other_tier or saved_first else self._required_by_other_tier(run)
        if node.checkpoints:
            start = max(start, node.last_checkpoint(tier) - node.start)
            reached = max(start, node.last_checkpoint() - node.start)
        if self._needs_checkpoints and not (kids and any(kids.anchored)) and _has_pages(run, reached):
            return EvictableSuffix(reached, unreachable=True)
        return EvictableSuffix(start, unreachable=False) if _has_pages(run, start) else None

    def maybe_evictable(self, run: Run) -> bool:
        """A fast check, false for most runs of a path because something hangs below them; `of` is None for those."""
        node, tier = run.node, run.tier
        kids = node.kids
        if kids is None or not (kids.below[tier] or kids.anchored[tier]):
            return True
        return self._evict_duplicates_first and tier is Tier.HOST and node.runs[Tier.DEVICE] is not None

    def _duplicate_from(self, run: Run) -> int | None:
        """The first index from which all of a host run's pages are readable on the device too; None if there is none."""
        other = run.node.runs[Tier.DEVICE]
        if other is None or other.leaving or (run.ids[-1] != ABSENT and other.ids[-1] == ABSENT):
            return None
        there = other.ids != ABSENT
        if other.num_ready < other.num_pages:
            there &= self._arenas[Tier.DEVICE].state[Kind.PREFIX][other.ids] == READY
        alone = np.flatnonzero((run.ids != ABSENT) & ~there)
        first = int(alone[-1]) + 1 if len(alone) else 0
        return first if first < len(run.ids) and (run.ids[first:] != ABSENT).any() else None

    def _host_has(self, run: Run) -> bool:
        host = run.node.runs[Tier.HOST]
        return host is not None and host.num_ready == host.num_pages == run.node.num_pages

    def is_required_by_other_tier(self, run: Run) -> bool:
        """Whether pages of the other tier would be lost with pages that only this run has."""
        return self._required_by_other_tier(run) > 0

    @staticmethod
    def _required_by_other_tier(run: Run) -> int:
        """The first index from which no page of the other tier depends on one that only this tier has."""
        node, other = run.node, run.node.runs[1 - run.tier]
        deeper = node.kids is not None and node.kids.below[1 - run.tier] > 0
        if not deeper if other is None else other.num_pages == node.num_pages:
            return 0
        only_here = run.ids != ABSENT if other is None else (run.ids != ABSENT) & (other.ids == ABSENT)
        if other is not None and not deeper:
            only_here = only_here[: int(np.flatnonzero(other.ids != ABSENT)[-1])]
        last = np.flatnonzero(only_here)
        return int(last[-1]) + 1 if len(last) else 0

    def is_in_use(self, run: Run) -> bool:
        """Whether its last page has references besides the tree's, so that none of its pages can be evicted."""
        last = int(run.ids[-1])
        return last != ABSENT and bool(self._refs[run.tier][last] > 1)

    def idle(self, run: Run, start: int, at_most: int) -> Idle:
        """The run's last pages from index `start` on that only the tree refers to, up to `at_most`."""
        refs, size = self._refs[run.tier], len(run.ids)
        if run.num_pages == size:
            first = max(start, size - at_most)
            if not np.count_nonzero(refs[run.ids[first:].astype(np.intp)] > 1):
                return Idle(first, size - first)
        present = (run.ids[start:] != ABSENT).nonzero()[0] + start
        busy = (refs[run.ids[present]] > 1).nonzero()[0]
        idle = present[busy[-1] + 1 :] if len(busy) else present
        idle = idle[-at_most:]
        return Idle(int(idle[0]), len(idle)) if len(idle) else Idle(len(run.ids), 0)


def _has_pages(run: Run, start: int) -> bool:
    if start == 0 or (start < len(run.ids) and run.ids[-1] != ABSENT):
        return True
    return bool((run.ids[start:] != ABSENT).any())
