"""A cache that is durable: what is committed goes down to the store soon, though the host would hold it only when it leaves the
device (`adaptive`, `back`).

    save_on_the_way           what the store lacks of a path is copied to the host, where the store takes it from
    put_run_before_leaving    pages that leave the host before their turn are stored now, as far as may be

What is in the store is not copied again: the host's copy was for the way down, and is the first to go, as long as the device has
it too.
"""

from __future__ import annotations

from stepwell.base.ids import Tier
from stepwell.store_tier.backup import put_path
from stepwell.store_tier.link import StoreLink
from stepwell.tiers.saving import save_residency, save_runs
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.node import Node, Run


def save_on_the_way(state: CacheState, link: StoreLink, node: Node) -> None:
    """Copies to the host what it lacks of a path and the store too. Superseded checkpoints are not worth it."""
    if not state.has_both_tiers:
        return
    save_runs(state, node, beyond=link.beliefs.pages)
    for each in node.path():
        for checkpoint in list((each.checkpoints or {}).values()):
            residency = checkpoint.ready_in(Tier.DEVICE)
            if residency is None or checkpoint.held[Tier.HOST] is not None or link.beliefs.has(checkpoint):
                continue
            if not link.is_superseded(checkpoint):
                save_residency(state, residency)


def put_run_before_leaving(state: CacheState, link: StoreLink, run: Run) -> Leaving:
    """Before pages leave the host: starts storing those that are not stored. They leave when they are."""
    tail = state.tree.ranking.tails.of(run)
    if tail is None or tail.dead or link.detached or link.beliefs.pages(run.node) == run.node.num_pages:
        return Leaving.NOW
    if not link.may_put_at_once(state.clock.now()):
        state.counters.add("backup_skipped_store_busy")
        return Leaving.NOW
    put_path(state, link, run.node)
    held = not state.tree.ranking.tails.idle(run, tail.start, at_most=1).num_pages
    return Leaving.LATER if held else Leaving.NOW
