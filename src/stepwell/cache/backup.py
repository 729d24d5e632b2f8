"""From the host down to the store, in the background: whole paths, parents before children, checkpoints last.

    offer        a node has something new on the host: its path waits in line
    pump         the oldest paths are sent off, as much as may be on its way at a time, and checkpoints that have rested
    _put_path    the pages of a path that are not believed to be in the store; its checkpoints rest a while (`resting.py`)

A path in line holds nothing: its nodes may split or leave meanwhile, and what is left is looked at when its turn comes.
What is on its way is held by its errand. Beliefs may be wrong: the store's hands ask before they send, and a value that
was believed to be there and is not is a miss later, never more. What was refused is sent again after its next use and not
before, so that a path in line comes to its end whatever the store says.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from stepwell.base.errand import Fate, Outcome, PutCheckpoint, PutPages
from stepwell.base.ids import Kind, Tier
from stepwell.base.keys import Namespace
from stepwell.base.plan import PageIds
from stepwell.cache.core import Core
from stepwell.cache.errands import Call
from stepwell.cache.link import StoreLink
from stepwell.cache.thinning import is_left_between
from stepwell.memory.arena import READY
from stepwell.tree.chain import keys_within
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import ABSENT, Checkpoint, LossReason, Node, Residency, Victim
from stepwell.tree.ranking import previous_checkpoint

CHUNK_BYTES = 64 * 2**20  # of pages in one errand
MOST_PUTS = 4  # errands at a time: the rest waits in line, where it holds nothing
HOST_SHARE = ERRAND_SHARE = 1 / 16  # of the host tier: on its way down at most, and in one errand


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


def offer(core: Core, link: StoreLink, node: Node) -> None:
    """Puts the path to a node in line; the longest line there may be is kept by turning newcomers away."""
    if link.detached or node in link.waiting:
        return
    if len(link.waiting) >= link.config.backup_queue:
        core.counters.add("backup_dropped_queue_full")
        return
    link.waiting[node] = core.clock.now()


def offer_everything(core: Core, link: StoreLink) -> None:
    """After a store was attached: what is on the host already is new to it."""
    for node in core.tree.nodes():
        if node.parent is not None and node.kids is None:
            offer(core, link, node)


def forget_beliefs(core: Core) -> None:
    """Nothing is believed to be in any store, nor to have been refused by one."""
    for node in core.tree.nodes():
        node.stored = 0
        run = node.runs[Tier.HOST]
        if run is not None:
            run.unsaved = False
        for checkpoint in (node.checkpoints or {}).values():
            checkpoint.stored = False
            residency = checkpoint.held[Tier.HOST]
            if residency is not None:
                residency.unsaved = False


def pump(core: Core, link: StoreLink) -> None:
    """Sends off what waits, oldest first, as long as there is leave to."""
    now = core.clock.now()
    if _has_leave(core, link):
        _put_rested(core, link)
    while link.waiting and _has_leave(core, link):
        node, since_s = next(iter(link.waiting.items()))
        del link.waiting[node]
        if now - since_s > link.config.backup_age_s:
            core.counters.add("backup_dropped_too_old")
        elif node.parent is not None and not _put_path(core, link, node):
            link.waiting[node] = since_s  # more of it is left than one errand takes
    if link.resting.num_due and _has_leave(core, link):
        _put_rested(core, link)  # what has just come to rest, now that nothing may
    dropped = link.resting.give_up(now, link.config.backup_age_s)
    while link.waiting and now - next(iter(link.waiting.values())) > link.config.backup_age_s:
        del link.waiting[next(iter(link.waiting))]
        dropped += 1
    if dropped:
        core.counters.add("backup_dropped_too_old", dropped)


def _put_rested(core: Core, link: StoreLink) -> None:
    for checkpoint in link.resting.rested(core.clock.now()):
        _put_checkpoint(core, link, checkpoint)
        if not _has_leave(core, link):
            return


def _has_leave(core: Core, link: StoreLink) -> bool:
    """Whether more may be sent off: a store that hangs never holds more than a sixteenth of the host tier."""
    most = min(link.config.backup_bytes, core.arena(Tier.HOST).layout.size_bytes * HOST_SHARE)
    return link.num_putting < MOST_PUTS and link.backup_bytes < most and link.breaker.allows(core.clock.now())


def put_before_eviction(core: Core, link: StoreLink, victim: Victim) -> bool:
    """Before something leaves the host: starts storing it if it is not stored; true when it is on its way now."""
    node = victim.checkpoint.node if isinstance(victim, Residency) else victim.node
    if link.detached or node is None or node.parent is None:
        return False
    if not _has_leave(core, link):
        core.counters.add("backup_skipped_store_busy")
        return False
    tail = core.tree.ranking.tail(victim) if not isinstance(victim, Residency) else None
    if tail is not None and tail.dead:
        return False  # nothing could use it
    while not _put_path(core, link, node) and _has_leave(core, link):
        pass
    if isinstance(victim, Residency):
        return _put_resting(core, link, victim) or victim.users > 0
    return tail is not None and not core.tree.ranking.idle(victim, tail.start, at_most=1).num_pages


def put_resting_of(core: Core, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Before memory is emptied: sends off what rests of some namespaces, though it may be more than goes down at a time."""
    for checkpoint in list(link.resting) if link.breaker.allows(core.clock.now()) else ():
        node = checkpoint.node
        if node is not None and _root(node).first in namespaces and link.resting.leave(checkpoint):
            _put_checkpoint(core, link, checkpoint)


