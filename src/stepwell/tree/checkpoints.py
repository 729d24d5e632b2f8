"""Checkpoints come and go, tier by tier: complete in a tier, or absent from it.

Prefix pages are never touched here. A checkpoint that is in no tier any more leaves its node, with a note of why.
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
    """Places a checkpoint at boundary `page` in `tier`; or returns None, with nothing taken, if one is there already.

    Takes a reference of its own to each window page, for others may go on reading it; takes over the caller's
    reference to the point, which is nobody else's.
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
    if checkpoint.held[tier] is not None:
        return None
    arena = tree.arenas[tier]
    residency = checkpoint.held[tier] = Residency(
        checkpoint, tier, windows=windows, points=points, ready=ready, strides=arena.layout.strides
    )
    if len(windows):
        arena.retain_for_tree(Kind.WINDOW, windows)
    if len(points):
        arena.transfer_to_tree(Kind.POINT, points)
    tree.accounts.charge(node.account, tier, _bytes_kept(tree, residency, times=1))
    tree.lost_checkpoints.remove(node, page)
    tree.version += 1
    tree.carry_checkpoints_up(node, tier, before)
    tree.ranking.queue_residency(residency)
    if ready:
        tree.ranking.queue_repeated(residency)
    if ready and tree.feeds:
        tree.feeds.checkpoint(EventKind.CHECKPOINT_STORED, node, residency)
    return residency


def _follow(tree: Tree, checkpoint: Checkpoint) -> None:
    """The neighbours of a new checkpoint are needed less from now on: each only for what lies between it and the next."""
    assert checkpoint.node is not None
    before = previous_checkpoint(checkpoint.node, checkpoint.page)
    following = _next_below(checkpoint, before)
    _link(checkpoint, following)
    if before is not None:
        _link(before, checkpoint)
    for neighbour in (before, following):
        for residency in neighbour.held if neighbour is not None else ():
            if residency is not None:
                tree.ranking.queue_residency(residency, again=True)


def _link(before: Checkpoint, following: Checkpoint | None) -> None:
    before.following = following
    if following is not None:
        following.leader = before


def _next_below(checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint | None:
    """The next checkpoint in its node, or what followed `before`, if that is not on another branch."""
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
    """All of a residency's pages have their bytes: matches may use it."""
    residency.ready = True
    tree.version += 1
    tree.ranking.queue_residency(residency)
    tree.ranking.queue_repeated(residency)
    node = residency.checkpoint.node
    if tree.feeds and node is not None and residency.checkpoint.held[residency.tier] is residency:
        tree.feeds.checkpoint(EventKind.CHECKPOINT_STORED, node, residency)


def drop_residency(tree: Tree, residency: Residency, loss: Loss) -> None:
    """Takes a checkpoint out of one tier; out of the tree when it was the last. Prefix pages stay."""
    node = residency.checkpoint.node
    if node is None or residency.checkpoint.held[residency.tier] is not residency:
        return
    checkpoint, tier = residency.checkpoint, residency.tier
    assert node.parent is not None and node.parent.kids is not None
    checkpoint.held[tier] = None
    tree.version += 1
    if checkpoint.held[1 - tier] is None:
        _leave_node(checkpoint, node)
        tree.lost_checkpoints.add(node, checkpoint.page, loss)
    tree.carry_checkpoints_up(node, tier, before=True)
    tree.queue(node)
    let_go(tree, node, residency)


def forget(tree: Tree, checkpoint: Checkpoint, loss: Loss) -> None:
    """Drops a checkpoint from all tiers without touching the counts above its node."""
    node = checkpoint.node
    assert node is not None
    _leave_node(checkpoint, node)
    tree.lost_checkpoints.add(node, checkpoint.page, loss)
    for residency in checkpoint.held:
        if residency is not None:
            let_go(tree, node, residency)
    checkpoint.held = [None, None]


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


def is_superseded(checkpoint: Checkpoint, *, milestone_pages: int) -> bool:
    """Whether a later checkpoint of its path serves everybody who would resume at this one, as far as anybody knows.

    That of an answer does once somebody has come back with the answer: who asks the same again, or leaves out what was thought
    aloud, resumes at the prompt's.
    """
    following = checkpoint.follower
    if following is None or following.used_at < checkpoint.used_at or (following.answers and not following.uses):
        return False
    is_milestone = milestone_pages > 0 and checkpoint.page % milestone_pages == 0
    return not is_milestone and not is_left_between(checkpoint, following)


def _bytes_kept(tree: Tree, residency: Residency, *, times: int) -> int:
    """Bytes of a residency's pages that the tree keeps so many times: neighbours may share window pages."""
    arena, size = tree.arenas[residency.tier], 0
    for kind, ids in residency.spans():
        size += int(np.count_nonzero(arena.tree_refs[kind][ids] == times)) * arena.layout.strides[kind]
    return size


def let_go(tree: Tree, node: Node, residency: Residency) -> None:
    """Gives back the pages of a checkpoint that left a tier, and its node, and says so."""
    arena, all_freed = tree.arenas[residency.tier], True
    for kind, ids in residency.spans():
        all_freed = len(arena.release_for_tree(kind, ids)) == len(ids) and all_freed
    size = residency.size_bytes if all_freed else _bytes_kept(tree, residency, times=0)
    tree.accounts.charge(node.account, residency.tier, -size)
    tree.ranking.unqueue(residency, node.account)
    if residency.ready and tree.feeds:
        tree.feeds.checkpoint(EventKind.CHECKPOINT_EVICTED, node, residency)
    for told in tree.on_left:
        told(residency)


def _leave_node(checkpoint: Checkpoint, node: Node) -> None:
    """Takes a checkpoint out of its node; the one before it is followed by the one after it."""
    assert node.checkpoints is not None
    before, following = checkpoint.leader, checkpoint.following
    if before is not None and before.following is checkpoint:
        _link(before, following)
    elif following is not None:
        following.leader = None
    checkpoint.following = checkpoint.leader = None
    del node.checkpoints[checkpoint.page]
    checkpoint.node = None
