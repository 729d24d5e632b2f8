"""Offers what a request has computed on the device to the tree: full pages, and checkpoints where they were requested.

    tokens      0 ...... published ......|.... offered now ....|.. upto: not a full page yet ..
    windows                              |== kept ==|  older window pages are released
    point                                           o  or a copy of it goes to the tree; the request continues with the other

Prefix and window pages are passed by reference: nothing is copied, and they are never written again.
"""

from __future__ import annotations

import numpy as np

from stepwell.base.errors import LeaseError, NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Purpose, Span
from stepwell.memory.arena import Need
from stepwell.policy.placement import is_milestone, next_decode_stop, trigger_of
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lease import Lease
from stepwell.tiers.lifetime import note_expiry
from stepwell.tiers.saving import save_committed
from stepwell.tiers.spill import assign_hot, hot_missing
from stepwell.tiers.state import CacheState
from stepwell.tree import missing_state
from stepwell.tree.checkpoints import add_residency, drop_residency
from stepwell.tree.match import find
from stepwell.tree.missing_state import note_offered
from stepwell.tree.node import Checkpoint, LossReason, Node


def grow(state: CacheState, lease: Lease, upto: int) -> None:
    """Allocates device pages for tokens up to `upto` to the lease; or raises NoRoom and allocates none.

    Rows of running requests leave the device for it, if nothing else can be evicted.
    """
    if upto < lease.quiet_until and not hot_missing(state, lease):
        return
    spec = state.spec
    prefix = -(-upto // spec.page_tokens) - len(lease.prefix_pages)
    windows = 0
    if spec.window_tokens:
        windows = -(-upto // spec.window_page_tokens) - lease.first_window - len(lease.window_pages)
    rows = _rows_missing(state, lease, upto)
    need = {kind: count for kind, count in ((Kind.PREFIX, prefix), (Kind.WINDOW, windows), (Kind.ROWS, rows)) if count > 0}
    spare = _spare_missing(state, lease, upto)
    if not need and not spare and not hot_missing(state, lease):
        return
    pages = _allocate_or_do_without(state, lease, need, spare=spare)
    lease.spare_points = _joined(lease.spare_points, pages.get(Kind.POINT, NO_PAGES))
    lease.prefix_pages = _joined(lease.prefix_pages, pages.get(Kind.PREFIX, NO_PAGES))
    lease.window_pages = _joined(lease.window_pages, pages.get(Kind.WINDOW, NO_PAGES))
    if state.row_pages is not None:
        fresh, end = pages.get(Kind.ROWS, NO_PAGES), -(-upto // spec.page_tokens)
        if rows:
            state.row_pages.bind(lease.prefix_pages[end - rows : end], fresh[:rows], range(end - rows, end))
        assign_hot(state, lease, fresh[rows:])


def _spare_missing(state: CacheState, lease: Lease, upto: int) -> bool:
    """Whether a lease lacks the page with which it continues after leaving a checkpoint at `upto`.

    It is allocated before the computation only if evicted content is saved first: here the request can wait for space.
    """
    if state.write_back is None or not lease.publishes or not len(lease.point_pages) or len(lease.spare_points):
        return False
    if upto in lease.point_copies:
        return False
    return is_stop(state, lease, upto)


def _allocate_or_do_without(state: CacheState, lease: Lease, need: Need, *, spare: bool) -> dict[Kind, PageIds]:
    """All that a lease needs, with a spare point if it lacks one, or nothing while space for that is being freed.

    A checkpoint is not worth delaying a request: if space never becomes free, it continues without a spare, and leaves none.
    """
    try:
        return _allocate(state, lease, {**need, Kind.POINT: 1} if spare else need)
    except NoRoom as refusal:
        if refusal.waiting or not (spare or len(lease.spare_points)):
            raise
    if len(lease.spare_points):
        state.tree.release(Tier.DEVICE, Kind.POINT, lease.spare_points)
        lease.spare_points = NO_PAGES
    return _allocate(state, lease, need)


def _allocate(state: CacheState, lease: Lease, need: Need) -> dict[Kind, PageIds]:
    """Pages that a lease needs, and those for hot rows that it lacks; if there is no space for hot rows, it continues without."""
    hot, page = hot_missing(state, lease), lease.position // state.spec.page_tokens
    with_hot = {**need, Kind.ROWS: need.get(Kind.ROWS, 0) + hot}
    if hot and (lease.hot_refused_at != page or state.arena(Tier.DEVICE).fits(with_hot)):
        try:
            return allocate(state, Tier.DEVICE, with_hot, tenant=lease.namespace.tenant)
        except NoRoom:
            lease.hot_refused_at = page
            state.counters.add("hot_pages_skipped_no_room")
    return allocate(state, Tier.DEVICE, need, tenant=lease.namespace.tenant)


def _rows_missing(state: CacheState, lease: Lease, upto: int) -> int:
    """How many of the last pages before token `upto` have no rows yet, if rows are pages of their own."""
    if state.row_pages is None:
        return 0
    first, end = lease.position // state.spec.page_tokens, -(-upto // state.spec.page_tokens)
    have = lease.prefix_pages[first:end]
    return max(end - first, 0) - int(np.count_nonzero(state.row_pages.placed(have)))


def commit(
    state: CacheState, lease: Lease, upto: int, *, checkpoint: bool, last: bool, point_copy: int | None = None
) -> None:  # fmt: skip
    """Offers tokens `[0, upto)`, which are all computed; with a checkpoint at `upto` if requested and possible. `point_copy` is
    the page, reserved for `upto`, that holds a copy of the lease's point state there; None if the engine made no copy.
    """
    _check_covered(state, lease, upto)
    _check_reserved(lease, upto, point_copy)
    spec = state.spec
    page_tokens = spec.page_tokens
    full = upto // page_tokens
    if state.row_pages is not None and state.row_pages.has_quarantined(lease.prefix_pages):
        lease.publishes = False  # a load of their rows failed: published pages would bring them back into the tree
    checkpoint = checkpoint and lease.publishes
    copied = point_copy is not None
    copy = lease.point_copies.pop(upto, NO_PAGES) if copied or not last else NO_PAGES
    if checkpoint and not (len(copy) or last):
        copy = _room_for_copy(state, lease)
        if len(copy) < len(lease.point_pages):
            state.counters.add("checkpoint_skipped_no_room")
            checkpoint = False
    if full > lease.position // page_tokens:
        _mark_ready(state, lease.prefix_pages[lease.position // page_tokens : full])
    lease.position, made = upto, None
    if lease.publishes and (checkpoint or full > lease.num_published):
        since, lease.num_published = lease.num_published, full
        use = lease.request.use(state.clock.now(), lease.visit)
        node = state.tree.insert(lease.namespace, lease.packed, Tier.DEVICE, lease.prefix_pages[:full], use)
        state.know(lease.namespace)
        note_expiry(state, node)
        if lease.missing_states:
            note_offered(node, Tier.DEVICE, lease.prefix_pages[:full], since, lease.missing_states, page_tokens)
        if checkpoint:
            found = (node.checkpoints or {}).get(full)  # in any tier
            made = _leave_checkpoint(state, lease, node, full, copy, copied=copied)
            if found is not None:
                _note_shared(state, lease, found)
            reached = made or found
            assert reached is not None, f"{lease} has left no checkpoint at page {full}, and there is none"
            _follow_trail(state, lease, reached)
        if lease.trail is None:
            save_committed(state, node)
    if made is None and len(copy):
        state.tree.release(Tier.DEVICE, Kind.POINT, copy)
    slide(state, lease)
    lease.quiet_until = 0 if last else _quiet_until(state, lease)


def _quiet_until(state: CacheState, lease: Lease) -> int:
    """The next token of an answer at which a commit could offer or release a page, or for which the lease has none yet; 0 for a
    lease that is still in its prompt, where other requests may add stops.
    """
    spec = state.spec
    if lease.position < lease.prompt_tokens:
        return 0
    until = min((lease.position // spec.page_tokens + 1) * spec.page_tokens, len(lease.prefix_pages) * spec.page_tokens)
    if spec.window_tokens:
        size = spec.window_page_tokens
        slides = (max(lease.position - spec.window_tokens, 0) // size + 1) * size + spec.window_tokens
        until = min(until, slides, (lease.first_window + len(lease.window_pages)) * size)
    return until


def _mark_ready(state: CacheState, pages: PageIds) -> None:
    """Marks prefix pages as computed, with their rows."""
    arena = state.arena(Tier.DEVICE)
    arena.mark_ready(Kind.PREFIX, pages)
    if state.row_pages is not None:
        arena.mark_ready(Kind.ROWS, state.row_pages.rows[pages])


def slide(state: CacheState, lease: Lease) -> None:
    """Releases the window pages that no later token reads, and the checkpoint it resumed from once the windows have passed it."""
    spec = state.spec
    first = max(lease.position - spec.window_tokens, 0) // spec.window_page_tokens
    passed = min(max(first - lease.first_window, 0), len(lease.window_pages))
    if passed:
        state.tree.release(Tier.DEVICE, Kind.WINDOW, lease.window_pages[:passed])
        lease.window_pages = lease.window_pages[passed:]
        lease.first_window += passed
    restored = lease.restored
    if restored is not None and restored.checkpoint.page * spec.page_tokens <= first * spec.window_page_tokens:
        lease.restored = None  # its windows were passed, and its point was copied: it may be evicted again
        state.tree.unpin(restored)


def _check_covered(state: CacheState, lease: Lease, upto: int) -> None:
    spec = state.spec
    windows = lease.first_window + len(lease.window_pages)
    covered = upto <= len(lease.prefix_pages) * spec.page_tokens and not _rows_missing(state, lease, upto)
    if not covered or (spec.window_tokens and upto > windows * spec.window_page_tokens):
        raise LeaseError(f"{lease} has no pages up to token {upto}; call grow() before computing")
    if spec.parts(Kind.POINT) and not len(lease.point_pages):
        raise LeaseError(f"{lease} has published its point state with `last`, and cannot commit again")


def _check_reserved(lease: Lease, upto: int, point_copy: int | None) -> None:
    if point_copy is not None and point_copy not in lease.point_copies.get(upto, NO_PAGES):
        raise LeaseError(f"{lease}: page {point_copy} is not the one that copy_point() returned for token {upto}")


def copy_point(state: CacheState, lease: Lease, upto: int) -> int | None:
    """Reserves the page for a copy of the lease's point that the engine makes after the pass that ends at `upto`; or None."""
    if not lease.publishes or not is_stop(state, lease, upto):
        return None
    if upto not in lease.point_copies and len(page := _room_for_copy(state, lease)):
        lease.point_copies[upto] = page
    return int(lease.point_copies[upto][0]) if upto in lease.point_copies else None


def _room_for_copy(state: CacheState, lease: Lease) -> PageIds:
    """A page with which both the tree and the lease can have the lease's point; none if there is no space."""
    if not len(lease.point_pages):
        return NO_PAGES
    if len(lease.spare_points):
        spare, lease.spare_points = lease.spare_points, NO_PAGES
        return spare
    try:
        return allocate(state, Tier.DEVICE, {Kind.POINT: 1}, tenant=lease.namespace.tenant)[Kind.POINT]
    except NoRoom:
        return NO_PAGES


def _leave_checkpoint(
    state: CacheState, lease: Lease, node: Node, page: int, copy: PageIds, *, copied: bool
) -> Checkpoint | None:  # fmt: skip
    """A checkpoint at boundary `page`; None if the device has it already. Its point is `copy` if the engine has `copied`
    it, else the lease's own page, and the lease continues with `copy` once the cache has made that copy.
    """
    tree, arena = state.tree, state.arena(Tier.DEVICE)
    span = state.spec.window_span(page * state.spec.page_tokens)
    assert span.start >= lease.first_window or not len(span), f"{lease} lacks windows of {span} for a checkpoint"
    windows = lease.window_pages[span.start - lease.first_window : span.stop - lease.first_window]
    points = copy if copied else lease.point_pages
    for kind, ids in ((Kind.WINDOW, windows), (Kind.POINT, points)):
        if len(ids):
            arena.mark_ready(kind, ids)
    now = state.clock.now()
    residency = add_residency(tree, node, page, Tier.DEVICE, windows=windows, points=points, ready=True, now=now)
    if residency is None:
        return None
    state.counters.add("checkpoints_made")
    note_trigger(state, lease, residency.checkpoint)
    if len(points) and not copied:
        lease.point_pages = copy
        if len(copy):
            lease.must_wait([(Kind.POINT, copy)])
            source = Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=points)
            target = Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=copy)
            state.copies.copy(Purpose.FORK, [Copy(source=source, target=target)], reads=(residency,))
    return residency.checkpoint


def note_trigger(state: CacheState, lease: Lease, checkpoint: Checkpoint) -> None:
    """Records why this lease left a checkpoint here, for later statistics."""
    checkpoint.trigger = trigger_of(
        state.spec, state.placement, checkpoint.page * state.spec.page_tokens,
        known=lease.known, prompt_tokens=lease.prompt_tokens, hints=lease.request.hints,
    )  # fmt: skip


def _note_shared(state: CacheState, lease: Lease, found: Checkpoint) -> None:
    """Another request left a checkpoint where this one would. It has two owners now, and stays, unless both are answers that are
    identical so far, and leave it behind like their own.
    """
    if not (found.answers and _is_in_answer(state, lease, found)):
        found.uses += 1


def _follow_trail(state: CacheState, lease: Lease, reached: Checkpoint) -> None:
    """Keeps only the last of the checkpoints on a growing answer's path, unless a request has used an earlier one or another
    answer has come no further.
    """
    if not _is_in_answer(state, lease, reached):
        return
    for visit in lease.visits:  # clients that do not send the answer back continue from before the end of the path
        visit.end = max(visit.end, reached.page)
    before, lease.trail = lease.trail, reached
    reached.answers += 1
    if before is None:
        return
    before.answers -= 1
    if before.answers or before.uses or before.in_use or before.node is None or _is_milestone(state, before):
        return
    drop_superseded(state, before)


def _is_in_answer(state: CacheState, lease: Lease, checkpoint: Checkpoint) -> bool:
    return checkpoint.page * state.spec.page_tokens >= lease.prompt_tokens


def drop_superseded(state: CacheState, checkpoint: Checkpoint) -> None:
    """Removes a checkpoint that a later one replaces from all tiers. Must not be called for one that is in use."""
    for residency in list(checkpoint.residencies):
        if residency is not None:
            state.counters.add(f"superseded_{residency.tier.label}_checkpoints")
            drop_residency(state.tree, residency, state.loss(LossReason.EVICTED, residency.tier))


def _is_milestone(state: CacheState, checkpoint: Checkpoint) -> bool:
    return is_milestone(state.spec, state.placement, checkpoint.page * state.spec.page_tokens)


def note_missing_state(state: CacheState, lease: Lease, name: str, since: int) -> None:
    """From token `since` on this lease's pages lack a state, including those it will fill."""
    if any(each.name == name and each.required for each in state.spec.states):
        raise LeaseError(f"state {name!r} is required: pages without it cannot be offered")
    lease.missing_states[name] = min(since, lease.missing_states.get(name, since))
    if since >= lease.resume:
        return
    page_tokens = state.spec.page_tokens
    match = find(state.tree, lease.namespace, lease.packed, lease.resume)
    for node in match.path:
        if node.start <= since // page_tokens < min(node.end, match.known_tokens // page_tokens):
            missing_state.note(node, name, since, page_tokens)


def next_stop(state: CacheState, lease: Lease, after: int | None = None) -> int | None:
    """The next boundary at which the engine must stop and commit, in the prompt or in its answer."""
    after = lease.position if after is None else after
    for stop in lease.stops:
        if stop > after:
            return stop
    start = max(after, lease.prompt_tokens - 1)
    return next_decode_stop(state.spec, state.placement, position=start)


def is_stop(state: CacheState, lease: Lease, boundary: int) -> bool:
    """Whether a checkpoint was requested at `boundary`."""
    if boundary < lease.prompt_tokens:
        return boundary in lease.stops
    return next_decode_stop(state.spec, state.placement, position=boundary - 1) == boundary


def _joined(pages: PageIds, more: PageIds) -> PageIds:
    return np.concatenate([pages, more]) if len(more) else pages
