"""Backup that waits until memory needs the room, so that the store repeats little of what memory holds (`exclusive`).

    keep_clean    what will leave the host next is stored ahead, so that nobody waits for it
    leave_host    what leaves the host without that is stored now, as far as may be, unless a full store would give up more for it
    release       what came up from the store is worth little there, as long as memory has it

A checkpoint leaves before the pages it stands on, and without it nothing in memory can use the last of them: those that the host
has are stored with it. All others are owed to the store (`Beliefs.must_store`): they go down when they leave, be it that nothing in
memory can use them by then, or that they are worth little. So are pages before a run that went down alone. Until then a path is
partly in memory and partly in the store, and is found whole. What another checkpoint of its path serves for is not stored.
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

CLEAN_SHARE = 1 / 64  # of the host, stored ahead: what is used again before it leaves is written, and takes up room, for nothing
LOOK_AGAIN = 1 / 4  # of that, to be gone before more is looked for


def leave_host(state: CacheState, link: StoreLink, victim: Victim) -> Leaving:
    """Before something leaves the host: stores what is in no other place."""
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
        tail = state.tree.ranking.tails.of(victim)
        held = tail is not None and not state.tree.ranking.tails.idle(victim, tail.start, at_most=1).num_pages
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
    """Stores what is in line to leave the host, as long as there is leave to."""
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
    """Before memory is emptied: sends off what the host has of some namespaces, be it more than goes down at a time."""
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
    """From which page on nothing in memory could use the path of a victim once it has left. What is before that stays in use
    there, and goes down in its turn.
    """
    if isinstance(victim, Run):
        return victim.node.start
    checkpoint = victim.checkpoint
    return previous_boundary(checkpoint.node, checkpoint.page) if checkpoint.node is not None else 0


def _is_covered(link: StoreLink, node: Node, victim: Victim) -> bool:
    """Whether all that a victim stands on is believed to be in the store, or follows it there."""
    upto = victim.checkpoint.page if isinstance(victim, Residency) else node.end
    return is_stored(link.beliefs, node, upto, or_follows=True)


def _wanted(state: CacheState, link: StoreLink, victim: Victim) -> Node | None:
    """The end of the path that has to be stored before a victim may leave the host; None when nothing is lost with it."""
    if isinstance(victim, Residency):
        checkpoint = victim.checkpoint
        if victim.users or not victim.ready or checkpoint.ready_in(Tier.DEVICE) is not None:
            return None
        if checkpoint.node is None or checkpoint.node.expires_at < inf:
            return None  # what has a time to live stays in memory
        if link.beliefs.is_fresh(checkpoint) or link.is_superseded(checkpoint):
            return None
        return checkpoint.node
    if victim.node.runs[Tier.HOST] is not victim or victim.node.expires_at < inf:
        return None  # its node was cut meanwhile, or it left: what is there of it now comes in its turn
    tail = state.tree.ranking.tails.of(victim)
    if tail is None or tail.repeated or victim.unsaved or (tail.dead and not link.beliefs.must_store(victim.node)):
        return None
    return victim.node if link.beliefs.fresh_pages(victim.node) < victim.node.num_pages else None


def _is_worth_its_room(state: CacheState, link: StoreLink, victim: Victim) -> bool:
    """Whether a victim is worth no less than what a full store would give up for it. What stored things stand on always is."""
    if isinstance(victim, Run) and link.beliefs.must_store(victim.node):
        return True
    ranking = state.tree.ranking
    displaced, place = link.displaced.next, ranking.place_of(victim)
    return displaced is None or place is None or ranking.worth(place) >= ranking.worth(displaced)


def release_path(state: CacheState, link: StoreLink, path: Sequence[Node]) -> None:
    """A path is used that was stored to leave, and has not left."""
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
    """Memory has these too."""
    relevel(link, namespace, Level.EXPENDABLE, pages=pages, boundaries=boundaries)
