"""Offers what a request has computed on the device to the tree: full pages, and checkpoints where they were asked for.

    tokens      0 ...... published ......|.... offered now ....|.. upto: not a full page yet ..
    windows                              |== kept ==|  older window pages are given back
    point                                           o  handed to the tree; the request goes on with a copy

Prefix and window pages are handed over by reference: nothing is copied, and nobody writes them again.
"""

from __future__ import annotations

import numpy as np

from stepwell.base.errors import LeaseError, NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Purpose, Span
from stepwell.policy.placement import is_milestone, next_decode_stop
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lease import Lease
from stepwell.tiers.lifetime import note_expiry
from stepwell.tiers.saving import save_path
from stepwell.tiers.state import CacheState
from stepwell.tree import missing_state
from stepwell.tree.checkpoints import add_residency, drop_residency
from stepwell.tree.match import find
from stepwell.tree.missing_state import note_offered
from stepwell.tree.node import Checkpoint, LossReason, Node


def grow(core: CacheState, lease: Lease, upto: int) -> None:
    """Gives the lease device pages for tokens up to `upto`; or raises NoRoom and gives none."""
    spec = core.spec
    prefix = -(-upto // spec.page_tokens) - len(lease.prefix_pages)
    windows = 0
    if spec.window_tokens:
        windows = -(-upto // spec.window_page_tokens) - lease.first_window - len(lease.window_pages)
    need = {kind: count for kind, count in ((Kind.PREFIX, prefix), (Kind.WINDOW, windows)) if count > 0}
    if not need:
        return
    pages = allocate(core, Tier.DEVICE, need)
    lease.prefix_pages = _joined(lease.prefix_pages, pages.get(Kind.PREFIX, NO_PAGES))
    lease.window_pages = _joined(lease.window_pages, pages.get(Kind.WINDOW, NO_PAGES))


def commit(core: CacheState, lease: Lease, upto: int, *, checkpoint: bool, last: bool) -> None:
    """Offers tokens `[0, upto)`, which are all computed; with a checkpoint at `upto` if wanted and possible."""
    _check_covered(core, lease, upto)
    spec = core.spec
    page_tokens = spec.page_tokens
    full = upto // page_tokens
    checkpoint = checkpoint and lease.publishes
    fork = _room_for_fork(core, lease) if checkpoint and not last else NO_PAGES
    checkpoint = checkpoint and (last or len(fork) == len(lease.point_pages))
    core.arena(Tier.DEVICE).mark_ready(Kind.PREFIX, lease.prefix_pages[lease.position // page_tokens : full])
    lease.position = upto
    if lease.publishes and (checkpoint or full > lease.num_published):
        since, lease.num_published = lease.num_published, full
        use = lease.request.use(core.clock.now(), lease.visit)
        node = core.tree.insert(lease.namespace.digest, lease.packed, Tier.DEVICE, lease.prefix_pages[:full], use)
        core.know(lease.namespace)
        note_expiry(core, node)
        if lease.missing_states:
            note_offered(node, Tier.DEVICE, lease.prefix_pages[:full], since, lease.missing_states, page_tokens)
        made = _leave_checkpoint(core, lease, node, full, fork, last=last) if checkpoint else None
        if made is not None:
            _follow_trail(core, lease, made)
            if core.on_checkpoint is not None:
                core.on_checkpoint(core, made)
        if core.config.write.saves_on_commit and lease.trail is None:
            save_path(core, node)
    elif len(fork):
        core.tree.release(Tier.DEVICE, Kind.POINT, fork)
    slide(core, lease)


def slide(core: CacheState, lease: Lease) -> None:
    """Gives back the window pages that no later token will look at, and the checkpoint it resumed from once it is behind."""
    spec = core.spec
    first = max(lease.position - spec.window_tokens, 0) // spec.window_page_tokens
    passed = min(max(first - lease.first_window, 0), len(lease.window_pages))
    if passed:
        core.tree.release(Tier.DEVICE, Kind.WINDOW, lease.window_pages[:passed])
        lease.window_pages = lease.window_pages[passed:]
        lease.first_window += passed
    restored = lease.restored
    if restored is not None and restored.checkpoint.page * spec.page_tokens <= first * spec.window_page_tokens:
        lease.restored = None  # its windows are behind us, and its point was copied: it may be evicted again
        core.tree.unpin(restored)


def _check_covered(core: CacheState, lease: Lease, upto: int) -> None:
    spec = core.spec
    windows = lease.first_window + len(lease.window_pages)
    if upto > len(lease.prefix_pages) * spec.page_tokens or (spec.window_tokens and upto > windows * spec.window_page_tokens):
        raise LeaseError(f"{lease} has no pages up to token {upto}; call grow() before computing")
    if spec.parts(Kind.POINT) and not len(lease.point_pages):
        raise LeaseError(f"{lease} has handed its point state over with `last`, and cannot commit again")


def _room_for_fork(core: CacheState, lease: Lease) -> PageIds:
    """A page for the request to go on with, so that the tree can have the one it used; none when there is no room."""
    if not len(lease.point_pages):
        return NO_PAGES
    try:
        return allocate(core, Tier.DEVICE, {Kind.POINT: 1})[Kind.POINT]
    except NoRoom:
        core.counters.add("checkpoint_skipped_no_room")
        return NO_PAGES


def _leave_checkpoint(core: CacheState, lease: Lease, node: Node, page: int, fork: PageIds, *, last: bool) -> Checkpoint | None:
    tree, arena = core.tree, core.arena(Tier.DEVICE)
    span = core.spec.window_span(page * core.spec.page_tokens)
    assert span.start >= lease.first_window or not len(span), f"{lease} lacks windows of {span} for a checkpoint"
    windows = lease.window_pages[span.start - lease.first_window : span.stop - lease.first_window]
    points = lease.point_pages
    for kind, ids in ((Kind.WINDOW, windows), (Kind.POINT, points)):
        if len(ids):
            arena.mark_ready(kind, ids)
    now = core.clock.now()
    residency = add_residency(tree, node, page, Tier.DEVICE, windows=windows, points=points, ready=True, now=now)
    if residency is None:  # another request left the same one: it has two owners now
        _note_shared(node, page)
        if len(fork):
            core.tree.release(Tier.DEVICE, Kind.POINT, fork)
        return None
    core.counters.add("checkpoints_made")
    if len(points):
        if last:
            lease.point_pages = NO_PAGES
        else:
            _go_on_with(core, lease, fork)
            source = Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=points)
            target = Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=fork)
            core.copies.copy(Purpose.FORK, [Copy(source=source, target=target)], reads=(residency,))
    return residency.checkpoint


def _note_shared(node: Node, page: int) -> None:
    assert node.checkpoints is not None
    node.checkpoints[page].uses += 1


def _go_on_with(core: CacheState, lease: Lease, fork: PageIds) -> None:
    lease.point_pages = fork
    lease.must_wait([(Kind.POINT, fork)])


def _follow_trail(core: CacheState, lease: Lease, made: Checkpoint) -> None:
    """Of the checkpoints a growing answer leaves, only the last is kept, unless somebody has used an earlier one."""
    if made.page * core.spec.page_tokens < lease.prompt_tokens:
        return
    before, lease.trail = lease.trail, made
    if before is None or before.uses or before.in_use or before.node is None or _is_milestone(core, before):
        return
    drop_superseded(core, before)


def drop_superseded(core: CacheState, checkpoint: Checkpoint) -> None:
    """Takes a checkpoint that a later one replaces out of all tiers. Not to be called for one that is in use."""
    for residency in list(checkpoint.held):
        if residency is not None:
            core.counters.add(f"superseded_{residency.tier.label}_checkpoints")
            drop_residency(core.tree, residency, core.loss(LossReason.EVICTED, residency.tier))


def _is_milestone(core: CacheState, checkpoint: Checkpoint) -> bool:
    return is_milestone(core.spec, core.placement, checkpoint.page * core.spec.page_tokens)


def note_missing_state(core: CacheState, lease: Lease, state: str, since: int) -> None:
    """From token `since` on this lease's pages lack a state, also those it will fill."""
    if any(each.name == state and each.required for each in core.spec.states):
        raise LeaseError(f"state {state!r} is required: pages without it cannot be offered")
    lease.missing_states[state] = min(since, lease.missing_states.get(state, since))
    if since >= lease.resume:
        return
    page_tokens = core.spec.page_tokens
    match = find(core.tree, lease.namespace, lease.packed, lease.resume)
    for node in match.path:
        if node.start <= since // page_tokens < min(node.end, match.known_tokens // page_tokens):
            missing_state.note(node, state, since, page_tokens)


def next_stop(core: CacheState, lease: Lease) -> int | None:
    """The next boundary at which the engine must stop and commit, in the prompt or in its answer."""
    for stop in lease.stops:
        if stop > lease.position:
            return stop
    start = max(lease.position, lease.prompt_tokens - 1)
    return next_decode_stop(core.spec, core.placement, position=start)


def is_stop(core: CacheState, lease: Lease, boundary: int) -> bool:
    """Whether a checkpoint was asked for at `boundary`."""
    if boundary < lease.prompt_tokens:
        return boundary in lease.stops
    return next_decode_stop(core.spec, core.placement, position=boundary - 1) == boundary


def _joined(pages: PageIds, more: PageIds) -> PageIds:
    return np.concatenate([pages, more]) if len(more) else pages
