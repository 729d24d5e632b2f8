"""From the host down to the store, in the background: whole paths, parents before children, checkpoints last.

    offer        a node has something new on the host: its path waits in line
    pump         the oldest paths are sent off, as much as may be on its way at a time
    _put_path    the pages of a path that are not believed to be in the store, then its checkpoints

A path in line holds nothing: its nodes may split or leave meanwhile, and what is left is looked at when its turn comes.
What is on its way is held by its errand. Beliefs may be wrong: the store's hands ask before they send, and a value that
was believed to be there and is not is a miss later, never more.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from stepwell.base.errand import Fate, Outcome, PutCheckpoint, PutPages
from stepwell.base.ids import Kind, Tier
from stepwell.base.keys import Namespace, PageKey
from stepwell.base.plan import PageIds
from stepwell.cache.core import Core
from stepwell.cache.errands import Call
from stepwell.cache.link import StoreLink
from stepwell.memory.arena import READY
from stepwell.tree.chain import node_keys
from stepwell.tree.node import ABSENT, Node, Residency, Victim

CHUNK_BYTES = 32 * 2**20  # of pages in one errand


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
        node.stored = 0
        for checkpoint in (node.checkpoints or {}).values():
            checkpoint.stored = False
        if node.parent is not None and node.kids is None:
            offer(core, link, node)


def pump(core: Core, link: StoreLink) -> None:
    """Sends off what waits, oldest first, as long as there is leave to."""
    now = core.clock.now()
    while link.waiting and link.backup_bytes < link.config.backup_bytes and link.breaker.allows(now):
        node, since_s = next(iter(link.waiting.items()))
        del link.waiting[node]
        if now - since_s > link.config.backup_age_s:
            core.counters.add("backup_dropped_too_old")
        elif node.parent is not None and not _put_path(core, link, node):
            link.waiting[node] = since_s  # more of it is left than one errand takes
    for node, since_s in list(link.waiting.items()) if not link.breaker.allows(now) else ():
        if now - since_s > link.config.backup_age_s:
            del link.waiting[node]
            core.counters.add("backup_dropped_too_old")


def put_before_eviction(core: Core, link: StoreLink, victim: Victim) -> bool:
    """Before something leaves the host: starts storing it if it is not stored; true if it did."""
    node = victim.checkpoint.node if isinstance(victim, Residency) else victim.node
    if link.detached or node is None or node.parent is None:
        return False
    if link.backup_bytes >= link.config.backup_bytes or not link.breaker.allows(core.clock.now()):
        core.counters.add("backup_skipped_store_busy")
        return False
    before = link.errands.num_running
    _put_path(core, link, node)
    return link.errands.num_running > before


def _put_path(core: Core, link: StoreLink, node: Node) -> bool:
    """Sends off what the store lacks of a path; false when more is left than fits into one errand."""
    path = node.path()
    root = path[0].parent
    assert root is not None
    namespace = core.namespaces.get(root.first)
    if namespace is None or root.first in link.barred:
        return True
    page_bytes, stride = core.tree.page_bytes, core.arena(Tier.HOST).layout.strides[Kind.PREFIX]
    room = max(CHUNK_BYTES // stride, 1)
    parent, last = namespace.digest, namespace.digest
    keys: list[PageKey] = []
    ids: list[PageIds] = []
    touched: list[Node] = []
    covered = first = 0
    for each in path:
        chain = node_keys(each, last, page_bytes)
        fresh = _ready_after(core, each, each.stored)[: room - len(keys)]
        if len(fresh):
            if not keys:
                parent = chain[each.stored - 1] if each.stored else last
                first = each.start + each.stored
            keys += chain[each.stored : each.stored + len(fresh)]
            ids.append(fresh)
            touched.append(each)
            each.stored += len(fresh)
        covered = each.start + each.stored
        if each.stored < each.num_pages:
            break
        last = chain[-1]
    if keys:
        whole = np.concatenate(ids)
        task = PutPages(parent=parent if first else None, first=first, keys=tuple(keys), ids=whole)
        link.backup_bytes += len(whole) * stride
        done = partial(_pages_put, core, link, touched, first, len(whole) * stride)
        link.errands.start(task, namespace, done, call=Call(), pages=((Kind.PREFIX, whole),))
    for each in path:
        _put_checkpoints(core, link, namespace, each, covered)
    return len(keys) < room


def _ready_after(core: Core, node: Node, start: int) -> PageIds:
    """The node's host pages from index `start` on, as far as they can be read without a gap."""
    run = node.runs[Tier.HOST]
    if run is None:
        return np.empty(0, np.int32)
    ids = run.ids[start:]
    ready = (ids != ABSENT) & (core.arena(Tier.HOST).state[Kind.PREFIX][ids] == READY)
    return ids[: int(ready.argmin())] if not ready.all() else ids.copy()


def _pages_put(
    core: Core, link: StoreLink, touched: list[Node], first: int, size_bytes: int, outcome: Outcome, took_s: float
) -> None:
    link.backup_bytes -= size_bytes
    core.counters.add("backup_pages", sum(fate is Fate.OK for fate in outcome.fates))
    core.counters.add("backup_bytes", outcome.moved_bytes)
    lost = next((index for index, fate in enumerate(outcome.fates) if fate is not Fate.OK), None)
    if lost is not None:
        core.counters.add("backup_failures")
        for node in touched:
            _unbelieve(node, first + lost)


def _unbelieve(node: Node, page: int) -> None:
    """Whatever stands in this node or above it from `page` on is not in the store after all."""
    for each in node.path():
        each.stored = max(min(each.stored, page - each.start), 0)


def _put_checkpoints(core: Core, link: StoreLink, namespace: Namespace, node: Node, covered: int) -> None:
    for checkpoint in (node.checkpoints or {}).values():
        residency = checkpoint.ready_in(Tier.HOST)
        if residency is not None and not checkpoint.stored and checkpoint.page <= covered:
            _put_checkpoint(core, link, namespace, residency)


def _put_checkpoint(core: Core, link: StoreLink, namespace: Namespace, residency: Residency) -> None:
    spec, checkpoint, strides = core.spec, residency.checkpoint, core.arena(Tier.HOST).layout.strides
    assert checkpoint.node is not None
    keys: list[PageKey] = []
    for each in checkpoint.node.path():
        keys += node_keys(each, keys[-1] if keys else namespace.digest, core.tree.page_bytes)
    span = spec.window_span(checkpoint.page * spec.page_tokens)
    task = PutCheckpoint(
        boundary=keys[checkpoint.page - 1],
        page=checkpoint.page,
        window_keys=tuple(keys[at * spec.window_page_tokens // spec.page_tokens] for at in span),
        windows=residency.windows,
        points=residency.points,
    )
    size_bytes = sum(len(ids) * strides[kind] for kind, ids in residency.spans())
    checkpoint.stored = True
    link.backup_bytes += size_bytes

    def replied(outcome: Outcome, took_s: float) -> None:
        link.backup_bytes -= size_bytes
        stored = outcome.fates == (Fate.OK,)
        checkpoint.stored = stored
        core.counters.add("backup_checkpoints" if stored else "backup_failures")
        core.counters.add("backup_bytes", outcome.moved_bytes)

    link.errands.start(task, namespace, replied, call=Call(), pages=residency.spans(), reads=residency)
