"""How the tree shrinks: pages leave a tier, and pages that are in no tier any more leave the tree with everything below them.

Releases only the tree's references; requests and copies keep theirs. `ranking.py` decides what is evicted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import KEY_BYTES, PageKey
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import READY
from stepwell.policy.value import Visit
from stepwell.tree.checkpoints import drop_checkpoint, drop_residency
from stepwell.tree.missing_state import drop_notes_past_end
from stepwell.tree.node import ABSENT, Loss, Node, Run
from stepwell.tree.notes import key_of
from stepwell.tree.tree import Tree

MOST_EMPTY_ROOTS = 256  # namespaces that are kept after their last page left, for explanations


def discard(tree: Tree, run: Run, gone: npt.NDArray[np.bool_], loss: Loss) -> None:
    """Removes the pages where `gone` is true from the run's tier, and pages that are then in no tier from the tree."""
    node, tier = run.node, run.tier
    before = node.leads_to_pages(tier)
    if tree.feeds:
        _publish_evicted(tree, run, gone)
    ids = run.ids[gone & (run.ids != ABSENT)]
    run.num_ready -= _num_ready(tree, run, ids)
    run.num_pages -= len(ids)
    run.ids[gone] = ABSENT
    if not run.num_pages:
        node.runs[tier] = None
    tree.owner[tier][ids.astype(np.intp)] = None
    tree.accounts.remove_pages(node.account, tier, ids)
    if not run.num_pages:
        tree.ranking.unqueue(run, node.account)
    tree.version += 1
    tree.carry_pages_up(node, tier, before)
    tree.queue(node)
    other = node.runs[1 - tier]
    if other is None or other.num_pages < node.num_pages:
        missing = gone & (other.ids == ABSENT) if other is not None else gone
        if missing.any():
            truncate(tree, node, int(missing.argmax()), loss)
    tree.arenas[tier].release_for_tree(Kind.PREFIX, ids)


def discard_suffix(tree: Tree, run: Run, start: int, loss: Loss) -> None:
    """Removes the run's pages from index `start` on from its tier, and pages that are then in no tier from the tree."""
    node = run.node
    if node.runs[1 - run.tier] is None and node.kids is None:
        truncate(tree, node, start, loss)  # no other tier has any of it
        return
    gone = np.zeros(node.num_pages, np.bool_)
    gone[start:] = True
    discard(tree, run, gone, loss)


def discard_ids(tree: Tree, tier: Tier, ids: PageIds, loss: Loss) -> None:
    """Removes these pages from the tree, whichever nodes have them now."""
    for run in tree.runs_of(tier, ids):
        if run.node.runs[tier] is run:
            discard(tree, run, np.isin(run.ids, ids), loss)


def truncate(tree: Tree, node: Node, at: int, loss: Loss) -> None:
    """Removes the node's pages from index `at` on, everything below them, and the checkpoints that stood on them."""
    tree.version += 1
    if at:
        first = node.rest[(at - 1) * tree.page_bytes : at * tree.page_bytes]
        tree.past.drop(node)  # notes about what hung below the removed pages
        _note_gone(tree, node, first, loss, node.visit)
    before = [(tier, node.leads_to_pages(tier), node.leads_to_checkpoints(tier)) for tier in tree.tiers]
    if node.kids is not None:
        for child in node.kids.by_page.values():
            _remove_below(tree, child, loss)
        node.kids = None
    if node.checkpoints:
        for checkpoint in [c for c in node.checkpoints.values() if c.page > node.start + at]:
            drop_checkpoint(tree, checkpoint, loss)
    _trim(tree, node, at)
    for tier, pages, checkpoints in before:
        tree.carry_pages_up(node, tier, pages)
        tree.carry_checkpoints_up(node, tier, checkpoints)
    if at == 0:
        _unlink(tree, node, loss)
    else:
        tree.queue(node)


def clear(tree: Tree, namespace: PageKey, loss: Loss) -> None:
    """Removes everything under a namespace. Requests keep their pages until they release them."""
    root = tree.roots.get(namespace)
    if root is not None and root.kids is not None:
        for child in list(root.kids.by_page.values()):
            truncate(tree, child, 0, loss)
        tree.past.drop(root)


