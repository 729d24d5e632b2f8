"""References to pages and checkpoints, taken and given back. What nobody but the tree refers to may be evicted."""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.base.ids import Kind, Tier
from stepwell.base.plan import PageIds, Span
from stepwell.tree.node import Residency
from stepwell.tree.tree import Tree


class References:
    """What leases, pins and jobs hold of one cache's memory. One thread."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def retain(self, spans: Iterable[Span]) -> None:
        """Takes a reference to every page. Pages of the engine's own memory are not ours to count."""
        for span in spans:
            if span.tier is not Tier.ENGINE:
                self._tree.arenas[span.tier].retain(span.kind, span.ids)

    def release_all(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.tier is not Tier.ENGINE:
                self.release(span.tier, span.kind, span.ids)

    def release(self, tier: Tier, kind: Kind, ids: PageIds) -> None:
        """Gives references back, and lets the tree know that it may be the last holder now."""
        self._tree.arenas[tier].release(kind, ids)
        if kind is Kind.PREFIX:
            self._tree.requeue(tier, ids)

    def unpin(self, residency: Residency) -> None:
        """One user of a checkpoint less; one that nobody reads is a candidate for eviction again."""
        residency.users -= 1
        assert residency.users >= 0, f"{residency.users=}"
        if not residency.users:
            self._tree.ranking.queue_residency(residency)
