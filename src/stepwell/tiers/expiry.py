"""Time to live: paths leave the tree when the longest limit that any use of them was given runs out.

A use without a limit is for ever. Every use covers a whole path from the root, so a node never expires before what
is below it. What is pinned stays until its pins are gone, and leaves then if its time was up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heappop, heappush
from math import inf

from stepwell.tiers.state import CacheState
from stepwell.tree.node import LossReason, Node
from stepwell.tree.pruning import truncate


def note_expiry(core: CacheState, node: Node | None) -> None:
    """Remembers when a path's nodes run out, if they do. An entry that is too early is put off when it comes up."""
    while node is not None and node.parent is not None and node.expires_at < inf:
        if not node.expiry_noted:
            _remember(core, node)
        node = node.parent


def note_split(core: CacheState, upper: Node) -> None:
    """The upper part of a node that was cut runs out by itself: whoever cut it need not think of that."""
    if upper.expires_at < inf:
        _remember(core, upper)


def drop_expired(core: CacheState, pinned: Callable[[], Collection[Node]]) -> int:
    """Takes out what has run out by now; returns how many nodes. Leases keep their pages.

    Leaves alone what is pinned; whoever lets go of a pin notes its path again.
    """
    now, dropped = core.clock.now(), 0
    kept: Collection[Node] | None = None
    while core.expiries and core.expiries[0][0] <= now:
        *_, node = heappop(core.expiries)
        node.expiry_noted = False
        if node.parent is None:
            continue
        if node.expires_at > now:
            if node.expires_at < inf:
                _remember(core, node)
            continue
        kept = pinned() if kept is None else kept  # asked only when something has run out
        if node in kept:
            continue
        truncate(core.tree, node, 0, core.loss(LossReason.EXPIRED, core.nearest))
        dropped += 1
    core.counters.add("expired_nodes", dropped)
    return dropped


def _remember(core: CacheState, node: Node) -> None:
    node.expiry_noted = True
    core.expiry_number += 1
    heappush(core.expiries, (node.expires_at, -node.start, core.expiry_number, node))
