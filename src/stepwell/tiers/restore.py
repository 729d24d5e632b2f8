"""Turns a match into a lease: holds what is there, takes room for what is not, and starts the copies.

All or nothing: when there is no room, nothing is held and the request may try again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stepwell.base.errors import NoRoom
from stepwell.base.ids import Kind, LeaseId, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Purpose, Span
from stepwell.memory.arena import FILLING, READY
from stepwell.policy.placement import prompt_stops
from stepwell.policy.store_use import Flags
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lease import Lease, RequestOptions, Sources
from stepwell.tiers.lifetime import note_expiry
from stepwell.tiers.saving import save_path
from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import add_residency
from stepwell.tree.match import Match, find, ids_of
from stepwell.tree.node import ABSENT, Node, Residency


@dataclass(kw_only=True)
class Holds:
    """References taken for a request before room is made, so that nothing it needs can be the victim."""

    near: PageIds  # page ids of the restored prefix in the nearest tier, ABSENT where it lacks them
    below: PageIds  # host pages for those gaps
    residency: Residency | None
    promotes: bool = False  # the checkpoint is to be the device tier's too, once it is loaded


def acquire(
    core: CacheState,
    match: Match,
    request: RequestOptions,
    number: LeaseId,
    on_exit: Callable[[Lease], None],
    from_store: Flags | None = None,
) -> Lease:
    """Leases a prompt, resuming at the match's restore point (looked up again if the tree moved on).

    `from_store` says which of its pages came from a store while the request waited.
    """
    if match.version != core.tree.version:
        match = find(core.tree, match.namespace, match.packed, match.limit_tokens)
    holds = _hold(core, match)
    try:
        pages = _allocate(core, match, holds) if core.nearest is Tier.DEVICE else {}
    except NoRoom:
        _let_go(core, holds)
        raise
    lease = _open(core, match, request, number, on_exit, _tokens_from_store(core, holds, from_store))
    if core.nearest is Tier.DEVICE:
        _fill(core, lease, match, holds, pages)
    else:
        lease.prefix_pages = holds.near  # read through `load`; the engine's own memory is the device
    lease.restored = holds.residency
    _note_use(core, match, lease)
    _note_visit(core, match, lease)
    return lease


def _hold(core: CacheState, match: Match) -> Holds:
    restored = match.restore_tokens // core.spec.page_tokens
    near = ids_of(match.path, core.nearest, restored)
    gaps = near == ABSENT
    below = ids_of(match.path, Tier.HOST, restored)[gaps] if core.has_both_tiers else NO_PAGES
    checkpoint = match.checkpoint
    residency = None
    if checkpoint is not None:
        residency = checkpoint.ready_in(core.nearest) or checkpoint.ready_in(Tier.HOST)
        assert residency is not None, "a match names a checkpoint that is nowhere ready"
        residency.users += 1
    core.arena(core.nearest).retain(Kind.PREFIX, near[~gaps])
    if len(below):
        core.arena(Tier.HOST).retain(Kind.PREFIX, below)
    return Holds(near=near, below=below, residency=residency, promotes=_is_worth_promoting(core, residency))


def _is_worth_promoting(core: CacheState, residency: Residency | None) -> bool:
    """Loaded window pages can be the tree's for nothing; a point costs a page more, so it must be wanted again."""
    if residency is None or residency.tier is core.nearest or residency.checkpoint.held[core.nearest] is not None:
        return False
    return not len(residency.points) or residency.checkpoint.uses > 0


def _let_go(core: CacheState, holds: Holds) -> None:
    core.tree.release(core.nearest, Kind.PREFIX, holds.near[holds.near != ABSENT])
    if len(holds.below):
        core.tree.release(Tier.HOST, Kind.PREFIX, holds.below)
    if holds.residency is not None:
        core.tree.unpin(holds.residency)


def _allocate(core: CacheState, match: Match, holds: Holds) -> dict[Kind, PageIds]:
    """Device pages for everything the request lacks, and one more where a point is promoted and there is room."""
    need = _need(core, match, holds)
    if holds.promotes and need[Kind.POINT]:
        try:
            return allocate(core, Tier.DEVICE, need | {Kind.POINT: 2})
        except NoRoom as refusal:
            if refusal.waiting:
                raise  # what is being saved for it is no candidate any more: a second look would find nothing on its way
            holds.promotes = False
    return allocate(core, Tier.DEVICE, need)


