"""Adds checkpoints to tiers and removes them. A checkpoint is complete in a tier or absent from it.

Never touches prefix pages. A checkpoint that is in no tier any more leaves its node, with a note of the reason.
"""

from __future__ import annotations

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.base.untracked import untrack
from stepwell.tree.feed import EventKind
from stepwell.tree.node import Checkpoint, Loss, Node, Residency, previous_checkpoint
from stepwell.tree.tree import Tree


def add_residency(
    tree: Tree, node: Node, page: int, tier: Tier, *, windows: PageIds, points: PageIds, ready: bool, now: float
) -> Residency | None:
    """Adds a checkpoint at boundary `page` to `tier`; returns None, and changes no reference, if there is one already.

    Adds a reference to each window page, because others may still read it. Takes over the caller's reference to the point, which
    has no other.
    """
    assert node.start < page <= node.end, f"boundary {page} is not in {node}"
    if node.checkpoints is None:
        node.checkpoints = {}
    before = node.leads_to_checkpoints(tier)
    checkpoint = node.checkpoints.get(page)
    if checkpoint is None:
        checkpoint = node.checkpoints[page] = Checkpoint(node, page, now)
        untrack(node.checkpoints)
        _follow(tree, checkpoint)
    if checkpoint.residencies[tier] is not None:
        return None
    arena = tree.arenas[tier]
    residency = checkpoint.residencies[tier] = Residency(
        checkpoint, tier, windows=windows, points=points, ready=ready, strides=arena.layout.strides
    )
    if len(windows):
        arena.retain_for_tree(Kind.WINDOW, windows)
    if len(points):
        arena.transfer_to_tree(Kind.POINT, points)
    tree.accounts.charge(node.account, tier, _tree_bytes(tree, residency, times=1))
    tree.lost_checkpoints.remove(node, page)
    tree.version += 1
    tree.carry_checkpoints_up(node, tier, before)
    tree.ranking.queue_residency(residency)
    if ready:
        tree.ranking.queue_duplicate(residency)
    if ready and tree.feeds:
        tree.feeds.checkpoint(EventKind.CHECKPOINT_STORED, node, residency)
    return residency


def _follow(tree: Tree, checkpoint: Checkpoint) -> None:
    """Links a new checkpoint to its neighbours and queues those again, since each now saves only the distance to the new one."""
    assert checkpoint.node is not None
    before = previous_checkpoint(checkpoint.node, checkpoint.page)
    following = _next_below(checkpoint, before)
    _link(checkpoint, following)
    if before is not None:
        _link(before, checkpoint)
    for neighbour in (before, following):
        for residency in neighbour.residencies if neighbour is not None else ():
            if residency is not None:
                tree.ranking.queue_residency(residency, again=True)


def _link(before: Checkpoint, following: Checkpoint | None) -> None:
    before.following = following
    if following is not None:
        following.leader = before


