"""Backup from the host to the store, in the background: the pages of a path, parents before children, then its checkpoints.

    offer                  a node has new content on the host: its path is queued
    pump                   sends the oldest paths, within the limit of operations in flight, and checkpoints that are due
    put_before_leaving     stores a checkpoint that leaves the host and whose backup was deferred (`deferred.py`)

A queued path holds no pages: its nodes may split or be evicted meanwhile, and its turn covers what remains. Pages in flight are
held by their operation. Beliefs may be wrong: the store worker queries the store before it writes, and a value that was wrongly
believed to be stored is a miss later, never more. Refused content is sent again only after its next use, so that a queued path
comes to its end whatever the store answers. A checkpoint is stored only when everything it depends on is believed to be stored.
If it was refused, the checkpoint before it is deferred again.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from stepwell.base.ids import Kind, Level, Tier
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.tasks import ItemStatus, Outcome, PageIds, PutCheckpoint, PutPages, Relevel
from stepwell.memory.arena import READY
from stepwell.policy.store_use import BreakerState
from stepwell.policy.value import ValueClass
from stepwell.store_tier.link import Beliefs, StoreLink
from stepwell.store_tier.ops import Call
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.feed import EventKind
from stepwell.tree.keys import keys_within
from stepwell.tree.node import ABSENT, Checkpoint, Node, Residency, Victim, previous_checkpoint

CHUNK_BYTES, CHUNK_SHARE = 64 * 2**20, 1 / 16  # of pages in one operation, and of the host tier, at most


def offer(state: CacheState, link: StoreLink, node: Node) -> None:
    """Queues the path to a node; a full queue refuses new paths."""
    if link.detached or node in link.waiting:
        return
    if len(link.waiting) >= link.tuning.backup_queue:
        state.counters.add("backup_dropped_queue_full")
        return
    link.waiting[node] = state.clock.now()


def offer_everything(state: CacheState, link: StoreLink) -> None:
    """After a store was attached: offers everything that is on the host already."""
    for node in state.tree.nodes():
        if node.parent is not None and node.kids is None:
            offer(state, link, node)


def forget_refusals(state: CacheState) -> None:
    """Clears all refusals: the store is a new one."""
    for node in state.tree.nodes():
        run = node.runs[Tier.HOST]
        if run is not None:
            run.unsaved = False
        for checkpoint in (node.checkpoints or {}).values():
            residency = checkpoint.residencies[Tier.HOST]
            if residency is not None:
                residency.unsaved = False


def pump(state: CacheState, link: StoreLink) -> None:
    """Sends queued paths, oldest first, up to the limit."""
    now = state.clock.now()
    link.came_by(now)
    if link.may_put(now):
        _put_due(state, link)
    while link.waiting and link.may_put(state.clock.now()):
        node, since_s = next(iter(link.waiting.items()))
        del link.waiting[node]
        if now - since_s > link.tuning.backup_age_s:
            state.counters.add("backup_dropped_too_old")
        elif node.parent is not None and not put_path(state, link, node):
            link.waiting[node] = since_s  # more of it remains than one operation takes
    if link.deferred.num_due and link.may_put(state.clock.now()):
        _put_due(state, link)  # checkpoints deferred just now, if nothing may be deferred
    dropped = link.deferred.give_up(now, link.tuning.backup_age_s)
    while link.waiting and now - next(iter(link.waiting.values())) > link.tuning.backup_age_s:
        del link.waiting[next(iter(link.waiting))]
        dropped += 1
    if dropped:
        state.counters.add("backup_dropped_too_old", dropped)


def put_waiting_of(state: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Before memory is emptied: sends queued paths of some namespaces, even beyond the limit of operations in flight."""
    for node in list(link.waiting) if link.breaker.allows(state.clock.now()) else ():
        if node.parent is not None and node.root.first in namespaces:
            del link.waiting[node]
            while not put_path(state, link, node):
                pass


