"""Everything that is cached now, as a feed would have reported it, for listeners that start late or lost events.

Visits every node. Changes nothing but the keys that nodes keep.
"""

from __future__ import annotations

import sys

from stepwell.base.ids import Kind
from stepwell.memory.arena import READY
from stepwell.tree.feed import CacheEvent, EventKind, Feeds
from stepwell.tree.node import ABSENT
from stepwell.tree.tree import Tree


def cached_now(tree: Tree) -> list[CacheEvent]:
    """Events for the pages and checkpoints that are readable in memory, parents before children. Stores are not included."""
    feeds = Feeds(tree.page_bytes)
    feed = feeds.listen(lambda _: None, most_pages=sys.maxsize)
    for node in tree.nodes():
        if node.parent is None:
            continue
        for tier in tree.tiers:
            run = node.runs[tier]
            if run is not None:
                can_be_read = tree.arenas[tier].state[Kind.PREFIX][run.ids] == READY  # meaningless where the id is ABSENT
                feeds.pages_stored(node, tier, can_be_read & (run.ids != ABSENT))
            for checkpoint in (node.checkpoints or {}).values():
                residency = checkpoint.ready_in(tier)
                if residency is not None:
                    feeds.checkpoint(EventKind.CHECKPOINT_STORED, node, residency)
    return feed.take()
