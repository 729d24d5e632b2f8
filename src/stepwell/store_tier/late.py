"""Backup that waits until memory needs the space, so that the store duplicates little of what memory holds (`exclusive`).

    keep_clean    stores ahead what will leave the host next, so that no request waits for it
    leave_host    stores other content when it leaves the host, if possible, unless a full store would evict more valuable content
    release       lowers the level of fetched content in the store, for as long as memory has it

A checkpoint leaves before the pages it depends on, and without it nothing in memory can use the last of them: those that the
host has are stored with it. All others must be stored later (`Beliefs.must_store`): when they leave the host, even if nothing
in memory can use them by then, or if they are worth little. The same holds for pages before a run that was stored alone. Until
then a path is partly in memory and partly in the store, and a lookup finds all of it. Superseded checkpoints are not stored.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf

from stepwell.base.ids import Level, Tier
from stepwell.base.prompt import Namespace, PageKey
from stepwell.store_tier.backup import is_stored, put_checkpoint, put_path, relevel
from stepwell.store_tier.link import StoreLink
from stepwell.tiers.eviction import bytes_of, next_to_leave
from stepwell.tiers.saving import Save, save_runs
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.keys import keys_within
from stepwell.tree.node import Node, Residency, Run, Victim, previous_boundary

CLEAN_SHARE = 1 / 64  # of the host, stored ahead: what is used again before it leaves was written in vain and takes up space
LOOK_AGAIN = 1 / 4  # of that, to be evicted before the next search


def leave_host(state: CacheState, link: StoreLink, victim: Victim) -> Leaving:
    """Before something leaves the host: stores what exists nowhere else."""
    link.left_bytes += bytes_of(state, victim)
    node = _wanted(state, link, victim)
    if node is None:
        return Leaving.NOW
    if not _is_worth_its_room(state, link, victim):
        state.counters.add("backup_skipped_worth_less")
        return Leaving.NOW
    now = state.clock.now()
    done = False
    while link.may_put_at_once(now) and not done:
        done = put_path(state, link, node, beyond=_needed_from(victim))
    if not done:
        state.counters.add("backup_skipped_store_busy")
        return Leaving.BLOCKED if link.is_taking(now) else Leaving.NOW
    if isinstance(victim, Run):
        tail = state.tree.ranking.suffixes.of(victim)
        held = tail is not None and not state.tree.ranking.suffixes.idle(victim, tail.start, at_most=1).num_pages
        return Leaving.LATER if held else Leaving.NOW
    put_checkpoint(state, link, victim.checkpoint)
    return Leaving.AT_ONCE if victim.users else Leaving.NOW


def keep_clean(state: CacheState, link: StoreLink) -> None:
    """Stores ahead what will leave the host next, once some of what was stored ahead has left."""
    target = int(CLEAN_SHARE * state.arena(Tier.HOST).layout.size_bytes)
    if link.left_bytes < LOOK_AGAIN * target or not link.may_put(state.clock.now()):
        return
    link.left_bytes = 0
    coming = next_to_leave(state, Tier.HOST, target)
    link.ahead = {
        victim: True for victim in coming if _wanted(state, link, victim) is not None and _is_worth_its_room(state, link, victim)
    }


def put_ahead(state: CacheState, link: StoreLink) -> None:
    """Stores what will leave the host next, up to the limit."""
    for victim in list(link.ahead):
        node = _wanted(state, link, victim)
        if node is None:
            del link.ahead[victim]
            continue
        done = False
        while link.may_put(state.clock.now()) and not done:
            done = put_path(state, link, node, beyond=_needed_from(victim))
        if not done:
            return
        if not _is_covered(link, node, victim):
            again, link.ahead[victim] = link.ahead[victim], False
            if not again or save_runs(state, node) is not Save.STARTED:
                del link.ahead[victim]
                state.counters.add("backup_path_incomplete")
            continue
        if isinstance(victim, Residency):
            put_checkpoint(state, link, victim.checkpoint)
        del link.ahead[victim]


def put_everything_of(state: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Before memory is emptied: sends the host's content of some namespaces, even beyond the limit of operations in flight."""
    if not link.breaker.allows(state.clock.now()):
        return
    for node in state.tree.nodes():
        if node.parent is None or node.root.first not in namespaces:
            continue
        while node.kids is None and not put_path(state, link, node):
            pass
    for node in state.tree.nodes():
        if node.root.first in namespaces:
            for checkpoint in (node.checkpoints or {}).values():
                if not link.is_superseded(checkpoint):
                    put_checkpoint(state, link, checkpoint)


