"""From the store to the host, while a request waits in the queue: query, decide how deep, fetch, and keep what arrived.

    prefetch   queries which pages and checkpoints the store has beyond those in memory
    load       copies arrived pages to the device, while others are still being fetched
    settle     fetches the deepest common restore point that is worth its time and fits (`fetching.py`)
    close      the request begins, or has ended: cancels what no other request waits for

Nothing here waits. A failure is a miss, and the plan is made again without it.
"""

from __future__ import annotations

from functools import partial
from itertools import compress

import numpy as np

from stepwell.base.config import PrefetchPolicy
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import FindItems, ItemStatus, Outcome
from stepwell.policy.store_use import (
    UNMEASURED_SHARE,
    BreakerState,
    Flags,
    fallbacks,
    is_worth_it,
    reachable,
    restore_points,
)
from stepwell.store_tier.fetching import FetchPlan, bytes_of, let_go, note_late, on_their_way, send_for, watch
from stepwell.store_tier.link import StoreLink
from stepwell.store_tier.ticket import Ticket, TicketState
from stepwell.tiers.lease import RequestOptions
from stepwell.tiers.restore import load_ahead
from stepwell.tiers.state import CacheState
from stepwell.tree.feed import EventKind
from stepwell.tree.keys import path_keys
from stepwell.tree.match import Match, find
from stepwell.tree.node import Loss, LossReason

TICKET_HOLD_S = 120.0  # after which an unused ticket is closed, and its pages released: its engine has abandoned it
TICKET_LOOK_S = TICKET_HOLD_S / 16  # between two searches for such tickets: there may be many
MOST_TRIES = 6  # to find a depth that fits into the host tier
REMEASURE_AFTER_S = 60.0  # after which a store that was too slow gets another chance
TRIAL_BYTES = 64 * 2**20  # fetched to measure it, for no request


def prefetch(
    state: CacheState, link: StoreLink | None, match: Match, request: RequestOptions, *, awaited: bool = True
) -> Ticket:  # fmt: skip
    """Opens a ticket for a prompt; queries the store if it could help."""
    if link is None or not _may_help(state, link, match):
        ticket = Ticket(match=match, request=request, clock=state.clock, keys=(), on_exit=partial(close, state, link))
        _finish(state, ticket)
        return ticket
    upto = match.limit_tokens // state.spec.page_tokens
    known = match.known_tokens // state.spec.page_tokens
    root = match.namespace.digest
    keys = path_keys(root, match.path, match.packed, known=known, upto=upto, page_bytes=state.tree.page_bytes)
    state.know(match.namespace)
    ticket = Ticket(
        match=match, request=request, clock=state.clock, keys=keys, on_exit=partial(close, state, link), awaited=awaited
    )  # fmt: skip
    link.tickets[ticket] = None
    if awaited:
        _set_deadline(state, link, ticket, match)
        if ticket.ready and link.config.prefetch is PrefetchPolicy.TIMEOUT:
            _try_again(state, link, match)
    for fetch in on_their_way(state, link, match):
        watch(fetch, ticket)
    ticket.first_asked = known
    boundaries = boundaries_to_ask(state, match, upto)
    task = FindItems(pages=keys[known:], boundaries=tuple(keys[page - 1] for page in boundaries))
    state.counters.add("prefetch_asked")
    link.ops.send(task, match.namespace, partial(_asked, state, link, ticket, boundaries), call=ticket.call)
    return ticket


def settle(state: CacheState, link: StoreLink) -> None:
    """After the store's answers were applied: copies pages on to the device, plans for tickets with news, closes abandoned
    ones.
    """
    link.to_plan |= link.to_plan_later
    link.to_plan_later.clear()
    loading, link.to_load = link.to_load, {}
    for ticket in loading:
        if ticket.awaited and ticket.state is TicketState.FETCHING:
            _load_ahead(state, link, ticket)
    while link.to_plan:
        ticket = next(iter(link.to_plan))
        del link.to_plan[ticket]
        if ticket.state in (TicketState.ASKING, TicketState.FETCHING) and all(not fetch.jobs for fetch in ticket.fetches):
            _plan(state, link, ticket)
    now = state.clock.now()
    for trial in [each for each in link.trials if each.complete]:
        link.trials.remove(trial)
        trial.close()
    if now < link.next_look_s:
        return
    link.next_look_s = now + TICKET_LOOK_S
    for ticket in [each for each in link.tickets if each.ended_s + TICKET_HOLD_S < now]:
        state.counters.add("tickets_forgotten")
        ticket.close()


