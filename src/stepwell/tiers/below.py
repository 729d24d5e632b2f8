"""What stands below the host tier, as the two memory tiers see it: the one place where they meet a store."""

from __future__ import annotations

from typing import Protocol

from stepwell.tree.node import Node, Victim


class Below(Protocol):
    """Takes copies of what is on the host. Called on the cache's thread; never waits."""

    def offer(self, node: Node) -> None:
        """The path to a node has something on the host that may be new below."""
        ...

    def before_eviction(self, victim: Victim) -> bool:
        """Something is about to leave the host. True when it is on its way down now, and not to be evicted in this turn."""
        ...
