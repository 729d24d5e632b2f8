"""Which part of a run may leave its tier, and what stands in its way. Looks at one run at a time; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stepwell.base.ids import CACHED_TIERS, Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.memory.arena import READY, Arena
from stepwell.tree.node import ABSENT, Run

_NO_REFS = np.zeros(0, np.int32)


class Tail(NamedTuple):
    """The part of a run that may go: its pages from index `start`."""

    start: int
    dead: bool
    repeated: bool = False  # the device has all of it too


class Idle(NamedTuple):
    """Pages of a run that could be freed at once: `num_pages` of them, all that it has from index `start` on."""

    start: int
    num_pages: int


class Tails:
    """What may go of the runs of one tree."""

    def __init__(self, spec: ModelSpec, arenas: Mapping[Tier, Arena], *, repeats_first: bool) -> None:
        """With `repeats_first`, what the device has too may leave the host whatever stands on it there."""
        self._arenas = arenas
        # A list by tier: every candidate comes by here several times.
        self._refs = [arenas[tier].refs[Kind.PREFIX] if tier in arenas else _NO_REFS for tier in CACHED_TIERS]
        self._repeats_first = repeats_first
        self._needs_checkpoints = spec.free_step is None  # prefix pages are of no use behind the last checkpoint

    def of(self, run: Run, *, cut_off: bool = False) -> Tail | None:
        """What of a run may go now, references aside; None while something stands on all of it.

        With `cut_off`, pages of the other tier that only this run leads to do not count: they would go with it.
        """
        node, tier = run.node, run.tier
        kids = node.kids
        if not run.num_pages or node.parent is None:
            return None
        if self._repeats_first and tier is Tier.HOST and (first := self._repeated_from(run)) is not None:
            return Tail(first, dead=False, repeated=True)
        if kids and (kids.below[tier] or kids.anchored[tier]):
            return None
        if self._repeats_first and tier is Tier.DEVICE and run.leaving and self._host_has(run):
            return Tail(0, dead=False, repeated=True)
        # What the host's pages stand on is saved before it goes; if it cannot be, they keep it.
        goes_down = self._repeats_first and tier is Tier.DEVICE and not run.unsaved
        start = reached = 0 if cut_off or goes_down else self._stood_on(run)
        if node.checkpoints:
            start = max(start, node.last_checkpoint(tier) - node.start)
            reached = max(start, node.last_checkpoint() - node.start)
        if self._needs_checkpoints and not (kids and any(kids.anchored)) and _has_pages(run, reached):
            return Tail(reached, dead=True)
        return Tail(start, dead=False) if _has_pages(run, start) else None

    def may_have(self, run: Run) -> bool:
        """Whether `of` is worth asking: it is not for most runs of a path, since something hangs below them."""
        node, tier = run.node, run.tier
        kids = node.kids
        if kids is None or not (kids.below[tier] or kids.anchored[tier]):
            return True
        return self._repeats_first and tier is Tier.HOST and node.runs[Tier.DEVICE] is not None

    def _repeated_from(self, run: Run) -> int | None:
        """From which index on the device can read all that a run of the host has; None where that is nothing."""
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

    def is_stood_on(self, run: Run) -> bool:
        """Whether pages of the other tier would be lost with what only this run has."""
        return self._stood_on(run) > 0

    @staticmethod
    def _stood_on(run: Run) -> int:
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
        """Whether somebody beside the tree refers to its last page, so that nothing of it can go."""
        last = int(run.ids[-1])
        return last != ABSENT and bool(self._refs[run.tier][last] > 1)

    def idle(self, run: Run, start: int, at_most: int) -> Idle:
        """The run's last pages from index `start` on, as far as only the tree refers to them, and no more than `at_most`."""
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
