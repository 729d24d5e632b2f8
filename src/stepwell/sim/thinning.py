"""Rules that take checkpoints off a path when one more is left on it: others have them, and Stepwell is compared with them.

Never one that is read or written now, never a prefix page, and nothing of what a store has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from stepwell.base.errors import ConfigError
from stepwell.tiers.publish import drop_superseded
from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import is_left_between
from stepwell.tree.node import Checkpoint, previous_checkpoint

LOOK_BACK = 64  # checkpoints, beside as many as a path may have: what lies before them stays as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Waypoint:
    """A checkpoint on a path, as the rules that thin the path out see it."""

    boundary: int
    used_at_s: float  # or when it was left
    is_wanted: bool = False  # requests have left the path between it and the next one: they resumed here
    is_held: bool = False  # somebody reads or writes it now


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """How many checkpoints of a path stay when one more is left on it."""

    path_cap: int = 0  # the most there may be; 0 for no cap
    thinning: float = 0.0  # neighbours of one that goes are less than this part of its distance to the path's end apart; 0: none

    def __post_init__(self) -> None:
        if self.path_cap < 0:
            raise ConfigError(f"path_cap must be 0 (none) or a positive number of checkpoints, got {self.path_cap}")
        if not 0 <= self.thinning < inf:
            raise ConfigError(f"thinning must be 0 (none) or a positive share, got {self.thinning}")

    def __call__(self, state: CacheState, made: Checkpoint) -> None:
        """Drops what the new checkpoint `made` supersedes on its path."""
        path, start = _path_to(made, LOOK_BACK + self.path_cap)
        waypoints = [_waypoint(each, following) for each, following in pairwise(path)]
        gone = set(superseded(self, [*waypoints, Waypoint(boundary=made.page, used_at_s=made.used_at)], start=start))
        for each in path:
            if each.page in gone:
                drop_superseded(state, each)


def superseded(rule: Thinning, path: Sequence[Waypoint], *, start: int = 0) -> tuple[int, ...]:
    """The boundaries whose checkpoints are to go now that the last of `path` was left; in order, and in the path's own unit.

    `path` is in order, and follows `start`, from where one can resume too. Neither its last nor what is held ever goes.
    """
    kept = _thinned(path, rule.thinning, start) if rule.thinning else list(path)
    if rule.path_cap:
        kept = _capped(kept, rule.path_cap)
    staying = {each.boundary for each in kept}
    return tuple(each.boundary for each in path if each.boundary not in staying)


def _thinned(path: Sequence[Waypoint], part: float, start: int) -> list[Waypoint]:
    """What stays when each may go whose neighbours are close together, seen from the end of the path.

    tokens    start ....... a ....... b ....... c ......................... end
                            |--- c - a -----|   |      b goes when c - a < part * (end - b)
                                      |--- end - b -----------------------|
    """
    kept: list[Waypoint] = []
    for each, following in pairwise(path):
        before = kept[-1].boundary if kept else start
        is_close = following.boundary - before < part * (path[-1].boundary - each.boundary)
        if not is_close or each.is_wanted or each.is_held:
            kept.append(each)
    return [*kept, *path[-1:]]


def _capped(path: Sequence[Waypoint], cap: int) -> list[Waypoint]:
    """What stays when the oldest go until there are `cap`: those that nobody wants before the others."""
    may_go = [each for each in path[:-1] if not each.is_held]
    may_go.sort(key=lambda each: (each.is_wanted, each.used_at_s, each.boundary))
    going = {each.boundary for each in may_go[: max(len(path) - cap, 0)]}
    return [each for each in path if each.boundary not in going]


def _path_to(made: Checkpoint, at_most: int) -> tuple[list[Checkpoint], int]:
    """The last `at_most` checkpoints of the path in order, `made` the last, and the boundary of the one before them."""
    found = [made]
    while len(found) <= at_most:
        node = found[-1].node
        assert node is not None, f"page {found[-1].page} is off its path"
        before = previous_checkpoint(node, found[-1].page)
        if before is None:
            return found[::-1], 0
        found.append(before)
    return found[-2::-1], found[-1].page


def _waypoint(checkpoint: Checkpoint, following: Checkpoint) -> Waypoint:
    arriving = any(residency is not None and not residency.ready for residency in checkpoint.held)
    return Waypoint(
        boundary=checkpoint.page,
        used_at_s=checkpoint.used_at,
        is_wanted=is_left_between(checkpoint, following),
        is_held=checkpoint.in_use or arriving,
    )
