"""Checkpoints that a later one of their path supersedes: whether it does, and taking them off. Nothing of what a store has."""

from __future__ import annotations

from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import Checkpoint, LossReason


def drop_superseded(core: CacheState, checkpoint: Checkpoint) -> None:
    """Takes a checkpoint that a later one replaces out of all tiers. Not to be called for one that is in use."""
    for residency in list(checkpoint.held):
        if residency is not None:
            core.counters.add(f"superseded_{residency.tier.label}_checkpoints")
            drop_residency(core.tree, residency, core.loss(LossReason.EVICTED, residency.tier))


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
