"""A durable cache: committed content is stored soon, though the host would otherwise receive it only when it leaves the device
(`exclusive`).

    save_on_the_way    copies to the host what the store lacks of a path: the store takes it from there
    line_up            queues a path that waits for space on the host
    save_again         retries the path that has waited longest, when the store has taken what was on the host
    leave_for_good     stores what leaves the host before its turn, as far as possible
    line_up_all        before the cache is closed, queues all content that only the device has, whatever the policy

Stored content is not copied again: the host's copy was only a step towards the store, and is the first to be evicted while the
device has the content too. Content that leaves the host while the store accepts nothing is queued again if the device has it, and
lost if not.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from stepwell.base.ids import Tier
from stepwell.store_tier.backup import put_before_leaving, put_path
from stepwell.store_tier.link import StoreLink, Unplaced
from stepwell.tiers.saving import missing_pages, save_residency, save_runs
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.node import Node, Residency, Run, Victim


def save_on_the_way(state: CacheState, link: StoreLink, node: Node) -> None:
    """Copies to the host what it and the store lack of a path. Superseded checkpoints are not worth it."""
    path = _path_to_store(state, link, node)
    if path:
        save_runs(state, path[-1], beyond=link.beliefs.pages)
    for residency in [each for above in path for each in _lacking(link, above)]:
        if residency.checkpoint.node is not None and residency.checkpoint.residencies[Tier.HOST] is None:
            save_residency(state, residency)


def line_up(state: CacheState, link: StoreLink, node: Node) -> None:
    """Queues a path until the host has space. The queue is kept short."""
    if link.detached or node in link.unplaced:
        return
    if len(link.unplaced) >= link.tuning.backup_queue:
        state.counters.add("backup_dropped_queue_full")
        return
    link.unplaced[node] = Unplaced(state.clock.now())


def line_up_all(state: CacheState, link: StoreLink) -> None:
    """Queues every path with content that only the device has, the latest used first."""
    ends = [node for node in state.tree.nodes() if node.parent is not None and node.kids is None]
    for node in sorted(ends, key=lambda end: end.used_at, reverse=True):
        if len(link.unplaced) < link.tuning.backup_queue and is_lacking(state, link, node):
            line_up(state, link, node)


def save_again(state: CacheState, link: StoreLink) -> None:
    """Retries one path that waits for space on the host, once everything there has been sent; and none a second time before the
    store has taken something since.
    """
    now = state.clock.now()
    node, tried = next(iter(link.unplaced.items()))
    if node.parent is None or now - tried.since_s > link.tuning.backup_age_s:
        del link.unplaced[node]
        state.counters.add("backup_dropped_too_old", int(node.parent is not None))
    elif not link.waiting and link.may_put(now) and tried.num_taken < link.num_taken:
        del link.unplaced[node]
        save_on_the_way(state, link, node)
        if is_lacking(state, link, node):
            link.unplaced[node] = Unplaced(tried.since_s, link.num_taken)
    elif link.may_put(now) and not (link.waiting or link.ops.num_running or state.copies.num_running):  # never free
        del link.unplaced[node]
        state.counters.add("backup_dropped_no_room")


def leave_for_good(state: CacheState, link: StoreLink, victim: Victim) -> Leaving:
    """Before something leaves the host: starts storing what is not stored. Pages leave once they are stored."""
    node = victim.node if isinstance(victim, Run) else victim.checkpoint.node
    if node is None or not _is_wanted(state, link, victim):
        return Leaving.NOW
    now, done = state.clock.now(), False
    while link.may_put_at_once(now) and not done:
        done = put_path(state, link, node)
    leaving = _leave_run(state, victim) if isinstance(victim, Run) else put_before_leaving(state, link, victim)
    if not done and leaving is Leaving.NOW:
        state.counters.add("backup_skipped_store_busy")
    if leaving is Leaving.NOW and node.runs[Tier.DEVICE] is not None and not link.may_put_at_once(now):
        line_up(state, link, node)
    return leaving


def _leave_run(state: CacheState, run: Run) -> Leaving:
    """LATER, while the store reads its end."""
    tail = state.tree.ranking.suffixes.of(run)
    held = tail is not None and not state.tree.ranking.suffixes.idle(run, tail.start, at_most=1).num_pages
    return Leaving.LATER if held else Leaving.NOW


def _is_wanted(state: CacheState, link: StoreLink, victim: Victim) -> bool:
    """Whether the store lacks something useful that is about to leave the host."""
    if isinstance(victim, Residency):
        return victim.ready and not victim.users and not link.beliefs.has(victim.checkpoint)
    tail = state.tree.ranking.suffixes.of(victim)
    return tail is not None and not tail.unreachable and link.beliefs.pages(victim.node) < victim.node.num_pages


def _path_to_store(state: CacheState, link: StoreLink, node: Node) -> list[Node]:
    """The part of a path that the store may have: nothing of cleared namespaces, and nothing with a time to live."""
    if not state.has_both_tiers or link.namespace_of(state, node) is None:
        return []
    path = node.path()
    return path[: next((index for index, each in enumerate(path) if each.expires_at < inf), len(path))]


def is_lacking(state: CacheState, link: StoreLink, node: Node) -> bool:
    """Whether only the device has something of a path that must be stored."""
    for each in _path_to_store(state, link, node):
        missing = missing_pages(state, each)
        if len(missing) and missing[-1] >= link.beliefs.pages(each):
            return True
        if next(_lacking(link, each), None) is not None:
            return True
    return False


def _lacking(link: StoreLink, node: Node) -> Iterator[Residency]:
    """Checkpoints of a node that only the device has and that must be stored."""
    for checkpoint in (node.checkpoints or {}).values():
        residency = checkpoint.ready_in(Tier.DEVICE)
        if residency is None or checkpoint.residencies[Tier.HOST] is not None or link.beliefs.has(checkpoint):
            continue
        if not link.is_superseded(checkpoint):
            yield residency
