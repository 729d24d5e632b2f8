"""Checkpoints on their way from the host down to the store: deferred for a while, or sent before they leave the host.

    defer_backups        the pages of a path were sent off: the backup of its checkpoints is deferred (`deferred.py`)
    put_due              those that were deferred for long enough are sent off
    put_before_leaving   one that must leave the host sooner is sent off before it does
    put_deferred_of      memory is about to be emptied: all of some namespaces are sent off

Called for by `backup_pages.py`, which knows nothing of what a checkpoint consists of. A checkpoint goes down only when all it
stands on is believed to be in the store. One that was refused gives way to the one before it, which is deferred again.
"""

from __future__ import annotations

from collections.abc import Container

from stepwell.base.ids import Tier
from stepwell.base.store_op import ItemStatus, Outcome, PutCheckpoint
from stepwell.store_tier.beliefs import Beliefs
from stepwell.store_tier.link import StoreLink
from stepwell.store_tier.ops import Call
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.checkpoints import is_left_between
from stepwell.tree.match import keys_within
from stepwell.tree.node import Checkpoint, Node, Residency, Victim, previous_checkpoint


def is_superseded(checkpoint: Checkpoint, *, milestone_pages: int) -> bool:
    """Whether a later checkpoint of its path serves everybody who would resume at this one, as far as anybody knows."""
    following = checkpoint.follower
    if following is None or following.used_at < checkpoint.used_at:
        return False
    is_milestone = milestone_pages > 0 and checkpoint.page % milestone_pages == 0
    return not is_milestone and not is_left_between(checkpoint, following)


def can_be_stored(beliefs: Beliefs, checkpoint: Checkpoint) -> bool:
    """Whether all of it is on the host, and what it stands on in the store."""
    node = checkpoint.node
    return node is not None and checkpoint.ready_in(Tier.HOST) is not None and _is_stored(beliefs, node, checkpoint.page)


def defer_backups(core: CacheState, link: StoreLink, path: list[Node], *, upto: int) -> None:
    """Lets the checkpoints of a path rest that the store lacks, up to boundary `upto`; sends off those that are not to."""
    for node in path:
        for checkpoint in (node.checkpoints or {}).values():
            residency = checkpoint.ready_in(Tier.HOST) if not link.beliefs.has(checkpoint) and checkpoint.page <= upto else None
            if residency is not None and link.deferred.enter(residency, _size_bytes(core, residency), core.clock.now()):
                _put_checkpoint(core, link, checkpoint)


def put_due(core: CacheState, link: StoreLink) -> None:
    """Sends off checkpoints whose rest is over, as long as there is leave to."""
    for checkpoint in link.deferred.due(core.clock.now()):
        _put_checkpoint(core, link, checkpoint)
        if not link.may_put(core.clock.now()):
            return


def put_deferred_of(core: CacheState, link: StoreLink, namespaces: Container[bytes]) -> None:
    """Before memory is emptied: sends off what rests of some namespaces, though it may be more than goes down at a time."""
    for checkpoint in list(link.deferred) if link.breaker.allows(core.clock.now()) else ():
        node = checkpoint.node
        if node is not None and node.root.first in namespaces and link.deferred.leave(checkpoint):
            _put_checkpoint(core, link, checkpoint)


def put_before_leaving(core: CacheState, link: StoreLink, victim: Victim) -> Leaving:
    """Before a checkpoint leaves the host whose backup was deferred: starts storing it. It may leave then: its operation holds
    what it reads, and what it stood on is not to wait for it.
    """
    if not isinstance(victim, Residency):
        return Leaving.NOW
    if victim.checkpoint in link.deferred and not link.may_put_at_once(core.clock.now()):
        link.deferred.leave(victim.checkpoint)
        core.counters.add("backup_skipped_store_busy")
        return Leaving.NOW
    return Leaving.AT_ONCE if put_deferred(core, link, victim) else Leaving.NOW


def put_deferred(core: CacheState, link: StoreLink, residency: Residency) -> bool:
    """Ends the rest of a checkpoint that is to leave the host, and starts storing it; true when it is on its way now."""
    if residency.users or not link.deferred.leave(residency.checkpoint):
        return False
    _put_checkpoint(core, link, residency.checkpoint)
    return residency.users > 0


def _put_checkpoint(core: CacheState, link: StoreLink, checkpoint: Checkpoint) -> None:
    """Sends off a checkpoint that is on the host and not in the store, if all it stands on is."""
    residency, node = checkpoint.ready_in(Tier.HOST), checkpoint.node
    if residency is None or node is None or link.beliefs.has(checkpoint):
        return
    if not _is_stored(link.beliefs, node, checkpoint.page):
        core.counters.add("backup_skipped_missing_pages")
        return
    namespace = link.namespace_of(core, node)
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
    link.beliefs.add(checkpoint, arriving=True)
    link.backup_bytes += size_bytes
    link.num_putting += 1

    def replied(outcome: Outcome, took_s: float) -> None:
        link.backup_bytes -= size_bytes
        link.num_putting -= 1
        stored = outcome.statuses == (ItemStatus.OK,)
        link.beliefs.answered(checkpoint, stored=stored)
        if link.current:
            residency.unsaved = not stored
            if not stored:
                _defer_again_before(core, link, checkpoint)
        core.counters.add("backup_checkpoints" if stored else "backup_failures")
        core.counters.add("backup_bytes", outcome.moved_bytes)

    link.ops.send(task, namespace, replied, call=Call(), pages=residency.spans(), reads=residency)


def _defer_again_before(core: CacheState, link: StoreLink, refused: Checkpoint) -> None:
    """The checkpoint before one that was refused may have been given up in its favour."""
    before = previous_checkpoint(refused.node, refused.page) if refused.node is not None else None
    residency = before.ready_in(Tier.HOST) if before is not None and not link.beliefs.has(before) else None
    if residency is not None and link.deferred.is_used:
        link.deferred.enter(residency, _size_bytes(core, residency), core.clock.now())


def _is_stored(beliefs: Beliefs, node: Node, upto: int) -> bool:
    """Whether the pages before `upto`, the last of them in this node, are believed to be in the store."""
    here: Node | None = node
    while here is not None and here.parent is not None:
        if here.start + beliefs.pages(here) < min(here.end, upto):
            return False
        here = here.parent
    return True


def _size_bytes(core: CacheState, residency: Residency) -> int:
    strides = core.arena(Tier.HOST).layout.strides
    return sum(len(ids) * strides[kind] for kind, ids in residency.spans())