def _need(core: CacheState, match: Match, holds: Holds) -> dict[Kind, int]:
    spec, residency = core.spec, holds.residency
    prompt_pages = -(-match.prompt_tokens // spec.page_tokens)
    from_below = residency is not None and residency.tier is not core.nearest
    return {
        Kind.PREFIX: len(holds.below) + prompt_pages - len(holds.near),
        Kind.WINDOW: len(residency.windows) if from_below and residency is not None else 0,
        Kind.POINT: 1 if spec.parts(Kind.POINT) else 0,
    }


def _tokens_from_store(core: CacheState, holds: Holds, from_store: Flags | None) -> int:
    """How many of the tokens to be restored came from the store while this request waited."""
    if from_store is None:
        return 0
    on_device = (holds.near != ABSENT) & (core.arena(core.nearest).state[Kind.PREFIX][holds.near] == READY)
    from_host = ~on_device if core.nearest is Tier.DEVICE else np.ones(len(holds.near), np.bool_)
    shared = min(len(from_host), len(from_store))
    return int(np.count_nonzero(from_host[:shared] & from_store[:shared])) * core.spec.page_tokens


def _open(
    core: CacheState, match: Match, request: RequestOptions, number: LeaseId, on_exit: Callable[[Lease], None], from_store: int
) -> Lease:
    resume = match.restore_tokens
    stops = prompt_stops(
        core.spec, core.placement, resume=resume, known=match.known_tokens,
        prompt_tokens=match.prompt_tokens, hints=request.hints,
    )  # fmt: skip
    sources = Sources(
        device=match.device_tokens, host=match.host_tokens - from_store, store=from_store, computed=match.prompt_tokens - resume
    )
    assert sources.total == match.prompt_tokens, f"{sources} does not add up to {match.prompt_tokens}"
    return Lease(
        number, namespace=match.namespace, packed=match.packed, resume=resume, sources=sources,
        request=request, stops=stops, on_exit=on_exit,
    )  # fmt: skip


def _fill(core: CacheState, lease: Lease, match: Match, holds: Holds, pages: dict[Kind, PageIds]) -> None:
    """Gives the lease its device pages and starts whatever must be copied into them."""
    fresh = pages.get(Kind.PREFIX, NO_PAGES)
    loaded, own = fresh[: len(holds.below)], fresh[len(holds.below) :]
    near = holds.near.copy()
    near[near == ABSENT] = loaded
    lease.prefix_pages = np.concatenate([near, own])
    lease.point_pages = pages.get(Kind.POINT, NO_PAGES)[:1]
    copies = [_copy(Kind.PREFIX, Tier.HOST, holds.below, loaded)]
    if core.spec.window_tokens:
        lease.first_window = lease.resume // core.spec.window_page_tokens  # nothing before it, unless a checkpoint has some
    if holds.residency is not None:
        copies += _restore_checkpoint(core, lease, holds.residency, pages.get(Kind.WINDOW, NO_PAGES))
    if len(loaded):
        _publish_loads(core, match, near)
    state = core.arena(Tier.DEVICE).state[Kind.PREFIX]
    arriving = near[state[near] == FILLING]
    waits: list[tuple[Kind, PageIds]] = [(Kind.PREFIX, arriving)]
    waits += [(copy.target.kind, copy.target.ids) for copy in copies[1:]]
    promoted = _promote(core, holds.residency, pages, copies) if holds.promotes and holds.residency is not None else None
    reads = (holds.residency,) if holds.residency is not None else ()
    if core.copies.copy(Purpose.LOAD, copies, reads=reads, writes=promoted) is not None or any(len(ids) for _, ids in waits):
        lease.must_wait(waits)
    if len(holds.below):
        core.tree.release(Tier.HOST, Kind.PREFIX, holds.below)  # the copy holds its own by now


def _restore_checkpoint(core: CacheState, lease: Lease, residency: Residency, windows: PageIds) -> list[Copy]:
    """Window pages are shared where they are on the device; the point state is copied, for the request will change it."""
    page_tokens = core.spec.page_tokens
    lease.first_window = core.spec.window_span(residency.checkpoint.page * page_tokens).start
    copies = []
    if residency.tier is Tier.DEVICE:
        if len(residency.windows):
            core.arena(Tier.DEVICE).retain(Kind.WINDOW, residency.windows)
        lease.window_pages = residency.windows
    else:
        lease.window_pages = windows
        copies.append(_copy(Kind.WINDOW, Tier.HOST, residency.windows, windows))
    if len(residency.points):
        copies.append(_copy(Kind.POINT, residency.tier, residency.points, lease.point_pages))
    return copies


def _promote(core: CacheState, source: Residency, pages: dict[Kind, PageIds], copies: list[Copy]) -> Residency:
    """Enters the checkpoint in the device tier, to be ready with the load; adds the copy its point needs."""
    checkpoint = source.checkpoint
    assert checkpoint.node is not None
    windows, points = pages.get(Kind.WINDOW, NO_PAGES), pages.get(Kind.POINT, NO_PAGES)[1:]
    now = core.clock.now()
    promoted = add_residency(
        core.tree, checkpoint.node, checkpoint.page, Tier.DEVICE, windows=windows, points=points, ready=False, now=now
    )
    assert promoted is not None, "a checkpoint was promoted twice"
    if len(points):
        copies.append(_copy(Kind.POINT, Tier.HOST, source.points, points))
    core.counters.add("checkpoints_promoted")
    return promoted


def _publish_loads(core: CacheState, match: Match, near: PageIds) -> None:
    """Loaded pages are the tree's too, so that one load serves everybody who wants them."""
    for node in match.path:
        if node.start >= len(near):
            break
        core.tree.attach(node, Tier.DEVICE, near[node.start : node.end])


def _note_use(core: CacheState, match: Match, lease: Lease) -> None:
    upto = match.restore_tokens // core.spec.page_tokens
    if not upto:
        return
    use = lease.request.use(core.clock.now())
    if match.checkpoint is not None:
        match.checkpoint.used_at = use.at_s
        match.checkpoint.uses += 1
    deepest = core.tree.touch(match.path, upto, use)
    note_expiry(core, deepest)
    if core.config.write.saves_on_use(deepest.hits):
        save_path(core, deepest)
        if core.below is not None:
            core.below.offer(deepest)


def _note_visit(core: CacheState, match: Match, lease: Lease) -> None:
    """Tells the reuse model of a request: what it came back to is of its visit from now on, and what it will leave too."""
    if core.reuse is None:
        return
    page_bytes, packed = core.tree.page_bytes, match.packed
    known = match.known_tokens // core.spec.page_tokens
    path = _path_now(core, match, known)
    known = path[-1].end if path else 0  # less when room was made out of what follows the restore point
    deepest = path[-1] if path else core.tree.roots.get(match.namespace.digest)
    following = packed[known * page_bytes : (known + 1) * page_bytes]
    lost = deepest.past.get(following) if deepest is not None and deepest.past else None
    again, fresh = core.reuse.arrive(
        core.clock.now(),
        known=known,
        end=max(known, match.prompt_tokens // core.spec.page_tokens),
        passed=[(node.visit, node.num_pages) for node in path],
        goes_on=bool(path) and path[-1].kids is None and not path[-1].past,
        lost=lost,
    )
    for node in path:
        node.visit = again
    lease.visit, lease.visits = fresh, (again, fresh)


def _path_now(core: CacheState, match: Match, known: int) -> list[Node]:
    """The nodes of the first `known` pages as they are now, the last cut there."""
    path: list[Node] = []
    node = core.tree.roots.get(match.namespace.digest)
    size = core.tree.page_bytes
    while node is not None and (at := path[-1].end if path else 0) < known:
        node = node.child(match.packed[at * size : (at + 1) * size])
        if node is not None:
            path.append(node if node.end <= known else core.tree.split(node, known - node.start))
            node = path[-1]
    return path


def _copy(kind: Kind, source: Tier, read: PageIds, write: PageIds) -> Copy:
    return Copy(source=Span(tier=source, kind=kind, ids=read), target=Span(tier=Tier.DEVICE, kind=kind, ids=write))