def put_resting_first(core: Core, victim: Victim) -> bool:
    """Before a checkpoint leaves the host that was to rest there: starts storing it. True when it is on its way now and has left:
    its errand holds what it reads, and what it stood on is not to wait for it.
    """
    link = core.link
    if link is None or victim.tier is not Tier.HOST or not isinstance(victim, Residency) or victim.unsaved:
        return False
    if victim.checkpoint in link.resting and not _has_leave(core, link):
        link.resting.leave(victim.checkpoint)
        core.counters.add("backup_skipped_store_busy")
        return False
    if not _put_resting(core, link, victim):
        return False
    core.counters.add("evicted_host_checkpoints")
    drop_residency(core.tree, victim, core.loss(LossReason.EVICTED, Tier.HOST))
    return True


def _put_resting(core: Core, link: StoreLink, residency: Residency) -> bool:
    if residency.users or not link.resting.leave(residency.checkpoint):
        return False
    _put_checkpoint(core, link, residency.checkpoint)
    return residency.users > 0


def is_superseded(checkpoint: Checkpoint, *, milestone_pages: int) -> bool:
    """Whether a later checkpoint of its path serves everybody who would resume at this one, as far as anybody knows."""
    following = checkpoint.follower
    if following is None or following.used_at < checkpoint.used_at:
        return False
    is_milestone = milestone_pages > 0 and checkpoint.page % milestone_pages == 0
    return not is_milestone and not is_left_between(checkpoint, following)


def can_be_stored(checkpoint: Checkpoint) -> bool:
    """Whether all of it is on the host, and what it stands on in the store."""
    node = checkpoint.node
    return node is not None and checkpoint.ready_in(Tier.HOST) is not None and _is_stored(node, checkpoint.page)


