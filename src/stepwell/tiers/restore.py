"""Turns a match into a lease: holds the pages that exist, allocates the others, and starts the copies.

All or nothing: if there is no space, nothing is held and the request may try again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stepwell.base.errors import NoRoom
from stepwell.base.ids import JobId, Kind, LeaseId, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Purpose, Span
from stepwell.memory.arena import FILLING, READY
from stepwell.policy.placement import prompt_stops
from stepwell.policy.store_use import Flags
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lease import Lease, RequestOptions, Sources
from stepwell.tiers.restored_rows import allocate_free, allocate_restored, bind_loaded, num_rows, place_loaded
from stepwell.tiers.state import CacheState
from stepwell.tiers.visits import note_use, note_visit
from stepwell.tree.checkpoints import add_residency
from stepwell.tree.match import Match, find_again, ids_of
from stepwell.tree.node import ABSENT, Residency


@dataclass(kw_only=True)
class Holds:
    """References taken for a request before space is freed, so that nothing it needs can be a victim."""

    near: PageIds  # page ids of the restored prefix in the nearest tier, ABSENT where it lacks them
    below: PageIds  # host pages for those gaps
    residency: Residency | None
    index_only: bool = False  # rows of what is loaded stay on the host
    promotes: bool = False  # the checkpoint also becomes one of the device tier, once it is loaded


def acquire(
    state: CacheState,
    match: Match,
    request: RequestOptions,
    number: LeaseId,
    on_exit: Callable[[Lease], None],
    from_store: Flags | None = None,
    known_pages: int = 0,
) -> Lease:
    """Leases a prompt, resuming at the match's restore point (looked up again if the tree has changed).

    `from_store` says which of its pages came from a store while the request waited, `known_pages` how many are known including
    those of the store. Raises NoRoom, and LeaseError for a match of another cache.
    """
    match = find_again(state.tree, match)
    holds = _hold(state, match)
    try:
        pages = _allocate(state, match, holds) if state.nearest is Tier.DEVICE else {}
    except NoRoom:
        _let_go(state, holds)
        raise
    known = max(match.known_tokens, known_pages * state.spec.page_tokens)
    lease = _open(state, match, request, number, on_exit, _sources(state, match, holds, from_store), known)
    if state.nearest is Tier.DEVICE:
        _fill(state, lease, match, holds, pages)
    else:
        lease.prefix_pages = holds.near  # read through `load`; the engine's own memory is the device
    lease.restored = holds.residency
    note_use(state, match, lease)
    note_visit(state, match, lease)
    return lease


def load_ahead(state: CacheState, match: Match, *, evict_for: int | None = None) -> int:
    """Starts to copy the arrived pages of a prompt to the device, before a request leases them; returns their number.

    Uses free space, and evicts for at most `evict_for` of them. Only the tree refers to them: if space is needed
    before the request begins, they may be evicted again.
    """
    near = ids_of(match.path, Tier.DEVICE, match.arrived_tokens // state.spec.page_tokens)
    gaps = np.flatnonzero(near == ABSENT)[:evict_for].astype(np.int32)
    if not len(gaps):
        return 0
    near = near[: int(gaps[-1]) + 1]
    holds = Holds(near=near.copy(), below=ids_of(match.path, Tier.HOST, len(near))[gaps], residency=None)
    state.arena(Tier.DEVICE).retain(Kind.PREFIX, near[near != ABSENT])
    state.arena(Tier.HOST).retain(Kind.PREFIX, holds.below)
    need, tenant = {Kind.PREFIX: len(gaps), Kind.ROWS: num_rows(state, len(gaps))}, match.namespace.tenant
    try:
        pages = (
            allocate_free(state, need)
            if evict_for is None
            else allocate(state, Tier.DEVICE, need, tenant=tenant, may_spill=False)
        )
    except NoRoom:
        pages = None
    if pages is None:
        _let_go(state, holds)
        return 0
    near[gaps] = fresh = pages[Kind.PREFIX]
    copies = [_copy(Kind.PREFIX, Tier.HOST, holds.below, fresh)]
    copies += bind_loaded(state, fresh, pages.get(Kind.ROWS, NO_PAGES), holds.below, gaps)
    _publish_loads(state, match, near)
    state.copies.copy(Purpose.LOAD, copies)
    state.tree.release(Tier.DEVICE, Kind.PREFIX, fresh)  # the tree and the copy have references
    _let_go(state, holds)
    return len(gaps)


def _hold(state: CacheState, match: Match) -> Holds:
    restored = match.restore_tokens // state.spec.page_tokens
    near = ids_of(match.path, state.nearest, restored)
    gaps = near == ABSENT
    below = ids_of(match.path, Tier.HOST, restored)[gaps] if state.has_both_tiers else NO_PAGES
    checkpoint = match.checkpoint
    residency = None
    if checkpoint is not None:
        residency = checkpoint.ready_in(state.nearest) or checkpoint.ready_in(Tier.HOST)
        assert residency is not None, "a match names a checkpoint that no tier has ready"
        state.tree.pin(residency)
    state.arena(state.nearest).retain(Kind.PREFIX, near[~gaps])
    if len(below):
        state.arena(Tier.HOST).retain(Kind.PREFIX, below)
    return Holds(near=near, below=below, residency=residency, promotes=_is_worth_promoting(state, residency))


def _is_worth_promoting(state: CacheState, residency: Residency | None) -> bool:
    """Loaded window pages can be the tree's for free; a point costs one more page, so it must be expected to be used again."""
    if residency is None or residency.tier is state.nearest or residency.checkpoint.residencies[state.nearest] is not None:
        return False
    return not len(residency.points) or residency.checkpoint.uses > 0


