"""From the store up to the host, while a request waits in line: ask, decide how deep, fetch, and keep what arrived.

    prefetch   ask which pages and checkpoints the store has beyond what is in memory
    _plan      the deepest restore point they give together that is worth its time and fits; host pages for exactly that
    _fetch     into the tree as FILLING pages, so that one fetch serves everybody; READY one by one as they verify
    close      the request begins, or is gone: what nobody waits for is called off

Nothing here waits. What fails is a miss, and the plan is made again without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from stepwell.base.config import PrefetchPolicy
from stepwell.base.errand import Ask, Fate, FetchCheckpoint, FetchPages, Outcome
from stepwell.base.errors import NoRoom
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.plan import NO_PAGES, PageIds
from stepwell.cache.core import Core
from stepwell.cache.expiry import note_expiry
from stepwell.cache.lease import Request
from stepwell.cache.link import StoreLink
from stepwell.cache.room import allocate
from stepwell.cache.ticket import Fetch, Ticket, TicketState
from stepwell.memory.arena import FILLING
from stepwell.policy.fetching import fallbacks, is_worth_it, reachable, restore_points
from stepwell.tree.chain import path_keys
from stepwell.tree.checkpoints import add_residency, drop_residency, residency_arrived
from stepwell.tree.match import Match, find, ids_of
from stepwell.tree.node import ABSENT, Loss, LossReason, Node, Residency
from stepwell.tree.pruning import discard_ids

MOST_TRIES = 6  # at finding a depth that fits into the host tier
REMEASURE_AFTER_S = 60.0  # a store that was too slow to be worth it gets another chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What to bring up: pages `known` .. `upto`, and the checkpoints at `boundaries`, deepest last."""

    known: int
    upto: int
    boundaries: tuple[int, ...]


def prefetch(core: Core, link: StoreLink | None, match: Match, request: Request) -> Ticket:
    """Opens a ticket for a prompt; asks the store if it could help."""
    spec, policy = core.spec, link.config.prefetch if link is not None else PrefetchPolicy.BEST_EFFORT
    asks = link is not None and _may_help(core, link, match)
    upto = match.limit_tokens // spec.page_tokens
    known = match.known_tokens // spec.page_tokens
    keys = path_keys(
        match.namespace.digest, match.path, match.packed, known=known, upto=upto, page_bytes=core.tree.page_bytes
    ) if asks else ()  # fmt: skip
    granted_s = 0.0
    if asks and link is not None and policy is PrefetchPolicy.TIMEOUT:
        granted_s = link.patience.take(link.config.timeout_s(match.prompt_tokens))
    core.namespaces[match.namespace.digest] = match.namespace
    ticket = Ticket(
        namespace=match.namespace, packed=match.packed, request=request, limit_tokens=match.limit_tokens, clock=core.clock,
        granted_s=granted_s, keys=keys, on_exit=partial(close, core, link),
    )  # fmt: skip
    if policy is PrefetchPolicy.WAIT_COMPLETE:
        ticket.deadline_s = float("inf")
    if not asks or link is None:
        _finish(core, ticket)
        return ticket
    link.tickets[ticket] = None
    for fetch in _on_their_way(core, link, match):
        _watch(fetch, ticket)
    ticket.first_asked = known
    boundaries = _boundaries_to_ask(core, match, upto)
    task = Ask(pages=keys[known:], boundaries=tuple(keys[page - 1] for page in boundaries))
    core.counters.add("prefetch_asked")
    link.errands.start(task, match.namespace, partial(_asked, core, link, ticket, boundaries), call=ticket.call)
    return ticket


def close(core: Core, link: StoreLink | None, ticket: Ticket, used_tokens: int) -> None:
    """Ends a ticket; `used_tokens` of its prompt came from the store. What nobody else waits for is called off."""
    if ticket.state is TicketState.CLOSED:
        return
    ended_s = min(ticket.done_s, core.clock.now(), max(ticket.deadline_s, ticket.started_s))
    ticket.state = TicketState.CLOSED
    ticket.call.is_off = True
    if link is None:
        return
    link.tickets.pop(ticket, None)
    saved_s = core.compute.seconds_for(used_tokens) or 0.0
    link.patience.settle(ticket.granted_s, waited_s=ended_s - ticket.started_s, saved_s=saved_s)
    for fetch in ticket.fetches:
        del fetch.watchers[ticket]
        if not fetch.watchers:
            _let_go(core, link, fetch)
    ticket.fetches = []