def _next_below(checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint | None:
    """The next checkpoint in its node, or the follower of `before` if that is not on another branch."""
    node = checkpoint.node
    assert node is not None and node.checkpoints is not None
    in_node = min((page for page in node.checkpoints if page > checkpoint.page), default=None)
    if in_node is not None:
        return node.checkpoints[in_node]
    followed = before.follower if before is not None else None
    here = followed.node if followed is not None else None
    while here is not None and here.start >= node.end:
        here = here.parent
    return followed if here is node and followed is not None and followed.page > checkpoint.page else None


def residency_arrived(tree: Tree, residency: Residency) -> None:
    """Notes that all pages of a residency have their bytes, so that matches may use it."""
    residency.ready = True
    tree.version += 1
    tree.ranking.queue_residency(residency)
    tree.ranking.queue_duplicate(residency)
    node = residency.checkpoint.node
    if tree.feeds and node is not None and residency.checkpoint.residencies[residency.tier] is residency:
        tree.feeds.checkpoint(EventKind.CHECKPOINT_STORED, node, residency)


def drop_residency(tree: Tree, residency: Residency, loss: Loss) -> None:
    """Removes a checkpoint from one tier, and from the tree if it was in no other. Prefix pages stay."""
    node = residency.checkpoint.node
    if node is None or residency.checkpoint.residencies[residency.tier] is not residency:
        return
    checkpoint, tier = residency.checkpoint, residency.tier
    assert node.parent is not None and node.parent.kids is not None
    checkpoint.residencies[tier] = None
    tree.version += 1
    if checkpoint.residencies[1 - tier] is None:
        _remove_from_node(checkpoint, node)
        tree.lost_checkpoints.add(node, checkpoint.page, loss)
    tree.carry_checkpoints_up(node, tier, before=True)
    tree.queue(node)
    release_pages(tree, node, residency)


def drop_checkpoint(tree: Tree, checkpoint: Checkpoint, loss: Loss) -> None:
    """Removes a checkpoint from all tiers without updating the counts above its node."""
    node = checkpoint.node
    assert node is not None
    _remove_from_node(checkpoint, node)
    tree.lost_checkpoints.add(node, checkpoint.page, loss)
    for residency in checkpoint.residencies:
        if residency is not None:
            release_pages(tree, node, residency)
    checkpoint.residencies = [None, None]


def branches_between(checkpoint: Checkpoint, following: Checkpoint) -> bool:
    """Whether paths branch off between two checkpoints: requests have resumed at the first one although the second existed.

    pages    ..... checkpoint ...... node.end ...... following
                       o----------------+----------------o
                                        +---- branch
    """
    node = following.node
    while node is not None and node is not checkpoint.node:
        node = node.parent
        if node is not None and node.kids is not None and len(node.kids.by_page) > 1:
            return True
    return False


def is_superseded(checkpoint: Checkpoint, *, milestone_pages: int) -> bool:
    """Whether, as far as is known, a later checkpoint of its path serves every request that would resume at this one.

    A checkpoint at the end of an answer does so only after a request has continued from it: until then, a request that repeats
    the prompt, or leaves out the reasoning, resumes at the end of the prompt.
    """
    following = checkpoint.follower
    if following is None or following.used_at < checkpoint.used_at or (following.answers and not following.uses):
        return False
    is_milestone = milestone_pages > 0 and checkpoint.page % milestone_pages == 0
    return not is_milestone and not branches_between(checkpoint, following)


def _tree_bytes(tree: Tree, residency: Residency, *, times: int) -> int:
    """Bytes of a residency's pages that have `times` references of the tree: neighbours may share window pages."""
    arena, size = tree.arenas[residency.tier], 0
    for kind, ids in residency.spans():
        size += int(np.count_nonzero(arena.tree_refs[kind][ids] == times)) * arena.layout.strides[kind]
    return size


def release_pages(tree: Tree, node: Node, residency: Residency) -> None:
    """Releases the pages of a checkpoint that left a tier, and reports that."""
    arena, all_freed = tree.arenas[residency.tier], True
    for kind, ids in residency.spans():
        all_freed = len(arena.release_for_tree(kind, ids)) == len(ids) and all_freed
    size = residency.size_bytes if all_freed else _tree_bytes(tree, residency, times=0)
    tree.accounts.charge(node.account, residency.tier, -size)
    tree.ranking.unqueue(residency, node.account)
    if residency.ready and tree.feeds:
        tree.feeds.checkpoint(EventKind.CHECKPOINT_EVICTED, node, residency)
    for callback in tree.on_checkpoint_evicted:
        callback(residency)


def _remove_from_node(checkpoint: Checkpoint, node: Node) -> None:
    """Removes a checkpoint from its node and links its neighbours to each other."""
    assert node.checkpoints is not None
    before, following = checkpoint.leader, checkpoint.following
    if before is not None and before.following is checkpoint:
        _link(before, following)
    elif following is not None:
        following.leader = None
    checkpoint.following = checkpoint.leader = None
    del node.checkpoints[checkpoint.page]
    checkpoint.node = None
