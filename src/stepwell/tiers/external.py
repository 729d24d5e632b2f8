"""For engines that manage their own device memory: pages are copied between the host tier and addresses that the engine names.

The cache has no device arena then. A lease is not ready while its load runs, nor while a checkpoint is saved from it: the
engine would change those bytes with its next token. Full prefix pages never change, so their copies delay nothing; the engine
only must not reuse them before `Lease.jobs` is empty.

    pages       0 ... first_page ............ upto
    commit             |== named; the new ones are copied ==|
    pages       0 ... since ................. resume
    load               |== named and copied: the engine has the rest ==|

An engine that plans a step before it computes it names pages `ahead`: its copies begin when the step is done, and it changes none
of the named pages before they end. Then a checkpoint does not delay the request either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stepwell.base.errors import LeaseError, LoadFailed, NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Purpose, Span
from stepwell.memory.arena import DEAD
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lease import Lease
from stepwell.tiers.lifetime import note_expiry
from stepwell.tiers.publish import note_trigger
from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import add_residency
from stepwell.tree.node import Node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePages:
    """The engine's own names for pages: `prefix[i]` for page `first_page + i` of the prompt, `windows` and `points` for a
    checkpoint. A name is a number that the engine's copies understand, or a row of such numbers: see `Span`.
    """

    prefix: PageIds = field(default_factory=lambda: NO_PAGES)
    windows: PageIds = field(default_factory=lambda: NO_PAGES)
    points: PageIds = field(default_factory=lambda: NO_PAGES)
    first_page: int = 0  # pages before it need no name
    ahead: bool = False  # not computed yet: the engine copies them afterwards, and does not change them before the copies end


def load(state: CacheState, lease: Lease, into: EnginePages, *, since: int) -> None:
    """Starts copying tokens `[since, resume)` and the checkpoint there to the engine's memory; the lease is LOADING meanwhile."""
    spec, residency = state.spec, lease.restored
    if not can_load(lease):
        raise LoadFailed(f"{lease}: its checkpoint no longer exists; release it and look the prompt up again")
    if not 0 <= since <= lease.resume or since % spec.page_tokens:
        raise LeaseError(f"{lease} loads from a page boundary up to {lease.resume} on, not from token {since}")
    if into.first_page * spec.page_tokens != since:
        raise LeaseError(f"{lease} loads from page {since // spec.page_tokens} on, and the names begin at page {into.first_page}")
    first, restored = since // spec.page_tokens, lease.resume // spec.page_tokens
    copies = [_copy(Tier.HOST, lease.prefix_pages[first:restored], Tier.ENGINE, into.prefix, Kind.PREFIX)]
    if residency is not None:
        windows = residency.windows[_num_windows_held(state, lease.resume, since) :]
        copies.append(_copy(Tier.HOST, windows, Tier.ENGINE, into.windows, Kind.WINDOW))
        copies.append(_copy(Tier.HOST, residency.points, Tier.ENGINE, into.points, Kind.POINT))
    job = state.copies.copy(Purpose.LOAD, copies, reads=(residency,) if residency is not None else ())
    if job is not None:
        lease.load_job = job
        lease.must_wait(job=job)


def can_load(lease: Lease) -> bool:
    """Whether what a lease must load still exists: the failed load of another request, or `flush`, removes a checkpoint."""
    residency = lease.restored
    return residency is None or residency.checkpoint.residencies[residency.tier] is residency


