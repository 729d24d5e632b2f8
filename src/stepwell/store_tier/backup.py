"""From the host down to the store, in the background: the pages of a path, parents before children, then its checkpoints.

    offer                  a node has something new on the host: its path waits in line
    pump                   the oldest paths are sent off, as much as may be on its way at a time, and checkpoints that are due
    put_before_leaving     what leaves the host is sent off first, if it is a checkpoint whose backup was deferred (`deferred.py`)

A path in line holds nothing: its nodes may split or leave meanwhile, and what is left is looked at when its turn comes.
What is on its way is held by its operation. Beliefs may be wrong: the store worker asks before it sends, and a value that
was believed to be there and is not is a miss later, never more. What was refused is sent again after its next use and not
before, so that a path in line comes to its end whatever the store says. A checkpoint goes down only when all it stands on is
believed to be in the store. One that was refused gives way to the one before it, which is deferred again.
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
from stepwell.policy.value import Place
from stepwell.store_tier.link import Beliefs, StoreLink
from stepwell.store_tier.ops import Call
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.feed import EventKind
from stepwell.tree.keys import keys_within
from stepwell.tree.node import ABSENT, Checkpoint, Node, Residency, Victim, previous_checkpoint

CHUNK_BYTES, CHUNK_SHARE = 64 * 2**20, 1 / 16  # of pages in one operation, and of the host tier, at most


def offer(state: CacheState, link: StoreLink, node: Node) -> None:
    """Puts the path to a node in line; the longest line there may be is kept by turning newcomers away."""
    if link.detached or node in link.waiting:
        return
    if len(link.waiting) >= link.tuning.backup_queue:
        state.counters.add("backup_dropped_queue_full")
        return
    link.waiting[node] = state.clock.now()


def offer_everything(state: CacheState, link: StoreLink) -> None:
    """After a store was attached: what is on the host already is new to it."""
    for node in state.tree.nodes():
        if node.parent is not None and node.kids is None:
            offer(state, link, node)


def forget_refusals(state: CacheState) -> None:
    """Nothing is known to have been refused: the store is a new one."""
    for node in state.tree.nodes():
        run = node.runs[Tier.HOST]
        if run is not None:
            run.unsaved = False
        for checkpoint in (node.checkpoints or {}).values():
            residency = checkpoint.held[Tier.HOST]
            if residency is not None:
                residency.unsaved = False


def pump(state: CacheState, link: StoreLink) -> None:
    """Sends off what waits, oldest first, as long as there is leave to."""
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
            link.waiting[node] = since_s  # more of it is left than one operation takes
    if link.deferred.num_due and link.may_put(state.clock.now()):
        _put_due(state, link)  # what was deferred just now, where nothing may be
    dropped = link.deferred.give_up(now, link.tuning.backup_age_s)
    while link.waiting and now - next(iter(link.waiting.values())) > link.tuning.backup_age_s:
        del link.waiting[next(iter(link.waiting))]
        dropped += 1
    if dropped:
        state.counters.add("backup_dropped_too_old", dropped)


def put_waiting_of(state: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Before memory is emptied: sends off paths of some namespaces that wait, though it may be more than goes down at a time."""
    for node in list(link.waiting) if link.breaker.allows(state.clock.now()) else ():
        if node.parent is not None and node.root.first in namespaces:
            del link.waiting[node]
            while not put_path(state, link, node):
                pass


