"""The tree's self-check: asserts the invariants of `tree.py` and `ranking.py`. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import FREE, READY
from stepwell.tree.accounts import Account
from stepwell.tree.node import ABSENT, Checkpoint, Node, Residency, Run, Victim
from stepwell.tree.tree import NODE_PAGES, Tree


def audit(tree: Tree) -> None:
    """Walks the whole tree once."""
    owned = dict.fromkeys(tree.tiers, 0)
    held: dict[tuple[Account, Tier, Kind], list[PageIds]] = {}
    for node in tree.nodes():
        if node.parent is not None:
            _audit_node(tree, node)
        _audit_kids(tree, node)
        _add_held(tree, node, held)
        for run in node.runs:
            if run is not None:
                _audit_run(tree, run)
                owned[run.tier] += run.num_pages
        for checkpoint in (node.checkpoints or {}).values():
            assert checkpoint.node is node and node.start < checkpoint.page <= node.end, (
                f"a checkpoint at {checkpoint.page} in {node}"
            )
            assert any(checkpoint.residencies), f"a checkpoint at {checkpoint.page} is in no tier"
            _audit_follower(checkpoint)
            for residency in checkpoint.residencies:
                if residency is not None:
                    _audit_residency(tree, residency)
    for tier, count in owned.items():
        owners = sum(owner is not None for owner in tree.owner[tier])
        assert owners == count, f"{tier.label}: {owners} pages have an owner, {count} are in runs"
    _audit_accounts(tree, held)
    tree.ranking.own.audit(_queued(tree))
    nodes = set(tree.nodes())
    for notes in (tree.past, tree.lost, tree.lost_checkpoints):
        notes.audit(nodes)


def _queued(tree: Tree) -> Iterator[tuple[Account, Victim]]:
    """Every queued victim, with its account."""
    for node in tree.nodes():
        held = [each for checkpoint in (node.checkpoints or {}).values() for each in checkpoint.residencies]
        for victim in (*node.runs, *held):
            if victim is not None and victim.entry:
                yield node.account, victim


def _add_held(tree: Tree, node: Node, held: dict[tuple[Account, Tier, Kind], list[PageIds]]) -> None:
    """Adds the pages of a node, their rows, and the pages of its checkpoints to those of its account."""
    assert node.parent is None or node.account is node.parent.account, f"{node} is not of its parent's account"

    def add(tier: Tier, kind: Kind, ids: PageIds) -> None:
        held.setdefault((node.account, tier, kind), []).append(ids[ids != ABSENT])

    for run in node.runs:
        if run is not None:
            add(run.tier, Kind.PREFIX, run.ids)
            if run.tier is Tier.DEVICE and tree.row_pages is not None:
                add(run.tier, Kind.ROWS, tree.row_pages.rows[run.ids[run.ids != ABSENT]])
    for checkpoint in (node.checkpoints or {}).values():
        for residency in checkpoint.residencies:
            if residency is not None:
                for kind, ids in residency.spans():
                    add(residency.tier, kind, ids)


def _audit_accounts(tree: Tree, held: dict[tuple[Account, Tier, Kind], list[PageIds]]) -> None:
    found: dict[tuple[Account, Tier], int] = {}
    for (account, tier, kind), ids in held.items():
        size = len(np.unique(np.concatenate(ids))) * tree.arenas[tier].layout.strides[kind]
        found[account, tier] = found.get((account, tier), 0) + size
    tree.accounts.audit(found)


def _audit_node(tree: Tree, node: Node) -> None:
    assert node.parent is not None and node.parent.kids is not None
    assert node.parent.kids.by_page.get(node.first) is node, f"{node} is not where its parent looks"
    assert node.start == node.parent.end, f"{node} starts away from the end of {node.parent}"
    assert 1 <= node.num_pages <= NODE_PAGES, f"{node} has a length of {node.num_pages}"
    assert len(node.first) + len(node.rest) == node.num_pages * tree.page_bytes, f"{node} has tokens for another length"
    assert node.parent.parent is None or node.expires_at <= node.parent.expires_at, f"{node} outlives its parent"
    for state, token in (node.missing_states or {}).items():
        assert node.start <= token // tree.spec.page_tokens < node.end, f"{node} has a note of {state} at token {token}"
    held = np.zeros(node.num_pages, np.bool_)
    for run in node.runs:
        if run is not None:
            held |= run.ids != ABSENT
    assert held.all(), f"{node}: page {int(held.argmin())} is in no tier"


def _audit_kids(tree: Tree, node: Node) -> None:
    if node.kids is None:
        return
    assert node.kids.by_page, f"{node} has an empty table of children"
    for tier in tree.tiers:
        below = sum(child.leads_to_pages(tier) for child in node.kids.by_page.values())
        anchored = sum(child.leads_to_checkpoints(tier) for child in node.kids.by_page.values())
        assert node.kids.below[tier] == below, f"{node}: {node.kids.below[tier]=} but {below} children lead to pages"
        assert node.kids.anchored[tier] == anchored, f"{node}: {node.kids.anchored[tier]=} but {anchored} lead to checkpoints"


def _audit_run(tree: Tree, run: Run) -> None:
    arena, node = tree.arenas[run.tier], run.node
    assert node.runs[run.tier] is run and len(run.ids) == node.num_pages, f"{node}: its run has {len(run.ids)} entries"
    ids = run.ids[run.ids != ABSENT]
    state = arena.state[Kind.PREFIX][ids]
    assert len(ids) == run.num_pages > 0, f"{node}: {len(ids)} pages counted as {run.num_pages}"
    assert int(np.count_nonzero(state == READY)) == run.num_ready, f"{node}: {run.num_ready=} is wrong"
    assert (state != FREE).all(), f"{node} refers to a free page"
    assert all(owner is node for owner in tree.owner[run.tier][ids]), f"{node}: a page of it has another owner"
    tail = tree.ranking.suffixes.of(run)
    if tail is not None and tree.ranking.suffixes.idle(run, tail.start, at_most=1).num_pages:
        assert run.entry, f"{node} could be evicted from {run.tier.label} but is not queued"


def _audit_follower(checkpoint: Checkpoint) -> None:
    follower = checkpoint.follower
    here = follower.node if follower is not None else checkpoint.node
    while here is not None and here is not checkpoint.node:
        here = here.parent
    assert here is not None, f"the checkpoint at {checkpoint.page} is followed by one of another branch"
    assert follower is None or follower.page > checkpoint.page, f"{checkpoint.page=} is followed by one above it"


def _audit_residency(tree: Tree, residency: Residency) -> None:
    arena, checkpoint = tree.arenas[residency.tier], residency.checkpoint
    boundary = checkpoint.page * tree.spec.page_tokens
    assert tree.spec.is_legal(boundary), f"a checkpoint at the illegal boundary {boundary}"
    assert len(residency.windows) == len(tree.spec.window_span(boundary)), f"{len(residency.windows)} window pages at {boundary}"
    assert len(residency.points) == (1 if tree.spec.parts(Kind.POINT) else 0), (
        f"{len(residency.points)} point pages at {boundary}"
    )
    if residency.ready:
        for kind, ids in residency.spans():
            assert arena.is_ready(kind, ids), f"a ready checkpoint at {boundary} has pages that are not"
        if not residency.users:
            assert residency.entry, f"the checkpoint at {boundary} could be evicted from {residency.tier.label} but is not queued"
