"""The cache's self-check: every reference has a known holder, and all invariants hold.

Slow, and changes nothing. Every random test ends with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.store_tier.link import StoreLink
from stepwell.tiers.lease import Lease
from stepwell.tiers.lifetime import Pin
from stepwell.tiers.state import CacheState
from stepwell.tree import audit as tree_audit
from stepwell.tree.node import ABSENT, Residency


def audit(state: CacheState, leases: Sequence[Lease], pins: Sequence[Pin], links: Sequence[StoreLink] = ()) -> None:
    """Asserts invariants of arenas, tree, jobs, leases, pins, store operations and rests together."""
    tree_audit.audit(state.tree)
    holders = list(_holders(state, leases, pins, links))
    for tier, arena in state.tree.arenas.items():
        arena.audit()
        for kind in arena.layout.strides:
            expected = np.zeros_like(arena.refs[kind])
            for held_tier, held_kind, ids in holders:
                if held_tier is tier and held_kind is kind:
                    np.add.at(expected, ids, 1)
            wrong = np.flatnonzero(expected != arena.refs[kind])[:8]
            counted, held = arena.refs[kind][wrong], expected[wrong]
            assert not len(wrong), f"{tier.label} {kind.label}: pages {wrong} have {counted} references, {held} are held"
    for tier, arena in state.tree.arenas.items():
        for kind in arena.layout.strides:
            expected = np.zeros_like(arena.tree_refs[kind])
            for held_tier, held_kind, ids in _kept_by_tree(state):
                if held_tier is tier and held_kind is kind:
                    np.add.at(expected, ids, 1)
            assert (expected == arena.tree_refs[kind]).all(), f"{tier.label} {kind.label}: the tree's references do not add up"
    state.copies.audit()
    _audit_rows(state, leases)
    _audit_users(state, leases, pins, links)
    for link in links:
        link.deferred.audit()
        link.beliefs.audit()
    for lease in leases:
        assert lease.sources.total == lease.prompt_tokens, f"{lease}: {lease.sources} does not add up"


def _audit_rows(state: CacheState, leases: Sequence[Lease]) -> None:
    """Rows are in one place each, and those that are only on the host are readable there."""
    row_pages = state.row_pages
    if row_pages is None:
        return
    row_pages.audit()
    backing = row_pages.host[row_pages.host != ABSENT]
    assert state.arena(Tier.HOST).is_ready(Kind.PREFIX, backing), "rows are on a host page that cannot be read"
    held = sorted((number, page) for lease in leases for number, page in zip(lease.hot_numbers, lease.hot_pages, strict=True))
    assigned = sorted(row_pages.hot.items())
    assert held == assigned, f"leases have hot pages {held[:8]}, assigned are {assigned[:8]}"


def _kept_by_tree(state: CacheState) -> Iterator[tuple[Tier, Kind, PageIds]]:
    if state.row_pages is not None:
        yield Tier.DEVICE, Kind.ROWS, state.row_pages.holders()[0]
    for node in state.tree.nodes():
        for run in node.runs:
            if run is not None:
                yield run.tier, Kind.PREFIX, run.ids[run.ids != ABSENT]
        for checkpoint in (node.checkpoints or {}).values():
            for residency in checkpoint.residencies:
                if residency is not None:
                    for kind, ids in residency.spans():
                        yield residency.tier, kind, ids


def _holders(
    state: CacheState, leases: Sequence[Lease], pins: Sequence[Pin], links: Sequence[StoreLink]
) -> Iterator[tuple[Tier, Kind, PageIds]]:
    yield from _kept_by_tree(state)
    for lease in leases:
        yield state.nearest, Kind.PREFIX, lease.prefix_pages
        yield state.nearest, Kind.WINDOW, lease.window_pages
        yield state.nearest, Kind.POINT, lease.point_pages
        yield state.nearest, Kind.POINT, lease.spare_points
        yield from ((state.nearest, Kind.POINT, copy) for copy in lease.point_copies.values())
        yield state.nearest, Kind.ROWS, lease.hot_pages
    if state.row_pages is not None:
        yield Tier.HOST, Kind.PREFIX, state.row_pages.holders()[1]
    for span in state.copies.held():
        yield span.tier, span.kind, span.ids
    for pin in pins:
        for tier, ids in pin.pages:
            yield tier, Kind.PREFIX, ids
    for link in links:
        yield from link.holders()
    for residency in _pinned(state, leases, pins, links):
        for kind, ids in residency.spans():
            yield residency.tier, kind, ids


def _pinned(
    state: CacheState, leases: Sequence[Lease], pins: Sequence[Pin], links: Sequence[StoreLink]
) -> Iterator[Residency]:  # fmt: skip
    """Every checkpoint that a lease, a pin, a hand-out, a copy or a fetch has pinned, once for each."""
    held = [lease.restored for lease in leases] + [pin.residency for pin in pins]
    yield from (residency for residency in held if residency is not None)
    yield from state.copies.readers()
    for link in links:
        yield from link.readers()


def _audit_users(state: CacheState, leases: Sequence[Lease], pins: Sequence[Pin], links: Sequence[StoreLink]) -> None:
    pinned = list(_pinned(state, leases, pins, links))
    for node in state.tree.nodes():
        for checkpoint in (node.checkpoints or {}).values():
            pinned += [residency for residency in checkpoint.residencies if residency is not None and residency.users]
    times = Counter(id(residency) for residency in _pinned(state, leases, pins, links))
    for residency in pinned:
        assert residency.users == times[id(residency)], f"{residency.users=} but it is pinned {times[id(residency)]} times"
