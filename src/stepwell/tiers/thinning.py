"""Takes checkpoints off a path when one more is left on it, where the placement says so.

Never one that is read or written now, never a prefix page, and nothing of what a store has.
"""

from __future__ import annotations

from itertools import pairwise

from stepwell.policy.placement import Waypoint, superseded
from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import Checkpoint, LossReason
from stepwell.tree.ranking import previous_checkpoint

LOOK_BACK = 64  # checkpoints, beside as many as a path may have: what lies before them stays as it is


def thin_path(core: CacheState, made: Checkpoint) -> None:
    """Drops what the new checkpoint `made` supersedes on its path."""
    config = core.config.placement
    if not config.path_cap and not config.thinning:
        return
    path, start = _path_to(made, LOOK_BACK + config.path_cap)
    waypoints = [_waypoint(each, following) for each, following in pairwise(path)]
    gone = set(superseded(config, [*waypoints, Waypoint(boundary=made.page, used_at_s=made.used_at)], start=start))
    for each in path:
        if each.page in gone:
            drop_superseded(core, each)


def drop_superseded(core: CacheState, checkpoint: Checkpoint) -> None:
    """Takes a checkpoint that a later one replaces out of all tiers. Not to be called for one that is in use."""
    for residency in list(checkpoint.held):
        if residency is not None:
            core.counters.add(f"superseded_{residency.tier.label}_checkpoints")
            drop_residency(core.tree, residency, core.loss(LossReason.EVICTED, residency.tier))


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


def is_left_between(checkpoint: Checkpoint, following: Checkpoint) -> bool:
    """Whether paths branch off between two checkpoints. Who resumed at the first after the second was left did that.

    pages    ..... checkpoint ...... node.end ...... following
                       o----------------+----------------o
                                        +---- theirs
    """
    node = following.node
    while node is not None and node is not checkpoint.node:
        node = node.parent
        if node is not None and node.kids is not None and len(node.kids.by_page) > 1:
            return True
    return False
