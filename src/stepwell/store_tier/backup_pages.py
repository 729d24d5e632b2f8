"""Paths on their way from the host down to the store, in the background: pages, parents before children, then checkpoints.

    offer        a node has something new on the host: its path waits in line
    pump         the oldest paths are sent off, as much as may be on its way at a time, and checkpoints that have rested
    _put_path    the pages of a path that are not believed to be in the store; its checkpoints follow (`backup_checkpoints.py`)

A path in line holds nothing: its nodes may split or leave meanwhile, and what is left is looked at when its turn comes.
What is on its way is held by its operation. Beliefs may be wrong: the store worker asks before it sends, and a value that
was believed to be there and is not is a miss later, never more. What was refused is sent again after its next use and not
before, so that a path in line comes to its end whatever the store says.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.keys import Namespace
from stepwell.base.plan import PageIds
from stepwell.base.store_op import ItemStatus, Outcome, PutPages
from stepwell.memory.arena import READY
from stepwell.store_tier.backup_checkpoints import defer_backups, put_deferred, put_due
from stepwell.store_tier.link import StoreLink
from stepwell.store_tier.ops import Call
from stepwell.tiers.state import CacheState
from stepwell.tree.match import keys_within
from stepwell.tree.node import ABSENT, Node, Residency, Victim

CHUNK_BYTES, CHUNK_SHARE = 64 * 2**20, 1 / 16  # of pages in one operation, and of the host tier, at most


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


def offer(core: CacheState, link: StoreLink, node: Node) -> None:
    """Puts the path to a node in line; the longest line there may be is kept by turning newcomers away."""
    if link.detached or node in link.waiting:
        return
    if len(link.waiting) >= link.tuning.backup_queue:
        core.counters.add("backup_dropped_queue_full")
        return
    link.waiting[node] = core.clock.now()


def offer_everything(core: CacheState, link: StoreLink) -> None:
    """After a store was attached: what is on the host already is new to it."""
    for node in core.tree.nodes():
        if node.parent is not None and node.kids is None:
            offer(core, link, node)


def forget_refusals(core: CacheState) -> None:
    """Nothing is known to have been refused: the store is a new one."""
    for node in core.tree.nodes():
        run = node.runs[Tier.HOST]
        if run is not None:
            run.unsaved = False
        for checkpoint in (node.checkpoints or {}).values():
            residency = checkpoint.held[Tier.HOST]
            if residency is not None:
                residency.unsaved = False


def pump(core: CacheState, link: StoreLink) -> None:
    """Sends off what waits, oldest first, as long as there is leave to."""
    now = core.clock.now()
    if link.may_put(now):
        put_due(core, link)
    while link.waiting and link.may_put(core.clock.now()):
        node, since_s = next(iter(link.waiting.items()))
        del link.waiting[node]
        if now - since_s > link.tuning.backup_age_s:
            core.counters.add("backup_dropped_too_old")
        elif node.parent is not None and not _put_path(core, link, node):
            link.waiting[node] = since_s  # more of it is left than one operation takes
    if link.deferred.num_due and link.may_put(core.clock.now()):
        put_due(core, link)  # what has just come to rest, now that nothing may
    dropped = link.deferred.give_up(now, link.tuning.backup_age_s)
    while link.waiting and now - next(iter(link.waiting.values())) > link.tuning.backup_age_s:
        del link.waiting[next(iter(link.waiting))]
        dropped += 1
    if dropped:
        core.counters.add("backup_dropped_too_old", dropped)


def put_waiting_of(core: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Before memory is emptied: sends off paths of some namespaces that wait, though it may be more than goes down at a time."""
    for node in list(link.waiting) if link.breaker.allows(core.clock.now()) else ():
        if node.parent is not None and node.root.first in namespaces:
            del link.waiting[node]
            while not _put_path(core, link, node):
                pass