def put_deferred_of(state: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """The same for the deferred checkpoints of some namespaces."""
    for checkpoint in list(link.deferred) if link.breaker.allows(state.clock.now()) else ():
        node = checkpoint.node
        if node is not None and node.root.first in namespaces and link.deferred.leave(checkpoint):
            put_checkpoint(state, link, checkpoint)


def put_before_leaving(state: CacheState, link: StoreLink, victim: Victim) -> Leaving:
    """Before a checkpoint leaves the host whose backup was deferred: starts storing it. It may leave then: its operation holds
    what it reads, and what it stood on is not to wait for it.
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
    """Pages of a path without a gap, from page `first` on, and the nodes they are in."""

    first: int
    end: int
    ids: list[PageIds] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node, ids: PageIds) -> None:
        self.ids.append(ids)
        self.nodes.append(node)
        self.end += len(ids)


def put_path(state: CacheState, link: StoreLink, node: Node, *, beyond: int = 0) -> bool:
    """Sends off what pages the store lacks of a path, and defers its checkpoints; false when more is left than fits into
    one operation. Nodes up to page `beyond` are left out: they go down when they leave memory. If what was sent is of use without
    a checkpoint, they are owed from now on; else its checkpoint sees to that.
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
            break  # what has a time to live stays in memory
        stored = link.stored_pages(each)
        if each.end <= beyond and will_follow(each):
            continue
        if stored < each.num_pages:
            first = each.start + stored
            fresh = _ready_after(state, each, stored)[:room]
            if len(fresh):
                if first > stretch.end:  # what lies between is stored already
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
    """Sends off the pages of one stretch."""
    if not stretch.ids:
        return
    first, last, ids = stretch.first, stretch.nodes[-1], np.concatenate(stretch.ids)
    keys = keys_within(last, max(first - 1, 0), stretch.end, state.tree.page_bytes)
    parent = keys.pop(0) if first else None
    size_bytes = len(ids) * state.arena(Tier.HOST).layout.strides[Kind.PREFIX]
    link.put_began(size_bytes, state.clock.now())
    task = PutPages(parent=parent, first=first, keys=tuple(keys), ids=ids, level=_level_of(state, last))
    place = state.tree.ranking.place_of_pages(last, Tier.HOST)
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
    state: CacheState, link: StoreLink, namespace: Namespace, touched: list[Node], task: PutPages, size_bytes: int, place: Place,
    outcome: Outcome, took_s: float,
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
        # A store that is full may have given up what the first page stands on, and says no more than that it has no room.
        doubted = 0 if outcome.statuses[0] is ItemStatus.NO_ROOM else first + lost
        for node in touched:
            _unbelieve(link, node, doubted, refused=first + lost)


def _unbelieve(link: StoreLink, node: Node, page: int, *, refused: int) -> None:
    """Whatever stands in this node or above it from `page` on is not in the store after all, or nobody knows."""
    for each in node.path():
        link.beliefs.set_pages(each, min(link.beliefs.pages(each), page - each.start))
        run = each.runs[Tier.HOST]
        if link.current and run is not None and each.end > refused:
            run.unsaved = True  # not to be tried again before its next use: the host may need its room


# ---- checkpoints --------------------------------------------------------------------------------


def can_be_stored(beliefs: Beliefs, checkpoint: Checkpoint) -> bool:
    """Whether all of it is on the host, and what it stands on in the store."""
    node = checkpoint.node
    return node is not None and checkpoint.ready_in(Tier.HOST) is not None and is_stored(beliefs, node, checkpoint.page)


def _defer_backups(state: CacheState, link: StoreLink, path: list[Node], *, upto: int) -> None:
    """Defers the backup of a path's checkpoints that the store lacks, up to boundary `upto`; sends off what may not wait."""
    for node in path:
        for checkpoint in (node.checkpoints or {}).values():
            residency = checkpoint.ready_in(Tier.HOST) if not link.beliefs.has(checkpoint) and checkpoint.page <= upto else None
            if residency is not None and link.deferred.enter(residency, _size_bytes(state, residency), state.clock.now()):
                put_checkpoint(state, link, checkpoint)


def _put_due(state: CacheState, link: StoreLink) -> None:
    """Sends off checkpoints that were deferred for long enough, as long as there is leave to."""
    for checkpoint in link.deferred.due(state.clock.now()):
        put_checkpoint(state, link, checkpoint)
        if not link.may_put(state.clock.now()):
            return


def _put_deferred(state: CacheState, link: StoreLink, residency: Residency) -> bool:
    """Starts storing a checkpoint that was deferred and is to leave the host; true when it is on its way now."""
    if residency.users or not link.deferred.leave(residency.checkpoint):
        return False
    put_checkpoint(state, link, residency.checkpoint)
    return residency.users > 0


def put_checkpoint(state: CacheState, link: StoreLink, checkpoint: Checkpoint) -> None:
    """Sends off a checkpoint that is on the host and not in the store, if all it stands on is there, or follows it. None that has
    a time to live.
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
    place = state.tree.ranking.place_of(residency)

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
    """A checkpoint is in the store now: the one before it is worth little there, if this one serves in its place."""
    if checkpoint.node is None:
        return
    before = previous_checkpoint(checkpoint.node, checkpoint.page)
    if before is None or before.node is None or not link.beliefs.has_arrived(before) or not link.is_superseded(before):
        return
    keys = keys_within(before.node, before.page - 1, before.page, state.tree.page_bytes)
    relevel(link, namespace, Level.EXPENDABLE, boundaries=tuple(keys))


def _level_of(state: CacheState, node: Node) -> Level:
    """What goes down while its priority lasts matters more to the store too."""
    return Level.VALUABLE if node.urgent_until > state.clock.now() else Level.NORMAL


def relevel(
    link: StoreLink, namespace: Namespace, level: Level, *, pages: tuple[PageKey, ...] = (), boundaries: tuple[PageKey, ...] = ()
) -> None:
    """Tells the store what something is worth that it has, unless it is left alone."""
    well = link.serves(namespace) and link.breaker.state is BreakerState.CLOSED
    if well and link.store.traits.levels and (pages or boundaries):
        task = Relevel(pages=pages, boundaries=boundaries, level=level)
        link.ops.send(task, namespace, _heard, call=Call(), counts=False)


def _heard(outcome: Outcome, took_s: float) -> None:
    """A hint has no outcome that matters."""


def checkpoint_task(state: CacheState, node: Node, residency: Residency) -> PutCheckpoint:
    """What storing a checkpoint of a node takes, of its pages in one tier."""
    spec, page = state.spec, residency.checkpoint.page
    span = spec.window_span(page * spec.page_tokens)
    holders = [at * spec.window_page_tokens // spec.page_tokens for at in span]  # the prefix pages that windows begin in
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
    """The checkpoint before one that was refused may have been given up in its favour."""
    before = previous_checkpoint(refused.node, refused.page) if refused.node is not None else None
    residency = before.ready_in(Tier.HOST) if before is not None and not link.beliefs.has(before) else None
    if residency is not None and link.deferred.is_used:
        link.deferred.enter(residency, _size_bytes(state, residency), state.clock.now())


def will_follow(node: Node) -> bool:
    """Whether a node's pages go down when they leave memory, which has all of them: not those that were refused."""
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