def _let_go(state: CacheState, holds: Holds) -> None:
    state.tree.release(state.nearest, Kind.PREFIX, holds.near[holds.near != ABSENT])
    if len(holds.below):
        state.tree.release(Tier.HOST, Kind.PREFIX, holds.below)
    if holds.residency is not None:
        state.tree.unpin(holds.residency)


def _allocate(state: CacheState, match: Match, holds: Holds) -> dict[Kind, PageIds]:
    """Device pages for everything the request lacks, and one more if a point is promoted and there is space."""
    need, tenant = _need(state, match, holds), match.namespace.tenant
    if state.row_pages is not None:
        pages, holds.index_only = allocate_restored(state, need, tenant=tenant, held=holds.near[holds.near != ABSENT])
        return pages
    if holds.promotes and need[Kind.POINT]:
        try:
            return allocate(state, Tier.DEVICE, need | {Kind.POINT: 2}, tenant=tenant)
        except NoRoom as refusal:
            if refusal.waiting:
                raise  # content being saved for it is no candidate any more: a second attempt would not find it in progress
            holds.promotes = False
    return allocate(state, Tier.DEVICE, need, tenant=tenant)


def _need(state: CacheState, match: Match, holds: Holds) -> dict[Kind, int]:
    spec, residency = state.spec, holds.residency
    prompt_pages = -(-match.prompt_tokens // spec.page_tokens)
    from_below = residency is not None and residency.tier is not state.nearest
    return {
        Kind.PREFIX: len(holds.below) + prompt_pages - len(holds.near),
        Kind.WINDOW: len(residency.windows) if from_below and residency is not None else 0,
        Kind.POINT: 1 if spec.parts(Kind.POINT) else 0,
        Kind.ROWS: num_rows(state, len(holds.below)),
    }


def _sources(state: CacheState, match: Match, holds: Holds, from_store: Flags | None) -> Sources:
    """Where a prompt comes from. Pages that the store delivered while this request waited count for it, wherever they are now."""
    computed = match.prompt_tokens - match.restore_tokens
    if from_store is None:
        return Sources(device=match.device_tokens, host=match.host_tokens, computed=computed)
    near, page_tokens = holds.near, state.spec.page_tokens
    on_device = near != ABSENT if state.nearest is Tier.DEVICE else np.zeros(len(near), np.bool_)
    on_device &= state.arena(state.nearest).state[Kind.PREFIX][near] == READY
    if state.row_pages is not None:
        on_device &= ~state.row_pages.backed(near)
    stored = np.zeros(len(near), np.bool_)
    stored[: len(from_store)] = from_store[: len(near)]
    return Sources(
        device=int(np.count_nonzero(on_device & ~stored)) * page_tokens,
        host=int(np.count_nonzero(~on_device & ~stored)) * page_tokens,
        store=int(np.count_nonzero(stored)) * page_tokens,
        computed=computed,
    )


def _open(
    state: CacheState, match: Match, request: RequestOptions, number: LeaseId, on_exit: Callable[[Lease], None], sources: Sources,
    known: int,
) -> Lease:  # fmt: skip
    resume = match.restore_tokens
    stops = prompt_stops(
        state.spec, state.placement, resume=resume, known=known, prompt_tokens=match.prompt_tokens, hints=request.hints
    )
    assert sources.total == match.prompt_tokens, f"{sources} does not add up to {match.prompt_tokens}"
    lease = Lease(
        number, namespace=match.namespace, packed=match.packed, resume=resume, sources=sources,
        request=request, stops=stops, on_exit=on_exit,
    )  # fmt: skip
    lease.known = known
    return lease


def _fill(state: CacheState, lease: Lease, match: Match, holds: Holds, pages: dict[Kind, PageIds]) -> None:
    """Assigns the lease its device pages and starts the copies into them."""
    fresh = pages.get(Kind.PREFIX, NO_PAGES)
    loaded, own = fresh[: len(holds.below)], fresh[len(holds.below) :]
    near = holds.near.copy()
    gaps = np.flatnonzero(near == ABSENT).astype(np.int32)
    near[gaps] = loaded
    lease.prefix_pages = np.concatenate([near, own])
    lease.point_pages = pages.get(Kind.POINT, NO_PAGES)[:1]
    copies = [_copy(Kind.PREFIX, Tier.HOST, holds.below, loaded)]
    if state.spec.window_tokens:
        lease.first_window = lease.resume // state.spec.window_page_tokens  # nothing before it, unless a checkpoint has some
    if holds.residency is not None:
        copies += _restore_checkpoint(state, lease, holds.residency, pages.get(Kind.WINDOW, NO_PAGES))
    rows = pages.get(Kind.ROWS, NO_PAGES)
    of_rows = place_loaded(state, lease, gaps, holds.below, rows, index_only=holds.index_only)  # READY with their pages
    if len(loaded):
        _publish_loads(state, match, near)
    page_states = state.arena(Tier.DEVICE).state[Kind.PREFIX]
    arriving = near[page_states[near] == FILLING]
    waits: list[tuple[Kind, PageIds]] = [(Kind.PREFIX, arriving)]
    waits += [(copy.target.kind, copy.target.ids) for copy in copies[1:]]
    promoted = _promote(state, holds.residency, pages, copies) if holds.promotes and holds.residency is not None else None
    copies += of_rows
    reads = (holds.residency,) if holds.residency is not None else ()
    job = state.copies.copy(Purpose.LOAD, copies, reads=reads, writes=promoted)
    if job is not None or any(len(ids) for _, ids in waits):
        lease.must_wait(waits)
        held = holds.near[holds.near != ABSENT]
        lease.arrives_with = _arrives_with(state, job, held[page_states[held] == FILLING])
    if len(holds.below):
        state.tree.release(Tier.HOST, Kind.PREFIX, holds.below)  # the copy has a reference by now


def _arrives_with(state: CacheState, job: JobId | None, shared: PageIds) -> tuple[JobId, ...]:
    """Its own load, and those of others that bring pages it shares with them; none if a page arrives in another way."""
    mine, others = () if job is None else (job,), state.copies.loads_of(shared)
    return (*others, *mine) if others or not len(shared) else ()


def _restore_checkpoint(state: CacheState, lease: Lease, residency: Residency, windows: PageIds) -> list[Copy]:
    """Shares window pages that are on the device; copies the point state, as the request will change it."""
    page_tokens = state.spec.page_tokens
    lease.first_window = state.spec.window_span(residency.checkpoint.page * page_tokens).start
    copies = []
    if residency.tier is Tier.DEVICE:
        if len(residency.windows):
            state.arena(Tier.DEVICE).retain(Kind.WINDOW, residency.windows)
        lease.window_pages = residency.windows
    else:
        lease.window_pages = windows
        copies.append(_copy(Kind.WINDOW, Tier.HOST, residency.windows, windows))
    if len(residency.points):
        copies.append(_copy(Kind.POINT, residency.tier, residency.points, lease.point_pages))
    return copies


def _promote(state: CacheState, source: Residency, pages: dict[Kind, PageIds], copies: list[Copy]) -> Residency:
    """Enters the checkpoint in the device tier, to be ready with the load; adds the copy its point needs."""
    checkpoint = source.checkpoint
    assert checkpoint.node is not None
    windows, points = pages.get(Kind.WINDOW, NO_PAGES), pages.get(Kind.POINT, NO_PAGES)[1:]
    now = state.clock.now()
    promoted = add_residency(
        state.tree, checkpoint.node, checkpoint.page, Tier.DEVICE, windows=windows, points=points, ready=False, now=now
    )
    assert promoted is not None, "a checkpoint was promoted twice"
    if len(points):
        copies.append(_copy(Kind.POINT, Tier.HOST, source.points, points))
    state.counters.add("checkpoints_promoted")
    return promoted


def _publish_loads(state: CacheState, match: Match, near: PageIds) -> None:
    """Adds loaded pages to the tree, so that one load serves every request that needs them."""
    for node in match.path:
        if node.start >= len(near):
            break
        state.tree.attach(node, Tier.DEVICE, near[node.start : node.end])


def _copy(kind: Kind, source: Tier, read: PageIds, write: PageIds) -> Copy:
    return Copy(source=Span(tier=source, kind=kind, ids=read), target=Span(tier=Tier.DEVICE, kind=kind, ids=write))