def _num_windows_held(state: CacheState, boundary: int, since: int) -> int:
    """How many window pages of a checkpoint at `boundary` lie before `since`: the engine has them."""
    span = state.spec.window_span(boundary)
    return min(max(since // state.spec.window_page_tokens - span.start, 0), len(span)) if len(span) else 0


def first_unsaved(state: CacheState, lease: Lease) -> int:
    """The first page of a lease that the next commit copies: pages whose copy failed are copied again. Changes nothing."""
    dead = np.flatnonzero(state.arena(Tier.HOST).state[Kind.PREFIX][lease.prefix_pages] == DEAD)
    return int(dead[0]) if len(dead) else len(lease.prefix_pages)


def commit(state: CacheState, lease: Lease, upto: int, source: EnginePages, *, checkpoint: bool) -> bool:
    """Copies tokens `[position, upto)` and, if requested, a checkpoint from the engine to the host tier; the lease is LOADING
    until the checkpoint is copied.

    False, with nothing saved, if the host has no space. The next commit will offer these tokens again.
    """
    full = upto // state.spec.page_tokens
    _check_named(state, lease, full, source, checkpoint=checkpoint)
    _let_go_of_dead(state, lease)
    done = len(lease.prefix_pages)
    lease.position = upto
    if not full or not lease.publishes:
        return lease.publishes
    try:
        need = {Kind.PREFIX: full - done}
        fresh = allocate(state, Tier.HOST, need, tenant=lease.namespace.tenant)[Kind.PREFIX] if full > done else NO_PAGES
    except NoRoom:
        state.counters.add("save_skipped_no_room")
        return False
    use = lease.request.use(state.clock.now(), lease.visit)
    lease.prefix_pages = np.concatenate([lease.prefix_pages, fresh])
    node = state.tree.insert(lease.namespace, lease.packed, Tier.HOST, lease.prefix_pages, use)
    state.know(lease.namespace)
    note_expiry(state, node)
    taken = np.array([owner is not None for owner in state.tree.owner[Tier.HOST][fresh]], np.bool_)
    targets = fresh[taken]
    offered = source.prefix[done - source.first_page : full - source.first_page]
    job = state.copies.copy(Purpose.SAVE, [_copy(Tier.ENGINE, offered[taken], Tier.HOST, targets, Kind.PREFIX)])
    if job is not None:
        lease.jobs.add(job)
    _drop_duplicates(state, lease, node, done, taken)
    if checkpoint:
        _save_checkpoint(state, lease, node, full, source)
    return True


def _check_named(state: CacheState, lease: Lease, full: int, source: EnginePages, *, checkpoint: bool) -> None:
    first = first_unsaved(state, lease)
    named = range(source.first_page, source.first_page + len(source.prefix))
    if first < full and (named.start > first or named.stop < full):
        raise LeaseError(
            f"{lease}: pages {first} to {full - 1} must be saved, but the engine named {len(named)} from page {named.start} on"
        )
    windows, points = _checkpoint_pages(state, full).values()
    if checkpoint and (len(source.windows) != windows or len(source.points) != points):
        raise LeaseError(
            f"{lease}: a checkpoint at token {full * state.spec.page_tokens} has {windows} window page(s) and "
            f"{points} point page(s), but the engine named {len(source.windows)} and {len(source.points)}"
        )


def _checkpoint_pages(state: CacheState, page: int) -> dict[Kind, int]:
    windows = len(state.spec.window_span(page * state.spec.page_tokens))
    return {Kind.WINDOW: windows, Kind.POINT: 1 if state.spec.parts(Kind.POINT) else 0}


def _let_go_of_dead(state: CacheState, lease: Lease) -> None:
    """Drops pages whose copy failed: the engine still has them, so the next commit copies them and those after them again."""
    first = first_unsaved(state, lease)
    if first < len(lease.prefix_pages):
        gone = lease.prefix_pages[first:]
        lease.prefix_pages = lease.prefix_pages[:first]
        state.tree.release(Tier.HOST, Kind.PREFIX, gone)


def _drop_duplicates(state: CacheState, lease: Lease, node: Node, done: int, taken: object) -> None:
    """Replaces pages that another request saved first: the lease refers to the saved ones, and frees its own."""
    mine = lease.prefix_pages[done:][~np.asarray(taken, np.bool_)]
    if not len(mine):
        return
    theirs = _path_ids(node, len(lease.prefix_pages))[done:][~np.asarray(taken, np.bool_)]
    state.arena(Tier.HOST).retain(Kind.PREFIX, theirs)
    lease.prefix_pages = lease.prefix_pages.copy()
    lease.prefix_pages[done:][~np.asarray(taken, np.bool_)] = theirs
    state.tree.release(Tier.HOST, Kind.PREFIX, mine)


def _path_ids(node: Node, upto: int) -> PageIds:
    ids = np.empty(upto, np.int32)
    here: Node | None = node
    while here is not None and here.parent is not None:
        run = here.runs[Tier.HOST]
        assert run is not None, f"{here} has no host pages although the host is its only tier"
        count = min(here.end, upto) - here.start
        ids[here.start : here.start + count] = run.ids[:count]
        here = here.parent
    return ids


def _save_checkpoint(state: CacheState, lease: Lease, node: Node, page: int, source: EnginePages) -> None:
    existing = (node.checkpoints or {}).get(page)
    if existing is not None and existing.residencies[Tier.HOST] is not None:
        return
    try:
        pages = allocate(state, Tier.HOST, _checkpoint_pages(state, page), tenant=lease.namespace.tenant)
    except NoRoom:
        state.counters.add("checkpoint_skipped_no_room")
        return
    windows, points = pages.get(Kind.WINDOW, NO_PAGES), pages.get(Kind.POINT, NO_PAGES)
    now = state.clock.now()
    residency = add_residency(state.tree, node, page, Tier.HOST, windows=windows, points=points, ready=False, now=now)
    assert residency is not None
    copies = [
        _copy(Tier.ENGINE, source.windows, Tier.HOST, windows, Kind.WINDOW),
        _copy(Tier.ENGINE, source.points, Tier.HOST, points, Kind.POINT),
    ]
    job = state.copies.copy(Purpose.SAVE, copies, writes=residency, awaited=not source.ahead)
    assert job is not None, "a checkpoint without pages"
    if source.ahead:
        lease.jobs.add(job)
    else:
        lease.must_wait(job=job)
    state.counters.add("checkpoints_made")
    note_trigger(state, lease, residency.checkpoint)
    state.tree.release(Tier.HOST, Kind.WINDOW, windows)  # the tree and the copy have references


def _copy(source: Tier, read: PageIds, target: Tier, write: PageIds, kind: Kind) -> Copy:
    count = min(len(read), len(write))
    if len(read) != len(write) and target is Tier.ENGINE and len(write) < len(read):
        raise LeaseError(f"{len(read)} {kind.label} page(s) must be loaded, but the engine named only {len(write)}")
    return Copy(source=Span(tier=source, kind=kind, ids=read[:count]), target=Span(tier=target, kind=kind, ids=write[:count]))