def close(state: CacheState, link: StoreLink | None, ticket: Ticket, used_tokens: int) -> None:
    """Ends a ticket; `used_tokens` of its prompt came from the store. Cancels what no other request waits for."""
    state.owner.check("Ticket.close")
    now = state.clock.now()
    waited_s = max(min(ticket.ended_s, now) - ticket.started_s, 0.0)
    given_up, finished, asking = ticket.given_up, ticket.complete, ticket.state is TicketState.ASKING
    ticket.state = TicketState.CLOSED
    ticket.call.cancel()
    if link is None or ticket not in link.tickets:
        return  # it never queried the store
    del link.tickets[ticket]
    link.to_plan.pop(ticket, None)
    link.to_plan_later.pop(ticket, None)
    link.to_load.pop(ticket, None)
    if given_up:
        why = f"given up after {waited_s:.2f} s: {_why_given_up(link, ticket)}"
        state.counters.add("prefetch_given_up")
        link.note_given_up(ticket, Loss(at_s=now, reason=LossReason.LATE, tier=Tier.STORE, detail=why))
        for fetch in ticket.fetches:
            note_late(state, link, fetch)
        if asking and waited_s > (link.asking_s or 0.0):
            link.note_asked(waited_s)
    else:
        why = "the request that waited for it has ended"
        if finished:
            link.forget_given_up(ticket)
    still_waiting = asking or any(fetch.jobs for fetch in ticket.fetches)  # else there was no host memory for it, say
    if given_up and waited_s > 0 and not used_tokens and still_waiting and not ticket.from_store.any():
        _note_wait_in_vain(state, link)
    for fetch in ticket.fetches:
        del fetch.watchers[ticket]
        if not fetch.watchers:
            let_go(state, link, fetch, why)
    ticket.fetches = []


# ---- queries and their answers ------------------------------------------------------------------


def _may_help(state: CacheState, link: StoreLink, match: Match) -> bool:
    if link.detached or match.namespace.digest in link.barred or match.restore_tokens >= match.limit_tokens:
        return False
    if not may_run(state, match):
        state.counters.add("prefetch_skipped_too_large")
        return False
    if not link.may_fetch(state.clock.now()):
        state.counters.add("prefetch_skipped_store_off")
        return False
    return True