# ---- asking -----------------------------------------------------------------------------------------


def _may_help(core: Core, link: StoreLink, match: Match) -> bool:
    if link.detached or match.namespace.digest in link.barred or match.restore_tokens >= match.limit_tokens:
        return False
    if not link.breaker.allows(core.clock.now()):
        core.counters.add("prefetch_skipped_store_off")
        return False
    return True


def _boundaries_to_ask(core: Core, match: Match, upto: int) -> list[int]:
    spec = core.spec
    if not spec.needs_checkpoint:
        return []
    first = match.restore_tokens // spec.page_tokens + 1
    tokens = ((page, page * spec.page_tokens) for page in range(first, upto + 1))
    return [page for page, at in tokens if spec.is_legal(at) and spec.needs_checkpoint_at(at)]


def _asked(core: Core, link: StoreLink, ticket: Ticket, boundaries: list[int], outcome: Outcome, took_s: float) -> None:
    found = np.fromiter((fate is Fate.OK for fate in outcome.fates), np.bool_, len(outcome.fates))
    pages = len(ticket.keys) - ticket.first_asked
    ticket.has_page[: ticket.first_asked] = True
    ticket.has_page[ticket.first_asked :] = found[:pages]
    ticket.has_checkpoint[boundaries] = found[pages:]
    if ticket.state is TicketState.ASKING:
        ticket.state = TicketState.FETCHING
        _plan(core, link, ticket)


# ---- deciding ---------------------------------------------------------------------------------------


def _plan(core: Core, link: StoreLink, ticket: Ticket) -> None:
    """Starts what is worth fetching, joins what others fetch already; a ticket with neither is done."""
    match = find(core.tree, ticket.namespace, ticket.packed, ticket.limit_tokens)
    joined = _on_their_way(core, link, match)
    for fetch in joined:
        _watch(fetch, ticket)
    doomed = any(fetch.call.is_off for fetch in joined)  # its pages are about to leave: plan when they have
    if ticket.plans_left and not doomed and not link.detached and match.namespace.digest not in link.barred:
        ticket.plans_left -= 1
        for want in _wants(core, link, ticket, match):
            started = _start(core, link, ticket, match, want)
            if started is not None:
                _watch(started, ticket)
                break
    if all(not fetch.jobs for fetch in ticket.fetches):
        _finish(core, ticket)