def put_before_eviction(core: CacheState, link: StoreLink, victim: Victim) -> bool:
    """Before something leaves the host: starts storing it if it is not stored; true when it is on its way now."""
    node = victim.checkpoint.node if isinstance(victim, Residency) else victim.node
    if link.detached or node is None or node.parent is None:
        return False
    if not link.may_put(core.clock.now()):
        core.counters.add("backup_skipped_store_busy")
        return False
    tail = core.tree.ranking.tail(victim) if not isinstance(victim, Residency) else None
    if tail is not None and tail.dead:
        return False  # nothing could use it
    while not _put_path(core, link, node) and link.may_put(core.clock.now()):
        pass
    if isinstance(victim, Residency):
        return put_deferred(core, link, victim) or victim.users > 0
    return tail is not None and not core.tree.ranking.idle(victim, tail.start, at_most=1).num_pages


def _put_path(core: CacheState, link: StoreLink, node: Node) -> bool:
    """Sends off what pages the store lacks of a path, and lets its checkpoints rest; false when more is left than fits into
    one operation.
    """
    path = node.path()
    namespace = link.namespace_of(core, node)
    if namespace is None:
        return True
    layout = core.arena(Tier.HOST).layout
    room = max(int(min(CHUNK_BYTES, layout.size_bytes * CHUNK_SHARE)) // layout.strides[Kind.PREFIX], 1)
    stretch = _Stretch(first=0, end=0)
    covered = 0
    for each in path:
        if each.expires_at < inf:
            break  # what has a time to live stays in memory
        stored = link.beliefs.pages(each)
        if stored < each.num_pages:
            first = each.start + stored
            fresh = _ready_after(core, each, stored)[:room]
            if len(fresh):
                if first > stretch.end:  # what lies between is stored already
                    _put_stretch(core, link, namespace, stretch)
                    stretch = _Stretch(first=first, end=first)
                stretch.add(each, fresh)
                stored += len(fresh)
                link.beliefs.set_pages(each, stored)
                room -= len(fresh)
        covered = each.start + stored
        if stored < each.num_pages:
            break
    _put_stretch(core, link, namespace, stretch)
    defer_backups(core, link, path, upto=covered)
    return room > 0


def _put_stretch(core: CacheState, link: StoreLink, namespace: Namespace, stretch: _Stretch) -> None:
    """Sends off the pages of one stretch."""
    if not stretch.ids:
        return
    first, last, ids = stretch.first, stretch.nodes[-1], np.concatenate(stretch.ids)
    keys = keys_within(last, max(first - 1, 0), stretch.end, core.tree.page_bytes)
    parent = keys.pop(0) if first else None
    size_bytes = len(ids) * core.arena(Tier.HOST).layout.strides[Kind.PREFIX]
    link.backup_bytes += size_bytes
    link.num_putting += 1
    done = partial(_pages_put, core, link, stretch.nodes, first, size_bytes)
    task = PutPages(parent=parent, first=first, keys=tuple(keys), ids=ids)
    link.ops.send(task, namespace, done, call=Call(), pages=((Kind.PREFIX, ids),))


def _ready_after(core: CacheState, node: Node, start: int) -> PageIds:
    """The node's host pages from index `start` on, as far as they can be read without a gap; none that were refused."""
    run = node.runs[Tier.HOST]
    if run is None or run.unsaved:
        return np.empty(0, np.int32)
    ids = run.ids[start:]
    ready = (ids != ABSENT) & (core.arena(Tier.HOST).state[Kind.PREFIX][ids] == READY)
    return ids[: int(ready.argmin())] if not ready.all() else ids.copy()


def _pages_put(
    core: CacheState, link: StoreLink, touched: list[Node], first: int, size_bytes: int, outcome: Outcome, took_s: float
) -> None:
    link.backup_bytes -= size_bytes
    link.num_putting -= 1
    core.counters.add("backup_pages", sum(status is ItemStatus.OK for status in outcome.statuses))
    core.counters.add("backup_bytes", outcome.moved_bytes)
    lost = next((index for index, status in enumerate(outcome.statuses) if status is not ItemStatus.OK), None)
    if lost is not None:
        core.counters.add("backup_failures")
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