def _put_path(core: Core, link: StoreLink, node: Node) -> bool:
    """Sends off what pages the store lacks of a path, and lets its checkpoints rest; false when more is left than fits into
    one errand.
    """
    path = node.path()
    namespace = _namespace(core, node)
    if namespace is None:
        return True
    layout = core.arena(Tier.HOST).layout
    room = max(int(min(CHUNK_BYTES, layout.size_bytes * ERRAND_SHARE)) // layout.strides[Kind.PREFIX], 1)
    stretch = _Stretch(first=0, end=0)
    covered = 0
    for each in path:
        if each.expires_at < inf:
            break  # what has a time to live stays in memory
        if each.stored < each.num_pages:
            first = each.start + each.stored
            fresh = _ready_after(core, each, each.stored)[:room]
            if len(fresh):
                if first > stretch.end:  # what lies between is stored already
                    _put_stretch(core, link, namespace, stretch)
                    stretch = _Stretch(first=first, end=first)
                stretch.add(each, fresh)
                each.stored += len(fresh)
                room -= len(fresh)
        covered = each.start + each.stored
        if each.stored < each.num_pages:
            break
    _put_stretch(core, link, namespace, stretch)
    for each in path:
        for checkpoint in (each.checkpoints or {}).values():
            residency = checkpoint.ready_in(Tier.HOST) if not checkpoint.stored and checkpoint.page <= covered else None
            if residency is not None and link.resting.enter(residency, _size_bytes(core, residency), core.clock.now()):
                _put_checkpoint(core, link, checkpoint)
    return room > 0


def _namespace(core: Core, node: Node) -> Namespace | None:
    """Whose a node is; None when nothing of theirs may be stored."""
    digest = _root(node).first
    return core.namespaces.get(digest) if digest not in core.barred else None


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _is_stored(node: Node, upto: int) -> bool:
    """Whether the pages before `upto`, the last of them in this node, are believed to be in the store."""
    here: Node | None = node
    while here is not None and here.parent is not None:
        if here.start + here.stored < min(here.end, upto):
            return False
        here = here.parent
    return True


def _put_stretch(core: Core, link: StoreLink, namespace: Namespace, stretch: _Stretch) -> None:
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
    link.errands.start(task, namespace, done, call=Call(), pages=((Kind.PREFIX, ids),))


def _ready_after(core: Core, node: Node, start: int) -> PageIds:
    """The node's host pages from index `start` on, as far as they can be read without a gap; none that were refused."""
    run = node.runs[Tier.HOST]
    if run is None or run.unsaved:
        return np.empty(0, np.int32)
    ids = run.ids[start:]
    ready = (ids != ABSENT) & (core.arena(Tier.HOST).state[Kind.PREFIX][ids] == READY)
    return ids[: int(ready.argmin())] if not ready.all() else ids.copy()


def _pages_put(
    core: Core, link: StoreLink, touched: list[Node], first: int, size_bytes: int, outcome: Outcome, took_s: float
) -> None:
    link.backup_bytes -= size_bytes
    link.num_putting -= 1
    core.counters.add("backup_pages", sum(fate is Fate.OK for fate in outcome.fates))
    core.counters.add("backup_bytes", outcome.moved_bytes)
    lost = next((index for index, fate in enumerate(outcome.fates) if fate is not Fate.OK), None)
    if lost is not None:
        core.counters.add("backup_failures")
        # A store that is full may have given up what the first page stands on, and says no more than that it has no room.
        doubted = 0 if outcome.fates[0] is Fate.NO_ROOM else first + lost
        for node in touched if link.believed else ():
            _unbelieve(node, doubted, refused=first + lost)


def _unbelieve(node: Node, page: int, *, refused: int) -> None:
    """Whatever stands in this node or above it from `page` on is not in the store after all, or nobody knows."""
    for each in node.path():
        each.stored = max(min(each.stored, page - each.start), 0)
        run = each.runs[Tier.HOST]
        if run is not None and each.end > refused:
            run.unsaved = True  # not to be tried again before its next use: the host may need its room


def _put_checkpoint(core: Core, link: StoreLink, checkpoint: Checkpoint) -> None:
    """Sends off a checkpoint that is on the host and not in the store, if all it stands on is."""
    residency, node = checkpoint.ready_in(Tier.HOST), checkpoint.node
    if residency is None or node is None or checkpoint.stored:
        return
    if not _is_stored(node, checkpoint.page):
        core.counters.add("backup_skipped_lacking_pages")
        return
    namespace = _namespace(core, node)
    if namespace is None:
        return
    spec = core.spec
    span = spec.window_span(checkpoint.page * spec.page_tokens)
    holders = [at * spec.window_page_tokens // spec.page_tokens for at in span]  # the prefix pages that windows begin in
    first = min(holders, default=checkpoint.page - 1)
    keys = keys_within(node, first, checkpoint.page, core.tree.page_bytes)
    task = PutCheckpoint(
        boundary=keys[-1],
        page=checkpoint.page,
        window_keys=tuple(keys[at - first] for at in holders),
        windows=residency.windows,
        points=residency.points,
    )
    size_bytes = _size_bytes(core, residency)
    checkpoint.stored = checkpoint.arriving = True
    link.backup_bytes += size_bytes
    link.num_putting += 1

    def replied(outcome: Outcome, took_s: float) -> None:
        link.backup_bytes -= size_bytes
        link.num_putting -= 1
        stored = outcome.fates == (Fate.OK,)
        checkpoint.arriving = False
        if link.believed:
            checkpoint.stored = stored
            residency.unsaved = not stored
            if not stored:
                _rest_again_before(core, link, checkpoint)
        core.counters.add("backup_checkpoints" if stored else "backup_failures")
        core.counters.add("backup_bytes", outcome.moved_bytes)

    link.errands.start(task, namespace, replied, call=Call(), pages=residency.spans(), reads=residency)


def _rest_again_before(core: Core, link: StoreLink, refused: Checkpoint) -> None:
    """The checkpoint before one that was refused may have been given up in its favour."""
    before = previous_checkpoint(refused.node, refused.page) if refused.node is not None else None
    residency = before.ready_in(Tier.HOST) if before is not None and not before.stored else None
    if residency is not None and link.resting.is_used:
        link.resting.enter(residency, _size_bytes(core, residency), core.clock.now())


def _size_bytes(core: Core, residency: Residency) -> int:
    strides = core.arena(Tier.HOST).layout.strides
    return sum(len(ids) * strides[kind] for kind, ids in residency.spans())