def put_deferred_of(state: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Like `put_waiting_of`, for the deferred checkpoints of some namespaces."""
    for checkpoint in list(link.deferred) if link.breaker.allows(state.clock.now()) else ():
        node = checkpoint.node
        if node is not None and node.root.first in namespaces and link.deferred.leave(checkpoint):
            put_checkpoint(state, link, checkpoint)


def put_before_leaving(state: CacheState, link: StoreLink, victim: Victim) -> Leaving:
    """Before a checkpoint whose backup was deferred leaves the host: starts storing it. It may leave then: the operation holds
    what it reads, and the pages it depended on must not wait for it.
    """
    if not isinstance(victim, Residency):
        return Leaving.NOW
    if victim.checkpoint in link.deferred and not link.may_put_at_once(state.clock.now()):
        link.deferred.leave(victim.checkpoint)
        state.counters.add("backup_skipped_store_busy")
        return Leaving.NOW
    return Leaving.AT_ONCE if _put_deferred(state, link, victim) else Leaving.NOW


# ---- pages --------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Stretch:
    """Contiguous pages of a path, beginning at page `first`, and their nodes."""

    first: int
    end: int
    ids: list[PageIds] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node, ids: PageIds) -> None:
        self.ids.append(ids)
        self.nodes.append(node)
        self.end += len(ids)


def put_path(state: CacheState, link: StoreLink, node: Node, *, beyond: int = 0) -> bool:
    """Sends the pages of a path that the store lacks, and defers its checkpoints; False if more is left than fits into one
    operation. Leaves out nodes up to page `beyond`: they are stored when they leave memory. If the stored pages are useful
    without a checkpoint, the omitted ones are required from now on; otherwise storing the checkpoint requires them.
    """
    path = node.path()
    namespace = link.namespace_of(state, node)
    if namespace is None:
        return True
    layout = state.arena(Tier.HOST).layout
    room = max(int(min(CHUNK_BYTES, layout.size_bytes * CHUNK_SHARE)) // layout.strides[Kind.PREFIX], 1)
    stretch = _Stretch(first=0, end=0)
    covered, room_before = 0, room
    for each in path:
        if each.expires_at < inf:
            break  # content with a time to live stays in memory
        stored = link.stored_pages(each)
        if each.end <= beyond and will_follow(each):
            continue
        if stored < each.num_pages:
            first = each.start + stored
            fresh = _ready_after(state, each, stored)[:room]
            if len(fresh):
                if first > stretch.end:  # the pages in between are stored already
                    _put_stretch(state, link, namespace, stretch)
                    stretch = _Stretch(first=first, end=first)
                stretch.add(each, fresh)
                stored += len(fresh)
                link.beliefs.set_pages(each, stored, at_s=state.clock.now())
                room -= len(fresh)
        covered = each.start + stored
        if stored < each.num_pages and not (link.is_late and room > 0 and will_follow(each)):
            break
    _put_stretch(state, link, namespace, stretch)
    if room < room_before and state.spec.free_step is not None:
        link.beliefs.note_owed(node, beyond)
    if not link.is_late:
        _defer_backups(state, link, path, upto=covered)
    return room > 0


def _put_stretch(state: CacheState, link: StoreLink, namespace: Namespace, stretch: _Stretch) -> None:
    """Sends the pages of one stretch."""
    if not stretch.ids:
        return
    first, last, ids = stretch.first, stretch.nodes[-1], np.concatenate(stretch.ids)
    keys = keys_within(last, max(first - 1, 0), stretch.end, state.tree.page_bytes)
    parent = keys.pop(0) if first else None
    size_bytes = len(ids) * state.arena(Tier.HOST).layout.strides[Kind.PREFIX]
    link.put_began(size_bytes, state.clock.now())
    task = PutPages(parent=parent, first=first, keys=tuple(keys), ids=ids, level=_level_of(state, last))
    place = state.tree.ranking.value_class_of_pages(last, Tier.HOST)
    done = partial(_pages_put, state, link, namespace, stretch.nodes, task, size_bytes, place)
    link.ops.send(task, namespace, done, call=Call(), pages=((Kind.PREFIX, ids),))


def _ready_after(state: CacheState, node: Node, start: int) -> PageIds:
    """The node's host pages from index `start` on, as far as they can be read without a gap; none that were refused."""
    run = node.runs[Tier.HOST]
    if run is None or run.unsaved:
        return np.empty(0, np.int32)
    ids = run.ids[start:]
    ready = (ids != ABSENT) & (state.arena(Tier.HOST).state[Kind.PREFIX][ids] == READY)
    return ids[: int(ready.argmin())] if not ready.all() else ids.copy()


def _pages_put(
    state: CacheState, link: StoreLink, namespace: Namespace, touched: list[Node], task: PutPages, size_bytes: int,
    place: ValueClass, outcome: Outcome, took_s: float,
) -> None:  # fmt: skip
    first = task.first
    link.displaced.note(place, outcome.moved_bytes)
    link.put_ended(size_bytes, state.clock.now(), taken=ItemStatus.OK in outcome.statuses)
    if state.tree.feeds and link.serves(namespace):
        kept = [key for key, status in zip(task.keys, outcome.statuses, strict=True) if status is ItemStatus.OK]
        state.tree.feeds.store(EventKind.PAGES_STORED, kept)
    state.counters.add("backup_pages", sum(status is ItemStatus.OK for status in outcome.statuses))
    state.counters.add("backup_bytes", outcome.moved_bytes)
    lost = next((index for index, status in enumerate(outcome.statuses) if status is not ItemStatus.OK), None)
    if lost is not None:
        state.counters.add("backup_failures")
        # A full store may have evicted what the first page depends on, and reports only that it has no space.
        doubted = 0 if outcome.statuses[0] is ItemStatus.NO_ROOM else first + lost
        for node in touched:
            _unbelieve(link, node, doubted, refused=first + lost)


def _unbelieve(link: StoreLink, node: Node, page: int, *, refused: int) -> None:
    """Records that the pages of this path from `page` on are not in the store, or may not be."""
    for each in node.path():
        link.beliefs.set_pages(each, min(link.beliefs.pages(each), page - each.start))
        run = each.runs[Tier.HOST]
        if link.current and run is not None and each.end > refused:
            run.unsaved = True  # not tried again before its next use: the host may need the space


# ---- checkpoints --------------------------------------------------------------------------------


def can_be_stored(beliefs: Beliefs, checkpoint: Checkpoint) -> bool:
    """Whether all of it is on the host, and everything it depends on is in the store."""
    node = checkpoint.node
    return node is not None and checkpoint.ready_in(Tier.HOST) is not None and is_stored(beliefs, node, checkpoint.page)


def _defer_backups(state: CacheState, link: StoreLink, path: list[Node], *, upto: int) -> None:
    """Defers the backup of a path's checkpoints that the store lacks, up to boundary `upto`; sends those that must not wait."""
    for node in path:
        for checkpoint in (node.checkpoints or {}).values():
            residency = checkpoint.ready_in(Tier.HOST) if not link.beliefs.has(checkpoint) and checkpoint.page <= upto else None
            if residency is not None and link.deferred.enter(residency, _size_bytes(state, residency), state.clock.now()):
                put_checkpoint(state, link, checkpoint)


def _put_due(state: CacheState, link: StoreLink) -> None:
    """Sends checkpoints that were deferred for long enough, up to the limit."""
    for checkpoint in link.deferred.due(state.clock.now()):
        put_checkpoint(state, link, checkpoint)
        if not link.may_put(state.clock.now()):
            return


def _put_deferred(state: CacheState, link: StoreLink, residency: Residency) -> bool:
    """Starts storing a deferred checkpoint that leaves the host; True if it is in flight now."""
    if residency.users or not link.deferred.leave(residency.checkpoint):
        return False
    put_checkpoint(state, link, residency.checkpoint)
    return residency.users > 0


def put_checkpoint(state: CacheState, link: StoreLink, checkpoint: Checkpoint) -> None:
    """Sends a checkpoint that is on the host and not in the store, if everything it depends on is stored or will follow. Ignores
    checkpoints with a time to live.
    """
    residency, node = checkpoint.ready_in(Tier.HOST), checkpoint.node
    if residency is None or node is None or node.expires_at < inf:
        return
    if link.beliefs.is_fresh(checkpoint) if link.is_late else link.beliefs.has(checkpoint):
        return
    if not is_stored(link.beliefs, node, checkpoint.page, or_follows=link.is_late):
        state.counters.add("backup_skipped_missing_pages")
        return
    namespace = link.namespace_of(state, node)
    if namespace is None:
        return
    task = checkpoint_task(state, node, residency)
    size_bytes = _size_bytes(state, residency)
    link.beliefs.add(checkpoint, arriving=True, at_s=state.clock.now())
    link.beliefs.note_boundary(node, checkpoint.page)
    if link.is_late:
        link.beliefs.note_owed(node, checkpoint.page)
    link.put_began(size_bytes, state.clock.now())
    place = state.tree.ranking.value_class_of(residency)

    def replied(outcome: Outcome, took_s: float) -> None:
        stored = outcome.statuses == (ItemStatus.OK,)
        link.put_ended(size_bytes, state.clock.now(), taken=stored)
        if place is not None:
            link.displaced.note(place, outcome.moved_bytes)
        if stored:
            _demote_superseded(state, link, namespace, checkpoint)
        if stored and state.tree.feeds and link.serves(namespace):
            state.tree.feeds.store(EventKind.CHECKPOINT_STORED, [task.boundary])
        link.beliefs.answered(checkpoint, stored=stored)
        if link.current:
            residency.unsaved = not stored
            if not stored:
                _defer_again_before(state, link, checkpoint)
        state.counters.add("backup_checkpoints" if stored else "backup_failures")
        state.counters.add("backup_bytes", outcome.moved_bytes)

    link.ops.send(task, namespace, replied, call=Call(), pages=residency.spans(), reads=residency)


def _demote_superseded(state: CacheState, link: StoreLink, namespace: Namespace, checkpoint: Checkpoint) -> None:
    """A checkpoint has been stored: lowers the level of the one before it, if the new one replaces it."""
    if checkpoint.node is None:
        return
    before = previous_checkpoint(checkpoint.node, checkpoint.page)
    if before is None or before.node is None or not link.beliefs.has_arrived(before) or not link.is_superseded(before):
        return
    keys = keys_within(before.node, before.page - 1, before.page, state.tree.page_bytes)
    relevel(link, namespace, Level.EXPENDABLE, boundaries=tuple(keys))


def _level_of(state: CacheState, node: Node) -> Level:
    """Content that is stored while its priority lasts is more valuable to the store too."""
    return Level.VALUABLE if node.urgent_until > state.clock.now() else Level.NORMAL


def relevel(
    link: StoreLink, namespace: Namespace, level: Level, *, pages: tuple[PageKey, ...] = (), boundaries: tuple[PageKey, ...] = ()
) -> None:
    """Changes the level of stored content, unless the store is suspended."""
    well = link.serves(namespace) and link.breaker.state is BreakerState.CLOSED
    if well and link.store.traits.levels and (pages or boundaries):
        task = Relevel(pages=pages, boundaries=boundaries, level=level)
        link.ops.send(task, namespace, _heard, call=Call(), counts=False)


def _heard(outcome: Outcome, took_s: float) -> None:
    """Ignores the outcome of a hint."""


def checkpoint_task(state: CacheState, node: Node, residency: Residency) -> PutCheckpoint:
    """The task that stores a checkpoint of a node, with its pages in one tier."""
    spec, page = state.spec, residency.checkpoint.page
    span = spec.window_span(page * spec.page_tokens)
    holders = [at * spec.window_page_tokens // spec.page_tokens for at in span]  # the prefix pages in which windows begin
    first = min(holders, default=page - 1)
    keys = keys_within(node, first, page, state.tree.page_bytes)
    return PutCheckpoint(
        boundary=keys[-1],
        page=page,
        window_keys=tuple(keys[at - first] for at in holders),
        windows=residency.windows,
        points=residency.points,
        level=_level_of(state, node),
    )


def _defer_again_before(state: CacheState, link: StoreLink, refused: Checkpoint) -> None:
    """Defers the checkpoint before a refused one again: the store may have evicted it in favour of the refused one."""
    before = previous_checkpoint(refused.node, refused.page) if refused.node is not None else None
    residency = before.ready_in(Tier.HOST) if before is not None and not link.beliefs.has(before) else None
    if residency is not None and link.deferred.is_used:
        link.deferred.enter(residency, _size_bytes(state, residency), state.clock.now())


def will_follow(node: Node) -> bool:
    """Whether a node's pages, all of them in memory, are stored when they leave it: not those that were refused."""
    return not any(run.unsaved for run in node.runs if run is not None)


def is_stored(beliefs: Beliefs, node: Node, upto: int, *, or_follows: bool = False) -> bool:
    """Whether the pages before `upto`, the last of them in this node, are believed to be in the store; or will be."""
    here: Node | None = node
    while here is not None and here.parent is not None:
        stored = beliefs.pages(here)
        if here.start + stored < min(here.end, upto) and not (or_follows and will_follow(here)):
            return False
        here = here.parent
    return True


def _size_bytes(state: CacheState, residency: Residency) -> int:
    strides = state.arena(Tier.HOST).layout.strides
    return sum(len(ids) * strides[kind] for kind, ids in residency.spans())
