"""What to bring up from a store for a ticket: how deep, with which checkpoints, and is it worth the time. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.ids import Kind, Tier
from stepwell.policy.breaker import BreakerState
from stepwell.policy.fetching import Flags, fallbacks, is_worth_it, reachable, restore_points
from stepwell.store_tier.link import StoreLink
from stepwell.store_tier.ticket import Ticket
from stepwell.tiers.state import CacheState
from stepwell.tree.match import Match

MOST_TRIES = 6  # at finding a depth that fits into the host tier
REMEASURE_AFTER_S = 60.0  # a store that was too slow to be worth it gets another chance


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """Pages `known` .. `upto`, and the checkpoints at `boundaries`, deepest last."""

    known: int
    upto: int
    boundaries: tuple[int, ...]


def fetch_plans(core: CacheState, link: StoreLink, ticket: Ticket, match: Match) -> list[FetchPlan]:
    """What could be fetched, best first: the deepest restore point that is worth it, then shallower ones."""
    spec, now = core.spec, core.clock.now()
    known, restore = match.known_tokens // spec.page_tokens, match.restore_tokens // spec.page_tokens
    here = _checkpoints_here(core, match)
    points = points_with_store(core, match, ticket.has_page, ticket.has_checkpoint)
    if not points or (points[0] <= known and (points[0] in here or not spec.needs_checkpoint_at(points[0] * spec.page_tokens))):
        return []  # nothing beyond what is in memory, or on its way there
    found = []
    for at, point in _spread(points):
        plan = _plan_to(core, link, known, point, points[at + 1 :], here)
        if is_worth_it(fetch_seconds(core, link, plan), link.compute.seconds_for((point - restore) * spec.page_tokens)):
            found.append(plan)
    if not found:
        core.counters.add("prefetch_not_worth_it")
        if now > link.fetch_bytes.measured_s + REMEASURE_AFTER_S:
            ticket.deadline_s = min(ticket.deadline_s, now)  # to measure it again; nobody waits for that
            return [_plan_to(core, link, known, points[-1], [], here)]
    if link.fetching.state is not BreakerState.CLOSED:
        return found[-1:]  # a trial: what it evicts for nothing, should it fail again, is to be little
    return found


def points_with_store(core: CacheState, match: Match, has_page: Flags, has_checkpoint: Flags) -> list[int]:
    """Boundaries (in pages), deepest first, that memory and a store with these pages and checkpoints give together, and memory
    alone does not.
    """
    spec = core.spec
    anchored = has_checkpoint.copy()
    anchored[list(_checkpoints_here(core, match))] = True
    upto = reachable(match.known_tokens // spec.page_tokens, has_page)
    return list(restore_points(spec, above=match.restore_tokens // spec.page_tokens, upto=upto, has_checkpoint=anchored))


def is_expected_to_pay(core: CacheState, link: StoreLink, match: Match, point: int) -> bool:
    """Whether a fetch up to a boundary would be sent for, by how fast the store and computing were so far."""
    known, restore = match.known_tokens // core.spec.page_tokens, match.restore_tokens // core.spec.page_tokens
    plan = _plan_to(core, link, known, point, [], _checkpoints_here(core, match))
    return is_worth_it(fetch_seconds(core, link, plan), link.compute.seconds_for((point - restore) * core.spec.page_tokens))


def boundaries_to_ask(core: CacheState, match: Match, upto: int) -> list[int]:
    """Where a checkpoint in the store would help, up to page `upto`."""
    spec = core.spec
    if not spec.needs_checkpoint:
        return []
    step = spec.boundary_step // spec.page_tokens
    first = match.restore_tokens // spec.page_tokens // step * step + step
    return [page for page in range(first, upto + 1, step) if spec.needs_checkpoint_at(page * spec.page_tokens)]


def need_of(core: CacheState, plan: FetchPlan) -> dict[Kind, int]:
    """The host pages that a plan takes."""
    spec = core.spec
    windows = sum(len(spec.window_span(page * spec.page_tokens)) for page in plan.boundaries)
    points = len(plan.boundaries) if spec.parts(Kind.POINT) else 0
    return {Kind.PREFIX: plan.upto - plan.known, Kind.WINDOW: windows, Kind.POINT: points}


def bytes_of(core: CacheState, plan: FetchPlan) -> int:
    strides = core.arena(Tier.HOST).layout.strides
    return sum(count * strides[kind] for kind, count in need_of(core, plan).items() if count)


def _checkpoints_here(core: CacheState, match: Match) -> set[int]:
    """Boundaries of the known text that have a checkpoint in memory, or on its way there."""
    known = match.known_tokens // core.spec.page_tokens
    return {each.page for node in match.path for each in (node.checkpoints or {}).values() if each.page <= known}


def _spread(points: list[int]) -> list[tuple[int, int]]:
    """A few of the points with their places, the first of them always: candidates in case there is no room for more."""
    step = max(-(-len(points) // MOST_TRIES), 1)
    return list(enumerate(points))[::step]


def _plan_to(core: CacheState, link: StoreLink, known: int, point: int, shallower: list[int], here: set[int]) -> FetchPlan:
    spec = core.spec

    def missing(page: int) -> bool:
        return page not in here and spec.needs_checkpoint_at(page * spec.page_tokens)

    last = (point,) if missing(point) else ()
    size = bytes_of(core, FetchPlan(known=known, upto=max(point, known), boundaries=last))
    others = [page for page in shallower if missing(page)]
    each = spec.checkpoint_bytes()
    before = fallbacks(others, checkpoint_bytes=each, fetch_bytes=size, share=link.tuning.fallback_share) if each else []
    return FetchPlan(known=known, upto=max(point, known), boundaries=(*before, *last))


def fetch_seconds(core: CacheState, link: StoreLink, plan: FetchPlan) -> float | None:
    """How long fetching it takes at the speed seen so far; None where none was."""
    size = bytes_of(core, plan)
    alone = link.fetch_bytes.seconds_for(size)
    ops = -(-size // link.turn_bytes) + len(plan.boundaries)
    return alone / max(min(link.config.readers, ops), 1) if alone is not None else None
