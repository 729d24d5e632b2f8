"""How the tree shrinks: pages leave a tier, and what no tier holds any more leaves the tree with all that stood on it.

Gives up the tree's references; what requests and copies hold stays theirs. Decides nothing: who goes is `ranking.py`'s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import KEY_BYTES, PageKey
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import READY
from stepwell.policy.value import Visit
from stepwell.tree.checkpoints import drop_residency, forget
from stepwell.tree.missing_state import forget_cut
from stepwell.tree.node import ABSENT, Loss, Node, Run
from stepwell.tree.notes import key_of
from stepwell.tree.tree import Tree

KEPT_EMPTY_ROOTS = 256  # namespaces remembered after their last page left, for explanations


def discard(tree: Tree, run: Run, gone: npt.NDArray[np.bool_], loss: Loss) -> None:
    """Takes the pages where `gone` is true out of the run's tier, and out of the tree what no tier holds then."""
    node, tier = run.node, run.tier
    before = node.leads_to_pages(tier)
    if tree.feeds:
        _tell(tree, run, gone)
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


def discard_tail(tree: Tree, run: Run, start: int, loss: Loss) -> None:
    """Takes the run's pages from index `start` on out of its tier, and out of the tree what no tier holds then."""
    node = run.node
    if node.runs[1 - run.tier] is None and node.kids is None:
        truncate(tree, node, start, loss)  # no other tier has any of it
        return
    gone = np.zeros(node.num_pages, np.bool_)
    gone[start:] = True
    discard(tree, run, gone, loss)


def discard_ids(tree: Tree, tier: Tier, ids: PageIds, loss: Loss) -> None:
    """Takes these pages out of the tree wherever they are in it now."""
    for run in tree.runs_of(tier, ids):
        if run.node.runs[tier] is run:
            discard(tree, run, np.isin(run.ids, ids), loss)


def truncate(tree: Tree, node: Node, at: int, loss: Loss) -> None:
    """Removes the node's pages from index `at`, all below them, and the checkpoints that stood on them."""
    tree.version += 1
    if at:
        first = node.rest[(at - 1) * tree.page_bytes : at * tree.page_bytes]
        tree.past.forget(node)  # of what hung below what goes now
        _note_gone(tree, node, first, loss, node.visit)
    before = [(tier, node.leads_to_pages(tier), node.leads_to_checkpoints(tier)) for tier in tree.tiers]
    if node.kids is not None:
        for child in node.kids.by_page.values():
            _remove_below(tree, child, loss)
        node.kids = None
    if node.checkpoints:
        for checkpoint in [c for c in node.checkpoints.values() if c.page > node.start + at]:
            forget(tree, checkpoint, loss)
    _trim(tree, node, at)
    for tier, pages, checkpoints in before:
        tree.carry_pages_up(node, tier, pages)
        tree.carry_checkpoints_up(node, tier, checkpoints)
    if at == 0:
        _unlink(tree, node, loss)
    else:
        tree.queue(node)


def clear(tree: Tree, namespace: PageKey, loss: Loss) -> None:
    """Forgets everything under a namespace. What requests hold stays theirs until they give it back."""
    root = tree.roots.get(namespace)
    if root is not None and root.kids is not None:
        for child in list(root.kids.by_page.values()):
            truncate(tree, child, 0, loss)
        tree.past.forget(root)


def lose_device(tree: Tree, loss: Loss) -> None:
    """Takes everything out of the device tier, and out of the tree what was nowhere else."""
    for node in list(tree.nodes()):
        for checkpoint in list((node.checkpoints or {}).values()):
            if (residency := checkpoint.held[Tier.DEVICE]) is not None:
                drop_residency(tree, residency, loss)
        if (run := node.runs[Tier.DEVICE]) is not None:
            discard(tree, run, np.ones(node.num_pages, np.bool_), loss)


def _trim(tree: Tree, node: Node, at: int) -> None:
    """Cuts the node to `at` pages in every tier, giving up the tree's references to the rest."""
    for tier in tree.tiers:
        run = node.runs[tier]
        if run is None:
            continue
        if tree.feeds:
            _tell(tree, run, np.arange(node.num_pages) >= at)
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
    """Remembers what began with a page below a node and is gone now: why, and whose visit it was."""
    key = key_of(page)
    tree.lost.add(node, key, loss)
    if visit is not None:
        tree.past.add(node, key, visit)


def _forget_notes(tree: Tree, node: Node) -> None:
    """A node leaves the tree: nothing can return to it."""
    tree.past.forget(node)
    tree.lost.forget(node)
    tree.lost_checkpoints.forget(node)


def _shorten(tree: Tree, node: Node, at: int) -> None:
    """Leaves a node the tokens of `at` pages, and says so."""
    node.num_pages = at
    node.keys = node.keys[: at * KEY_BYTES]
    node.rest = node.rest[: max(at - 1, 0) * tree.page_bytes]
    if node.missing_states:
        forget_cut(node, tree.spec.page_tokens)
    for told in tree.on_shortened:
        told(node)


def _tell(tree: Tree, run: Run, gone: npt.NDArray[np.bool_]) -> None:
    """Says which pages of a run leave its tier, of those that could be read. Called before they do."""
    could_be_read = tree.arenas[run.tier].state[Kind.PREFIX][run.ids] == READY  # of some other page where there is none
    tree.feeds.pages_evicted(run.node, run.tier, gone & (run.ids != ABSENT) & could_be_read)


def _num_ready(tree: Tree, run: Run, ids: PageIds) -> int:
    """How many of some of a run's pages can be read."""
    if run.num_ready == run.num_pages:
        return len(ids)
    return int(np.count_nonzero(tree.arenas[run.tier].state[Kind.PREFIX][ids] == READY))


def _remove_below(tree: Tree, top: Node, loss: Loss) -> None:
    """Empties a whole subtree that is being cut off; counts above it are the caller's."""
    stack = [top]
    while stack:
        node = stack.pop()
        if node.kids is not None:
            stack.extend(node.kids.by_page.values())
        for checkpoint in list((node.checkpoints or {}).values()):
            forget(tree, checkpoint, loss)
        _trim(tree, node, 0)
        node.parent = node.kids = None
        _forget_notes(tree, node)


def _unlink(tree: Tree, node: Node, loss: Loss) -> None:
    """Takes a node without pages out of its parent, which knows by then that nothing leads there."""
    parent, first = node.parent, node.first
    assert parent is not None and parent.kids is not None
    siblings = parent.kids.by_page
    del siblings[first]
    node.parent = None
    _forget_notes(tree, node)
    _note_gone(tree, parent, first, loss, node.visit)
    if not siblings:
        parent.kids = None
        if parent.parent is None and len(tree.roots) > KEPT_EMPTY_ROOTS:
            del tree.roots[PageKey(parent.first)]
            _forget_notes(tree, parent)