def may_run(state: CacheState, match: Match) -> bool:
    """Whether the device could ever hold a prompt: otherwise fetching it would evict others for nothing."""
    if not state.has_both_tiers:
        return True
    pages = -(-match.prompt_tokens // state.spec.page_tokens)
    return state.arena(Tier.DEVICE).fits_when_empty({Kind.PREFIX: pages})


def boundaries_to_ask(state: CacheState, match: Match, upto: int) -> list[int]:
    """The boundaries at which a checkpoint in the store would help, up to page `upto`."""
    spec = state.spec
    if not spec.needs_checkpoint:
        return []
    step = spec.boundary_step // spec.page_tokens
    first = match.restore_tokens // spec.page_tokens // step * step + step
    return [page for page in range(first, upto + 1, step) if spec.needs_checkpoint_at(page * spec.page_tokens)]


def _asked(state: CacheState, link: StoreLink, ticket: Ticket, boundaries: list[int], outcome: Outcome, took_s: float) -> None:
    found = np.fromiter((status is ItemStatus.OK for status in outcome.statuses), np.bool_, len(outcome.statuses))
    pages = len(ticket.keys) - ticket.first_asked
    ticket.has_page[: ticket.first_asked] = True
    ticket.has_page[ticket.first_asked :] = found[:pages]
    ticket.has_checkpoint[boundaries] = found[pages:]
    link.note_asked(took_s)
    if state.tree.feeds:
        lacks = [status is ItemStatus.MISSING for status in outcome.statuses]
        state.tree.feeds.store_lacks(EventKind.PAGES_EVICTED, compress(ticket.keys[ticket.first_asked :], lacks))
        ends = [ticket.keys[page - 1] for page in boundaries]
        state.tree.feeds.store_lacks(EventKind.CHECKPOINT_EVICTED, compress(ends, lacks[pages:]))
    if ticket.state is TicketState.ASKING:
        ticket.state = TicketState.FETCHING
        link.to_plan[ticket] = None


def _plan(state: CacheState, link: StoreLink, ticket: Ticket) -> None:
    """Fetches what is worth it, and joins fetches of other requests; a ticket with neither is done."""
    if ticket.state is TicketState.ASKING:
        return  # a joined fetch has ended, but its own query is not answered yet
    match = find(state.tree, ticket.namespace, ticket.packed, ticket.limit_tokens)
    for fetch in on_their_way(state, link, match):
        watch(fetch, ticket)
    if ticket.plans_left and _may_help(state, link, match):
        ticket.plans_left -= 1
        for plan in _fetch_plans(state, link, ticket, match):
            started = send_for(state, link, ticket, match, plan)
            if started is not None:
                watch(started, ticket)
                break
            if ticket in link.to_plan_later:
                ticket.plans_left += 1
                return
    if all(not fetch.jobs for fetch in ticket.fetches):
        _finish(state, ticket)


def _load_ahead(state: CacheState, link: StoreLink, ticket: Ticket) -> None:
    """Overlaps reads from the store with copies to the device, so that the request finds most of its pages there."""
    if not state.has_both_tiers:
        return
    layout = state.arena(Tier.DEVICE).layout
    most = int(link.tuning.device_share * layout.size_bytes) // layout.prefix_stride
    most -= sum(each.num_ahead for each in link.tickets)
    match = find(state.tree, ticket.namespace, ticket.packed, ticket.limit_tokens)
    count = load_ahead(state, match)
    if not count and most > 0:
        count = load_ahead(state, match, evict_for=most)
        ticket.num_ahead += count
    state.counters.add("loaded_ahead_pages", count)


def _finish(state: CacheState, ticket: Ticket) -> None:
    ticket.state = TicketState.DONE
    ticket.done_s = state.clock.now()


# ---- how deep -----------------------------------------------------------------------------------


def _fetch_plans(state: CacheState, link: StoreLink, ticket: Ticket, match: Match) -> list[FetchPlan]:
    """What could be fetched, best first: the deepest restore point that is worth it, then shallower ones."""
    spec, known = state.spec, match.known_tokens // state.spec.page_tokens
    here = _checkpoints_here(state, match)
    points = points_with_store(state, match, ticket.has_page, ticket.has_checkpoint)
    if not points or (points[0] <= known and (points[0] in here or not spec.needs_checkpoint_at(points[0] * spec.page_tokens))):
        return []  # nothing beyond what is in memory, or in flight to it
    found = []
    for at, point in _spread(points):
        plan = _plan_to(state, link, known, point, points[at + 1 :], here)
        if ticket in link.trials:
            if bytes_of(state, plan) <= TRIAL_BYTES or point == points[-1]:
                return [plan]
        elif is_worth_it(_fetch_seconds(link, bytes_of(state, plan)), _compute_seconds(state, link, match, point)):
            found.append(plan)
    if not found:
        state.counters.add("prefetch_not_worth_it")
        _try_again(state, link, match)
    if link.fetching.state is not BreakerState.CLOSED:
        return found[-1:]  # a trial: if it fails again, it must have evicted little
    return found


def points_with_store(state: CacheState, match: Match, has_page: Flags, has_checkpoint: Flags) -> list[int]:
    """Boundaries (in pages), deepest first, that memory and a store with these pages and checkpoints provide together, and memory
    alone does not.
    """
    spec = state.spec
    anchored = has_checkpoint.copy()
    anchored[list(_checkpoints_here(state, match))] = True
    upto = reachable(match.known_tokens // spec.page_tokens, has_page)
    return list(restore_points(spec, above=match.restore_tokens // spec.page_tokens, upto=upto, has_checkpoint=anchored))


def is_expected_to_pay(state: CacheState, link: StoreLink, match: Match, point: int) -> bool:
    """Whether a boundary would be fetched, by the measured speeds of the store and of computing."""
    known = match.known_tokens // state.spec.page_tokens
    plan = _plan_to(state, link, known, point, [], _checkpoints_here(state, match))
    return is_worth_it(_fetch_seconds(link, bytes_of(state, plan)), _compute_seconds(state, link, match, point))


def _checkpoints_here(state: CacheState, match: Match) -> set[int]:
    """Boundaries of the known text that have a checkpoint in memory, or in flight to it."""
    known = match.known_tokens // state.spec.page_tokens
    return {each.page for node in match.path for each in (node.checkpoints or {}).values() if each.page <= known}


def _spread(points: list[int]) -> list[tuple[int, int]]:
    """A few of the points with their indices, always including the first: alternatives if there is no space for more."""
    step = max(-(-len(points) // MOST_TRIES), 1)
    return list(enumerate(points))[::step]


def _plan_to(state: CacheState, link: StoreLink, known: int, point: int, shallower: list[int], here: set[int]) -> FetchPlan:
    spec = state.spec

    def missing(page: int) -> bool:
        return page not in here and spec.needs_checkpoint_at(page * spec.page_tokens)

    last = (point,) if missing(point) else ()
    size = bytes_of(state, FetchPlan(known=known, upto=max(point, known), boundaries=last))
    others = [page for page in shallower if missing(page)]
    each = spec.checkpoint_bytes()
    before = fallbacks(others, checkpoint_bytes=each, fetch_bytes=size, share=link.tuning.fallback_share) if each else []
    return FetchPlan(known=known, upto=max(point, known), boundaries=(*before, *last))


def _fetch_seconds(link: StoreLink, size_bytes: int) -> float | None:
    """The expected time to fetch this much, behind what is in flight; None before the store was measured."""
    return link.fetch_time.seconds(size_bytes + sum(fetch.coming_bytes for fetch in link.fetches))


def _compute_seconds(state: CacheState, link: StoreLink, match: Match, point: int) -> float | None:
    """The expected computing time that a boundary saves, compared with the present restore point."""
    whole_s = link.compute.seconds(match.restore_tokens, match.prompt_tokens)
    rest_s = link.compute.seconds(point * state.spec.page_tokens, match.prompt_tokens)
    return None if whole_s is None or rest_s is None else whole_s - rest_s


def _try_again(state: CacheState, link: StoreLink, match: Match) -> None:
    """Fetches a little for no request, if the store's speed is not known or was measured long ago."""
    if not link.trials and state.clock.now() > link.fetch_time.measured_s + REMEASURE_AFTER_S:
        trial = prefetch(state, link, match, RequestOptions(), awaited=False)
        if not trial.complete:
            link.trials.append(trial)


# ---- how long to wait ---------------------------------------------------------------------------


def _set_deadline(state: CacheState, link: StoreLink, ticket: Ticket, match: Match) -> None:
    """How long the request may wait: forever, not at all, or as long as computing takes if fetching is expected to be faster."""
    if link.config.prefetch is PrefetchPolicy.BEST_EFFORT:
        ticket.deadline_s = ticket.started_s
    elif link.config.prefetch is PrefetchPolicy.TIMEOUT:
        link.learn_reads(state.clock.now())
        known, upto = match.known_tokens // state.spec.page_tokens, len(ticket.keys)
        compute_s = _compute_seconds(state, link, match, upto)
        fetch_s = _fetch_seconds(link, bytes_of(state, FetchPlan(known=known, upto=upto, boundaries=())))
        if compute_s is not None and is_worth_it(None if fetch_s is None else fetch_s + (link.asking_s or 0.0), compute_s):
            most_s = compute_s if fetch_s is not None else UNMEASURED_SHARE * compute_s
            ticket.deadline_s = ticket.started_s + min(most_s, link.config.prefetch_timeout_s)
        else:
            ticket.deadline_s = ticket.started_s


def _note_wait_in_vain(state: CacheState, link: StoreLink) -> None:
    """Records that a request waited as long as it may, and got nothing. After three such waits in a row, requests that still wait
    for a first page go on, and the store is suspended for a while.
    """
    now = state.clock.now()
    if link.fetching.state is BreakerState.TRYING:
        return  # the fetch in flight decides whether the store works again
    link.fetching.asked(now)  # after a cool-off this wait was the trial, though nothing was fetched
    if link.fetching.failed(now):
        state.counters.add("store_fetching_stopped")
        for other in link.tickets:
            if other.awaited and not other.from_store.any():
                other.deadline_s = min(other.deadline_s, now)


def _why_given_up(link: StoreLink, ticket: Ticket) -> str:
    if link.config.prefetch is PrefetchPolicy.BEST_EFFORT:
        return "the prefetch policy is best_effort, which never waits"
    if link.compute.seconds(0, ticket.prompt_tokens) is None:
        return "how fast prompts are computed is not known yet"
    limit_s = ticket.deadline_s - ticket.started_s
    if link.fetching.state is not BreakerState.CLOSED:
        return f"requests have waited for this store in vain ({limit_s:.2f} s)"
    return f"computing is expected to take no longer, or the limit for this prompt is reached ({limit_s:.2f} s)"