def _on_their_way(core: Core, link: StoreLink, match: Match) -> list[Fetch]:
    """Fetches that bring pages or checkpoints of this path already."""
    ids = ids_of(match.path, Tier.HOST, match.known_tokens // core.spec.page_tokens)
    ids = ids[ids != ABSENT]
    filling = ids[core.arena(Tier.HOST).state[Kind.PREFIX][ids] == FILLING].tolist()
    found = dict.fromkeys(link.fetch_of[page] for page in filling if page in link.fetch_of)
    path = set(match.path)
    for fetch in link.fetches:
        if any(not each.ready and each.checkpoint.node in path for each in fetch.residencies):
            found[fetch] = None
    return list(found)


def _wants(core: Core, link: StoreLink, ticket: Ticket, match: Match) -> list[Want]:
    """What could be fetched, best first: the deepest restore point that is worth it, then shallower ones."""
    spec = core.spec
    known, restore = match.known_tokens // spec.page_tokens, match.restore_tokens // spec.page_tokens
    here = {c.page for node in match.path for c in (node.checkpoints or {}).values() if c.page <= known}
    anchored = ticket.has_checkpoint.copy()
    anchored[list(here)] = True
    upto = reachable(known, ticket.has_page)
    points = list(restore_points(spec, above=restore, upto=upto, has_checkpoint=anchored))
    if not points:
        return []
    if points[0] <= known and points[0] in here:
        return []  # all of it is in memory, or on its way there
    wants = []
    for at, point in _spread(points):
        want = _want(core, link, known, point, points[at + 1 :], here)
        if is_worth_it(_fetch_s(core, link, want), core.compute.seconds_for((point - restore) * spec.page_tokens)):
            wants.append(want)
    if not wants:
        core.counters.add("prefetch_not_worth_it")
        if core.clock.now() > link.fetch_bytes.measured_s + REMEASURE_AFTER_S:
            ticket.deadline_s = min(ticket.deadline_s, core.clock.now())  # to measure it again; nobody waits for that
            return [_want(core, link, known, points[0], [], here)]
    return wants


def _spread(points: list[int]) -> list[tuple[int, int]]:
    """A few of the points with their places, the first of them always: candidates in case there is no room for more."""
    step = max(-(-len(points) // MOST_TRIES), 1)
    return list(enumerate(points))[::step]


def _want(core: Core, link: StoreLink, known: int, point: int, shallower: list[int], here: set[int]) -> Want:
    spec = core.spec

    def missing(page: int) -> bool:
        return page not in here and spec.needs_checkpoint_at(page * spec.page_tokens)

    last = (point,) if missing(point) else ()
    size = _bytes(core, Want(known=known, upto=max(point, known), boundaries=last))
    others = [page for page in shallower if missing(page)]
    each = spec.checkpoint_bytes()
    before = fallbacks(others, checkpoint_bytes=each, fetch_bytes=size, share=link.config.fallback_share) if each else []
    return Want(known=known, upto=max(point, known), boundaries=(*before, *last))


def _need(core: Core, want: Want) -> dict[Kind, int]:
    spec = core.spec
    windows = sum(len(spec.window_span(page * spec.page_tokens)) for page in want.boundaries)
    points = len(want.boundaries) if spec.parts(Kind.POINT) else 0
    return {Kind.PREFIX: want.upto - want.known, Kind.WINDOW: windows, Kind.POINT: points}


def _bytes(core: Core, want: Want) -> int:
    strides = core.arena(Tier.HOST).layout.strides
    return sum(count * strides[kind] for kind, count in _need(core, want).items() if count)


def _fetch_s(core: Core, link: StoreLink, want: Want) -> float | None:
    alone = link.fetch_bytes.seconds_for(_bytes(core, want))
    return alone / link.config.readers if alone is not None else None


# ---- fetching ---------------------------------------------------------------------------------------


def _start(core: Core, link: StoreLink, ticket: Ticket, match: Match, want: Want) -> Fetch | None:
    """Takes host pages for exactly what is wanted and sends for them; None, with nothing taken, when there is no room."""
    size = _bytes(core, want)
    if link.held_bytes + size > link.config.host_share * core.arena(Tier.HOST).layout.size_bytes:
        core.counters.add("prefetch_no_room")
        return None
    pages = _allocate(core, match, want)
    if pages is None:
        core.counters.add("prefetch_no_room")
        return None
    fetch = Fetch(want.known, ticket.keys[want.known : want.upto], pages.get(Kind.PREFIX, NO_PAGES))
    fetch.size_bytes = size
    link.fetches[fetch] = None
    path = _enter(core, ticket, want, fetch)
    done = want.known
    for page in dict.fromkeys((*want.boundaries, want.upto)):
        _fetch_pages(core, link, ticket, fetch, done, page)
        done = max(done, page)
        if page in want.boundaries:
            _fetch_checkpoint(core, link, ticket, fetch, path[page], page, pages)
    core.counters.add("prefetch_started")
    return fetch


def _allocate(core: Core, match: Match, want: Want) -> dict[Kind, PageIds] | None:
    """Host pages for a want, without evicting what it stands on."""
    arena = core.arena(Tier.HOST)
    path = ids_of(match.path, Tier.HOST, want.known)
    path = path[path != ABSENT]
    held = [c.held[Tier.HOST] for node in match.path for c in (node.checkpoints or {}).values() if c.page <= want.upto]
    anchors = [residency for residency in held if residency is not None]
    arena.retain(Kind.PREFIX, path)
    for residency in anchors:
        residency.users += 1
    try:
        return allocate(core, Tier.HOST, _need(core, want))
    except NoRoom:
        return None
    finally:
        core.mover.release(Tier.HOST, Kind.PREFIX, path)
        for residency in anchors:
            core.mover.unpin(residency)


def _enter(core: Core, ticket: Ticket, want: Want, fetch: Fetch) -> dict[int, Node]:
    """Puts the pages into the tree, still FILLING; returns the node that each wanted boundary is in."""
    ids = np.concatenate([np.full(want.known, ABSENT, np.int32), fetch.ids])
    use = ticket.request.use(core.clock.now())
    if len(fetch.ids):
        note_expiry(core, core.tree.insert(ticket.namespace.digest, ticket.packed, Tier.HOST, ids, use))
    match = find(core.tree, ticket.namespace, ticket.packed, ticket.limit_tokens)
    for node in match.path:
        if node.start + node.stored >= want.known and node.end <= want.upto:
            node.stored = node.num_pages
    return {page: node for node in match.path for page in want.boundaries if node.start < page <= node.end}


def _fetch_pages(core: Core, link: StoreLink, ticket: Ticket, fetch: Fetch, first: int, upto: int) -> None:
    """Sends for pages `first` .. `upto`, a chunk to an errand."""
    step = max(link.config.fetch_chunk_bytes // core.arena(Tier.HOST).layout.strides[Kind.PREFIX], 1)
    for start in range(first, upto, step):
        end = min(start + step, upto)
        ids = fetch.ids[start - fetch.start : end - fetch.start]
        link.fetch_of.update(dict.fromkeys(ids.tolist(), fetch))
        task = FetchPages(keys=ticket.keys[start:end], ids=ids)

        def replied(outcome: Outcome, took_s: float, start: int = start, ids: PageIds = ids) -> None:
            _pages_came(core, link, fetch, start, ids, outcome, took_s)

        _send(link, ticket, fetch, task, replied, ((Kind.PREFIX, ids),))


def _fetch_checkpoint(
    core: Core, link: StoreLink, ticket: Ticket, fetch: Fetch, node: Node, page: int, pages: dict[Kind, PageIds]
) -> None:
    """Sends for one checkpoint, taking its pages off the front of `pages`."""
    count = len(core.spec.window_span(page * core.spec.page_tokens))
    windows, pages[Kind.WINDOW] = np.split(pages.get(Kind.WINDOW, NO_PAGES), [count])
    points, pages[Kind.POINT] = np.split(pages.get(Kind.POINT, NO_PAGES), [1])
    now = core.clock.now()
    residency = add_residency(core.tree, node, page, Tier.HOST, windows=windows, points=points, ready=False, now=now)
    assert residency is not None, f"the checkpoint at page {page} was fetched although it is there"
    residency.checkpoint.stored = True
    residency.users += 1
    fetch.residencies.append(residency)

    def replied(outcome: Outcome, took_s: float) -> None:
        _checkpoint_came(core, link, fetch, residency, outcome, took_s)

    task = FetchCheckpoint(boundary=ticket.keys[page - 1], windows=windows, points=points)
    _send(link, ticket, fetch, task, replied, ((Kind.WINDOW, windows), (Kind.POINT, points)))
    core.mover.release(Tier.HOST, Kind.WINDOW, windows)  # the tree and the errand hold their own


def _send(
    link: StoreLink, ticket: Ticket, fetch: Fetch, task: FetchPages | FetchCheckpoint,
    on_outcome: Callable[[Outcome, float], None], pages: tuple[tuple[Kind, PageIds], ...],
) -> None:  # fmt: skip
    numbers: list[JobId] = []

    def replied(outcome: Outcome, took_s: float) -> None:
        fetch.jobs.discard(numbers[0])
        on_outcome(outcome, took_s)

    job = link.errands.start(task, ticket.namespace, replied, call=fetch.call, pages=pages)
    numbers.append(job)
    fetch.jobs.add(job)


# ---- arriving ---------------------------------------------------------------------------------------


def _pages_came(core: Core, link: StoreLink, fetch: Fetch, start: int, ids: PageIds, outcome: Outcome, took_s: float) -> None:
    good = np.fromiter((fate is Fate.OK for fate in outcome.fates), np.bool_, len(ids))
    for page in ids.tolist():
        link.fetch_of.pop(page, None)
    arena = core.arena(Tier.HOST)
    arena.mark_ready(Kind.PREFIX, ids[good])
    core.tree.refresh(Tier.HOST, ids[good])
    fetch.arrived[start - fetch.start : start - fetch.start + len(ids)] = good
    _measure(core, link, outcome, took_s)
    core.counters.add("fetched_pages", int(np.count_nonzero(good)))
    core.counters.add("fetched_bytes", outcome.moved_bytes)
    if not good.all():
        arena.mark_dead(Kind.PREFIX, ids[~good])
        first = int(np.flatnonzero(~good)[0])
        for run in core.tree.runs_of(Tier.HOST, ids[~good]):
            run.node.stored = min(run.node.stored, max(start + first - run.node.start, 0))
        discard_ids(core.tree, Tier.HOST, ids[~good], _loss(core, outcome.fates[first]))
        fetch.call.is_off = True  # what comes after it is of no use without it
    for ticket, shared in fetch.watchers.items():
        upto = max(min(start + len(ids), shared), start)
        ticket.from_store[start:upto] = good[: upto - start]
        ticket.has_page[start:upto] &= good[: upto - start]
    _came(core, link, fetch)


def _checkpoint_came(core: Core, link: StoreLink, fetch: Fetch, residency: Residency, outcome: Outcome, took_s: float) -> None:
    arena, (fate,) = core.arena(Tier.HOST), outcome.fates
    page = residency.checkpoint.page
    for kind, ids in residency.spans():
        arena.mark_ready(kind, ids) if fate is Fate.OK else arena.mark_dead(kind, ids)
    _measure(core, link, outcome, took_s)
    if fate is Fate.OK:
        core.counters.add("fetched_checkpoints")
        core.counters.add("fetched_bytes", outcome.moved_bytes)
        residency_arrived(core.tree, residency)
    else:
        residency.checkpoint.stored = False
        drop_residency(core.tree, residency, _loss(core, fate))
        for ticket, shared in fetch.watchers.items():
            if page <= max(shared, fetch.start):
                ticket.has_checkpoint[page] = False
    _came(core, link, fetch)


def _measure(core: Core, link: StoreLink, outcome: Outcome, took_s: float) -> None:
    """Learns how fast the store is, also from those of its answers that came to nothing."""
    link.fetch_bytes.measure(max(outcome.moved_bytes, 1), took_s, core.clock.now())


def _loss(core: Core, fate: Fate) -> Loss:
    reason = LossReason.LATE if fate is Fate.CANCELLED else LossReason.STORE
    return Loss(at_s=core.clock.now(), reason=reason, tier=Tier.STORE, detail=fate.value)


def _came(core: Core, link: StoreLink, fetch: Fetch) -> None:
    """An errand of a fetch has ended: with the last, its tickets are done, or plan again without what failed."""
    if fetch.jobs:
        return
    for ticket in list(fetch.watchers):
        if ticket.state is TicketState.FETCHING and all(not each.jobs for each in ticket.fetches):
            _plan(core, link, ticket)


def _watch(fetch: Fetch, ticket: Ticket) -> None:
    if fetch not in ticket.fetches:
        ticket.fetches.append(fetch)
        shared = fetch.watchers[ticket] = fetch.shared_with(ticket)
        ticket.from_store[fetch.start : shared] |= fetch.arrived[: shared - fetch.start]


def _finish(core: Core, ticket: Ticket) -> None:
    ticket.state = TicketState.DONE
    ticket.done_s = core.clock.now()


def _let_go(core: Core, link: StoreLink, fetch: Fetch) -> None:
    """Nobody waits for a fetch any more: its pages are the tree's alone, and what has not come is called off."""
    fetch.call.is_off = True
    if fetch not in link.fetches:
        return
    del link.fetches[fetch]
    core.mover.release(Tier.HOST, Kind.PREFIX, fetch.ids)
    for residency in fetch.residencies:
        core.mover.unpin(residency)
    fetch.residencies = []
