"""Pages and checkpoints being fetched from a store, in the tree as FILLING pages, so that one fetch serves every request.

send_for   allocates host pages for exactly what is wanted, enters them into the tree, starts an operation for every chunk
arriving   pages become READY one by one as they verify; those that fail leave the tree, and fetches of dependents are cancelled
let_go     cancels a fetch without watchers: arrived pages stay in the tree, the others leave it at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from stepwell.base.errors import NoRoom
from stepwell.base.ids import JobId, Kind, Level, Tier
from stepwell.base.prompt import PageKey
from stepwell.base.tasks import NO_PAGES, FetchCheckpoint, FetchPages, ItemStatus, Outcome, PageIds
from stepwell.memory.arena import FILLING
from stepwell.policy.placement import Trigger
from stepwell.store_tier.backup import relevel
from stepwell.store_tier.late import release
from stepwell.store_tier.link import StoreLink
from stepwell.store_tier.ops import Call
from stepwell.store_tier.ticket import Fetch, Ticket
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lifetime import note_expiry
from stepwell.tiers.saving import save_runs
from stepwell.tiers.state import CacheState
from stepwell.tree.checkpoints import add_residency, drop_residency, residency_arrived
from stepwell.tree.feed import EventKind
from stepwell.tree.match import Match, find, ids_of
from stepwell.tree.node import ABSENT, Loss, LossReason, Node, Residency
from stepwell.tree.pruning import discard_ids

MAY_BE_THERE = (ItemStatus.OK, ItemStatus.CANCELLED, ItemStatus.FAILED)  # answers that leave open whether the store has it


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """Pages `known` .. `upto`, and the checkpoints at `boundaries`, deepest last."""

    known: int
    upto: int
    boundaries: tuple[int, ...]


def need_of(state: CacheState, plan: FetchPlan) -> dict[Kind, int]:
    """The host pages that a plan takes."""
    spec = state.spec
    windows = sum(len(spec.window_span(page * spec.page_tokens)) for page in plan.boundaries)
    points = len(plan.boundaries) if spec.parts(Kind.POINT) else 0
    return {Kind.PREFIX: plan.upto - plan.known, Kind.WINDOW: windows, Kind.POINT: points}


def bytes_of(state: CacheState, plan: FetchPlan) -> int:
    strides = state.arena(Tier.HOST).layout.strides
    return sum(count * strides[kind] for kind, count in need_of(state, plan).items() if count)


def on_their_way(state: CacheState, link: StoreLink, match: Match) -> list[Fetch]:
    """Fetches in flight that bring pages or checkpoints of this path."""
    if not link.fetches and not link.fetch_of:
        return []
    ids = ids_of(match.path, Tier.HOST, match.known_tokens // state.spec.page_tokens)
    ids = ids[ids != ABSENT]
    filling = ids[state.arena(Tier.HOST).state[Kind.PREFIX][ids] == FILLING].tolist()
    found = dict.fromkeys(link.fetch_of[page] for page in filling if page in link.fetch_of)
    path, known = set(match.path), match.known_tokens // state.spec.page_tokens
    for fetch in link.fetches:
        coming = (each.checkpoint for each in fetch.residencies if not each.ready)
        if any(each.node in path and each.page <= known for each in coming):  # the last node may go on beyond the prompt
            found[fetch] = None
    return list(found)


def watch(fetch: Fetch, ticket: Ticket) -> None:
    """Connects a ticket to a fetch: the ticket waits for it, and the fetch continues for the ticket."""
    if fetch not in ticket.fetches:
        ticket.fetches.append(fetch)
        shared = fetch.watchers[ticket] = fetch.shared_with(ticket)
        ticket.from_store[fetch.start : shared] |= fetch.arrived[: shared - fetch.start]


def send_for(state: CacheState, link: StoreLink, ticket: Ticket, match: Match, plan: FetchPlan) -> Fetch | None:
    """Allocates host pages for exactly what is wanted and fetches it; None, with nothing allocated, if there is no space."""
    size = bytes_of(state, plan)
    largest_bytes = max((fetch.size_bytes for fetch in link.fetches), default=0)
    host_bytes = state.arena(Tier.HOST).layout.size_bytes
    most = link.tuning.fetch_capacity_bytes(host_bytes, held_bytes=link.held_bytes, largest_bytes=largest_bytes)
    if link.is_late:  # space is freed by storing other content: not in its place
        ends = tuple(ticket.keys[page - 1] for page in plan.boundaries)
        last = ticket.keys[plan.upto - 1 : plan.upto] if not ends else ()
        relevel(link, ticket.namespace, Level.NORMAL, pages=last, boundaries=ends)
    pages = None
    try:
        pages = _allocate(state, match, plan) if size <= most else None
    except NoRoom as refusal:
        if refusal.waiting and ticket.tries_left:
            ticket.tries_left -= 1
            link.to_plan_later[ticket] = None
            return None
    if pages is None:
        state.counters.add("prefetch_no_room")
        return None
    if find(state.tree, ticket.namespace, ticket.packed, ticket.limit_tokens).known_tokens != match.known_tokens:
        for kind, ids in pages.items():  # freeing space evicted the path itself; the next plan starts from what remains
            state.tree.release(Tier.HOST, kind, ids)
        return None
    link.fetching.asked(state.clock.now())
    fetch = Fetch(ticket.namespace, plan.known, ticket.keys[plan.known : plan.upto], pages.get(Kind.PREFIX, NO_PAGES))
    fetch.size_bytes, fetch.sent_s = size, state.clock.now()
    link.fetches[fetch] = None
    nodes = _enter(state, link, ticket, plan, fetch)
    done = plan.known
    for page in dict.fromkeys((*plan.boundaries, plan.upto)):
        _send_for_pages(state, link, ticket, fetch, done, page)
        done = max(done, page)
        if page in nodes:
            _send_for_checkpoint(state, link, ticket, fetch, nodes[page], page, pages)
    if link.is_late:
        superseded = np.flatnonzero(ticket.has_checkpoint[: plan.upto]).tolist()
        release(link, ticket.namespace, boundaries=tuple(ticket.keys[page - 1] for page in superseded if page))
    state.counters.add("prefetch_started")
    return fetch


def let_go(state: CacheState, link: StoreLink, fetch: Fetch, why: str) -> None:
    """Cancels a fetch that no request waits for, because of `why`: what has arrived belongs to the tree alone.

    What has not arrived leaves the tree at once, so that no request waits for it; operations keep their references.
    """
    if fetch not in link.fetches:
        return
    del link.fetches[fetch]
    for call in fetch.calls.values():
        call.cancel()
    late = Loss(at_s=state.clock.now(), reason=LossReason.LATE, tier=Tier.STORE, detail=why)
    for residency in fetch.residencies:
        state.tree.unpin(residency)
        if not residency.ready:
            link.beliefs.remove(residency.checkpoint)
            drop_residency(state.tree, residency, late)
    page_states = state.arena(Tier.HOST).state[Kind.PREFIX]
    discard_ids(state.tree, Tier.HOST, fetch.ids[page_states[fetch.ids] == FILLING], late)
    fetch.residencies = []
    state.tree.release(Tier.HOST, Kind.PREFIX, fetch.ids)


def _allocate(state: CacheState, match: Match, plan: FetchPlan) -> dict[Kind, PageIds]:
    """Host pages for a plan, without evicting what it depends on. Dependencies that only the device has are saved first, unless
    they will be when they leave it.

    Raises NoRoom.
    """
    if state.has_both_tiers and state.write_back is None and match.path and plan.known:
        save_runs(state, match.path[-1])
    arena = state.arena(Tier.HOST)
    path = ids_of(match.path, Tier.HOST, plan.known)
    path = path[path != ABSENT]
    held = [c.residencies[Tier.HOST] for node in match.path for c in (node.checkpoints or {}).values() if c.page <= plan.upto]
    anchors = [residency for residency in held if residency is not None]
    arena.retain(Kind.PREFIX, path)
    for residency in anchors:
        state.tree.pin(residency)
    try:
        return allocate(state, Tier.HOST, need_of(state, plan), tenant=match.namespace.tenant)
    finally:
        state.tree.release(Tier.HOST, Kind.PREFIX, path)
        for residency in anchors:
            state.tree.unpin(residency)


def _enter(state: CacheState, link: StoreLink, ticket: Ticket, plan: FetchPlan, fetch: Fetch) -> dict[int, Node]:
    """Enters the pages into the tree, still FILLING; returns the node of each wanted boundary."""
    ids = np.concatenate([np.full(plan.known, ABSENT, np.int32), fetch.ids])
    use = ticket.request.use(state.clock.now())
    if len(fetch.ids):
        note_expiry(state, state.tree.insert(ticket.namespace, ticket.packed, Tier.HOST, ids, use))
        state.know(ticket.namespace)
    match = find(state.tree, ticket.namespace, ticket.packed, ticket.limit_tokens)
    for node in match.path if not link.is_late else ():
        if node.start + link.beliefs.pages(node) >= plan.known and node.end <= plan.upto:
            link.beliefs.set_pages(node, node.num_pages)
    return {page: node for node in match.path for page in plan.boundaries if node.start < page <= node.end}


def _send_for_pages(state: CacheState, link: StoreLink, ticket: Ticket, fetch: Fetch, first: int, upto: int) -> None:
    """Fetches pages `first` .. `upto`, one chunk for each operation."""
    step = max(link.turn_bytes // state.arena(Tier.HOST).layout.strides[Kind.PREFIX], 1)
    for start in range(first, upto, step):
        end = min(start + step, upto)
        ids = fetch.ids[start - fetch.start : end - fetch.start]
        link.fetch_of.update(dict.fromkeys(ids.tolist(), fetch))
        task = FetchPages(keys=ticket.keys[start:end], ids=ids)
        came = partial(_pages_came, state, link, fetch, start, task)
        _send(state, link, ticket, fetch, start, task, came, ((Kind.PREFIX, ids),))


def _send_for_checkpoint(
    state: CacheState, link: StoreLink, ticket: Ticket, fetch: Fetch, node: Node, page: int, pages: dict[Kind, PageIds]
) -> None:
    """Fetches one checkpoint, taking its pages from the front of `pages`."""
    count = len(state.spec.window_span(page * state.spec.page_tokens))
    windows, pages[Kind.WINDOW] = np.split(pages.get(Kind.WINDOW, NO_PAGES), [count])
    points, pages[Kind.POINT] = np.split(pages.get(Kind.POINT, NO_PAGES), [1])
    now = state.clock.now()
    residency = add_residency(state.tree, node, page, Tier.HOST, windows=windows, points=points, ready=False, now=now)
    assert residency is not None, f"the checkpoint at page {page} was fetched although it exists"
    residency.checkpoint.trigger = residency.checkpoint.trigger or Trigger.STORE
    if not link.is_late:
        link.beliefs.add(residency.checkpoint)
    state.tree.pin(residency)
    fetch.residencies.append(residency)
    task = FetchCheckpoint(boundary=ticket.keys[page - 1], windows=windows, points=points)
    came = partial(_checkpoint_came, state, link, fetch, residency, task)
    _send(state, link, ticket, fetch, page, task, came, ((Kind.WINDOW, windows), (Kind.POINT, points)))
    state.tree.release(Tier.HOST, Kind.WINDOW, windows)  # the tree and the operation have references


def _send(
    state: CacheState, link: StoreLink, ticket: Ticket, fetch: Fetch, at: int, task: FetchPages | FetchCheckpoint,
    on_outcome: Callable[[Outcome], None], pages: tuple[tuple[Kind, PageIds], ...],
) -> None:  # fmt: skip
    """Starts one operation of a fetch; `at` is its page, or its boundary."""
    numbers: list[JobId] = []

    def came(outcome: Outcome, took_s: float) -> None:
        fetch.jobs.discard(numbers[0])
        del fetch.calls[numbers[0]]
        on_outcome(outcome)
        fetch.took_s.append(took_s)
        if not fetch.jobs:
            if fetch in link.fetches:
                _measure(state, link, fetch)
            link.to_plan.update(dict.fromkeys(fetch.watchers))  # they are done, or plan again without what failed

    call = Call(at)
    numbers.append(link.ops.send(task, ticket.namespace, came, call=call, pages=pages))
    fetch.jobs.add(numbers[0])
    fetch.calls[numbers[0]] = call


def _pages_came(state: CacheState, link: StoreLink, fetch: Fetch, start: int, task: FetchPages, outcome: Outcome) -> None:
    ids = task.ids
    good = np.fromiter((status is ItemStatus.OK for status in outcome.statuses), np.bool_, len(ids))
    known_bad = np.fromiter(
        (status not in (ItemStatus.OK, ItemStatus.CANCELLED) for status in outcome.statuses), np.bool_, len(ids)
    )
    for page in ids.tolist():
        link.fetch_of.pop(page, None)
    arena = state.arena(Tier.HOST)
    state.tree.refresh(Tier.HOST, arena.mark_ready(Kind.PREFIX, ids[good]))
    fetch.arrived[start - fetch.start : start - fetch.start + len(ids)] = good
    _learn(state, link, fetch, outcome)
    state.counters.add("fetched_pages", int(np.count_nonzero(good)))
    state.counters.add("fetched_bytes", outcome.moved_bytes)
    if link.is_late:
        release(link, fetch.namespace, pages=task.keys)
    if not good.all():
        _tell_gone(state, EventKind.PAGES_EVICTED, task.keys, outcome)
        first = int(np.flatnonzero(~good)[0])
        arena.mark_dead(Kind.PREFIX, ids[~good])
        _give_up(state, link, fetch, start + first, ids[~good], _loss(state, outcome.statuses[first]))
    for ticket, shared in fetch.watchers.items():
        upto = max(min(start + len(ids), shared), start)
        ticket.from_store[start:upto] = good[: upto - start]
        ticket.has_page[start:upto] &= ~known_bad[: upto - start]
        link.to_load[ticket] = None


def _give_up(state: CacheState, link: StoreLink, fetch: Fetch, page: int, ids: PageIds, loss: Loss) -> None:
    """Removes pages that did not arrive from the tree, the first of them `page`, and cancels fetches of their dependents."""
    for run in state.tree.runs_of(Tier.HOST, ids):
        link.beliefs.set_pages(run.node, min(link.beliefs.pages(run.node), page - run.node.start))
    discard_ids(state.tree, Tier.HOST, ids, loss)
    for call in fetch.calls.values():
        if call.page > page:
            call.cancel()


def _checkpoint_came(
    state: CacheState, link: StoreLink, fetch: Fetch, residency: Residency, task: FetchCheckpoint, outcome: Outcome
) -> None:
    arena, (status,), page = state.arena(Tier.HOST), outcome.statuses, residency.checkpoint.page
    for kind, ids in residency.spans():
        arena.mark_ready(kind, ids) if status is ItemStatus.OK else arena.mark_dead(kind, ids)
    _learn(state, link, fetch, outcome)
    if status is ItemStatus.OK:
        state.counters.add("fetched_checkpoints")
        state.counters.add("fetched_bytes", outcome.moved_bytes)
        residency_arrived(state.tree, residency)
        if link.is_late:
            release(link, fetch.namespace, boundaries=(task.boundary,))
        return
    _tell_gone(state, EventKind.CHECKPOINT_EVICTED, (task.boundary,), outcome)
    link.beliefs.remove(residency.checkpoint)
    drop_residency(state.tree, residency, _loss(state, status))
    for ticket in fetch.watchers if status is not ItemStatus.CANCELLED else ():
        if ticket.keys[page - 1 : page] == (task.boundary,):  # others share less of the path, or are shorter
            ticket.has_checkpoint[page] = False


def _tell_gone(state: CacheState, kind: EventKind, keys: Iterable[PageKey], outcome: Outcome) -> None:
    """Reports to listeners what the store turned out not to have, or not intact."""
    if state.tree.feeds:
        state.tree.feeds.store(
            kind, [key for key, status in zip(keys, outcome.statuses, strict=True) if status not in MAY_BE_THERE]
        )


def _measure(state: CacheState, link: StoreLink, fetch: Fetch) -> None:
    """Measures the time of a fetch whose operations were all answered, without waiting in the queue behind others."""
    seconds = max(max(fetch.took_s), sum(fetch.took_s) / link.config.readers)
    if fetch.moved_bytes or link.fetch_time.is_known:  # one bad value does not mean that all reads are slow
        link.fetch_time.measure(fetch.moved_bytes or fetch.size_bytes, seconds, state.clock.now())


def note_late(state: CacheState, link: StoreLink, fetch: Fetch) -> None:
    """Records an abandoned fetch as slower than expected: at least as long as extrapolated from what has arrived."""
    if next(iter(link.fetches), None) is not fetch or not fetch.jobs:
        return  # it waited in the queue behind others
    now = state.clock.now()
    seconds = (now - fetch.sent_s) * fetch.size_bytes / (fetch.moved_bytes or fetch.size_bytes)
    if seconds > (link.fetch_time.seconds(fetch.size_bytes) or 0.0):
        link.fetch_time.measure(fetch.size_bytes, seconds, now)


def _learn(state: CacheState, link: StoreLink, fetch: Fetch, outcome: Outcome) -> None:
    """Records whether what the store claims to have is usable."""
    now = state.clock.now()
    if ItemStatus.OK in outcome.statuses:
        fetch.moved_bytes += outcome.moved_bytes
        link.fetching.succeeded()
    elif ItemStatus.CANCELLED in outcome.statuses:
        link.fetching.undecided()
    else:
        if link.fetching.failed(now):
            state.counters.add("store_fetching_stopped")


def _loss(state: CacheState, status: ItemStatus) -> Loss:
    reason = LossReason.LATE if status is ItemStatus.CANCELLED else LossReason.STORE
    return Loss(at_s=state.clock.now(), reason=reason, tier=Tier.STORE, detail=status.value)