def lose_device(tree: Tree, loss: Loss) -> None:
    """Removes everything from the device tier, and what was in no other tier from the tree."""
    for node in list(tree.nodes()):
        for checkpoint in list((node.checkpoints or {}).values()):
            if (residency := checkpoint.residencies[Tier.DEVICE]) is not None:
                drop_residency(tree, residency, loss)
        if (run := node.runs[Tier.DEVICE]) is not None:
            discard(tree, run, np.ones(node.num_pages, np.bool_), loss)


def _trim(tree: Tree, node: Node, at: int) -> None:
    """Cuts the node to `at` pages in every tier, and releases the tree's references to the rest."""
    for tier in tree.tiers:
        run = node.runs[tier]
        if run is None:
            continue
        if tree.feeds:
            _publish_evicted(tree, run, np.arange(node.num_pages) >= at)
        gone = run.ids[at:]
        if run.num_pages < node.num_pages:
            gone = gone[gone != ABSENT]
        run.num_ready -= _num_ready(tree, run, gone)
        run.num_pages -= len(gone)
        run.ids = run.ids[:at].copy()
        if not run.num_pages:
            node.runs[tier] = None
        tree.owner[tier][gone.astype(np.intp)] = None
        tree.accounts.remove_pages(node.account, tier, gone)
        if not run.num_pages:
            tree.ranking.unqueue(run, node.account)
        tree.arenas[tier].release_for_tree(Kind.PREFIX, gone)
    _shorten(tree, node, at)


def _note_gone(tree: Tree, node: Node, page: bytes, loss: Loss, visit: Visit | None) -> None:
    """Notes the loss of the path that began with a page below a node: the reason, and its visit."""
    key = key_of(page)
    tree.lost.add(node, key, loss)
    if visit is not None:
        tree.past.add(node, key, visit)


def _drop_notes(tree: Tree, node: Node) -> None:
    """Drops the notes of a node that leaves the tree, since nothing can return to it."""
    tree.past.drop(node)
    tree.lost.drop(node)
    tree.lost_checkpoints.drop(node)


def _shorten(tree: Tree, node: Node, at: int) -> None:
    """Cuts a node's tokens to `at` pages, and calls the listeners."""
    node.num_pages = at
    node.keys = node.keys[: at * KEY_BYTES]
    node.rest = node.rest[: max(at - 1, 0) * tree.page_bytes]
    if node.missing_states:
        drop_notes_past_end(node, tree.spec.page_tokens)
    for callback in tree.on_shortened:
        callback(node)


def _publish_evicted(tree: Tree, run: Run, gone: npt.NDArray[np.bool_]) -> None:
    """Publishes which readable pages of a run leave its tier, before they do."""
    could_be_read = tree.arenas[run.tier].state[Kind.PREFIX][run.ids] == READY  # meaningless where the id is ABSENT
    tree.feeds.pages_evicted(run.node, run.tier, gone & (run.ids != ABSENT) & could_be_read)


def _num_ready(tree: Tree, run: Run, ids: PageIds) -> int:
    """How many of these pages of a run are readable."""
    if run.num_ready == run.num_pages:
        return len(ids)
    return int(np.count_nonzero(tree.arenas[run.tier].state[Kind.PREFIX][ids] == READY))


def _remove_below(tree: Tree, top: Node, loss: Loss) -> None:
    """Empties a subtree that is being removed. The caller updates the counts above it."""
    stack = [top]
    while stack:
        node = stack.pop()
        if node.kids is not None:
            stack.extend(node.kids.by_page.values())
        for checkpoint in list((node.checkpoints or {}).values()):
            drop_checkpoint(tree, checkpoint, loss)
        _trim(tree, node, 0)
        node.parent = node.kids = None
        _drop_notes(tree, node)


def _unlink(tree: Tree, node: Node, loss: Loss) -> None:
    """Removes a node without pages from its parent, whose counts no longer include it."""
    parent, first = node.parent, node.first
    assert parent is not None and parent.kids is not None
    siblings = parent.kids.by_page
    del siblings[first]
    node.parent = None
    _drop_notes(tree, node)
    _note_gone(tree, parent, first, loss, node.visit)
    if not siblings:
        parent.kids = None
        if parent.parent is None and len(tree.roots) > MOST_EMPTY_ROOTS:
            del tree.roots[PageKey(parent.first)]
            _drop_notes(tree, parent)