def _needed_from(victim: Victim) -> int:
    """The first page of a victim's path that nothing in memory can use once the victim has left. Pages before it stay in use, and
    are stored in their turn.
    """
    if isinstance(victim, Run):
        return victim.node.start
    checkpoint = victim.checkpoint
    return previous_boundary(checkpoint.node, checkpoint.page) if checkpoint.node is not None else 0


def _is_covered(link: StoreLink, node: Node, victim: Victim) -> bool:
    """Whether everything a victim depends on is believed to be in the store, or will follow."""
    upto = victim.checkpoint.page if isinstance(victim, Residency) else node.end
    return is_stored(link.beliefs, node, upto, or_follows=True)


def _wanted(state: CacheState, link: StoreLink, victim: Victim) -> Node | None:
    """The end of the path that must be stored before a victim may leave the host; None if nothing is lost with it."""
    if isinstance(victim, Residency):
        checkpoint = victim.checkpoint
        if victim.users or not victim.ready or checkpoint.ready_in(Tier.DEVICE) is not None:
            return None
        if checkpoint.node is None or checkpoint.node.expires_at < inf:
            return None  # content with a time to live stays in memory
        if link.beliefs.is_fresh(checkpoint) or link.is_superseded(checkpoint):
            return None
        return checkpoint.node
    if victim.node.runs[Tier.HOST] is not victim or victim.node.expires_at < inf:
        return None  # its node was split meanwhile, or it left: the remaining part comes in its turn
    tail = state.tree.ranking.suffixes.of(victim)
    if tail is None or tail.duplicate or victim.unsaved or (tail.unreachable and not link.beliefs.must_store(victim.node)):
        return None
    return victim.node if link.beliefs.fresh_pages(victim.node) < victim.node.num_pages else None


def _is_worth_its_room(state: CacheState, link: StoreLink, victim: Victim) -> bool:
    """Whether a victim is worth at least what a full store would evict for it. What stored content depends on always is."""
    if isinstance(victim, Run) and link.beliefs.must_store(victim.node):
        return True
    ranking = state.tree.ranking
    displaced, place = link.displaced.current, ranking.value_class_of(victim)
    return displaced is None or place is None or ranking.worth(place) >= ranking.worth(displaced)


def release_path(state: CacheState, link: StoreLink, path: Sequence[Node]) -> None:
    """Lowers the level of content of a path in use that was stored before eviction, and is still in memory."""
    pages: list[PageKey] = []
    boundaries: list[PageKey] = []
    for node in path:
        count = link.beliefs.fresh_pages(node)
        if count:
            pages += keys_within(node, node.start, node.start + count, state.tree.page_bytes)
        for page in link.beliefs.take_boundaries(node):
            boundaries += keys_within(node, page - 1, page, state.tree.page_bytes)
    namespace = link.namespace_of(state, path[0]) if pages or boundaries else None
    if namespace is not None:
        release(link, namespace, pages=tuple(pages), boundaries=tuple(boundaries))


def release(
    link: StoreLink, namespace: Namespace, *, pages: tuple[PageKey, ...] = (), boundaries: tuple[PageKey, ...] = ()
) -> None:
    """Lowers the level of stored content that memory has too."""
    relevel(link, namespace, Level.EXPENDABLE, pages=pages, boundaries=boundaries)
