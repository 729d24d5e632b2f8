"""Frees space in a tier by evicting the least valuable content, one victim at a time, until the need fits.

Never waits. A victim may have to be saved first: its space becomes free later, and the caller must retry after the next `step()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from stepwell.base.errors import NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import Need
from stepwell.memory.layout import ArenaLayout
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tree.accounts import Account
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.eviction_order import USEFUL
from stepwell.tree.node import Loss, LossReason, Residency, Run, Victim
from stepwell.tree.pruning import discard_ids, discard_suffix

PATIENCE_SLABS, PATIENCE_SHARE = 8, 1 / 16  # of the tier: see `patience_bytes_of`
PREFIX, WINDOW, POINT, ROWS = Kind  # access to a member of an enum is slow before Python 3.12
SAVED_AHEAD = 1 / 16  # of the tier, under `exclusive`: see `_is_coming`
SAVED_AT_ONCE = 1 / 32  # of the device at least: small copies cost more than a little repetition
LEAST_PAGES = 8  # of a run that are saved at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionResult:
    """The result of an attempt to free space."""

    fits: bool
    waiting: bool


def allocate(
    state: CacheState, tier: Tier, need: Need, *, tenant: str | None = None, may_spill: bool = True
) -> dict[Kind, PageIds]:  # fmt: skip
    """Allocates FILLING pages, evicting as needed; or raises NoRoom and allocates none.

    `tenant` is the tenant they are for: if it then exceeds its quota, its own content is evicted first. It is never refused for
    that. Cold content evicted on the way stays evicted. With `may_spill`, rows of running requests leave the device last.
    """
    state.give_back_host()
    arena = state.arena(tier)
    need = {kind: count for kind, count in need.items() if count}
    pages = arena.alloc_if_fits(need)
    if pages is not None:
        return pages
    if tier is Tier.HOST and not arena.could_fit(need):
        _drop_idle_backed(state)
    if not arena.could_fit(need, may_spill=may_spill) or not arena.fits_when_empty(need):
        # Even evicting everything would not suffice: evict nothing.
        coming = _is_saving(state, tier) or _may_be_shed_soon(state, tier, may_spill)
        raise NoRoom(_why(state, tier, need), waiting=arena.fits_when_empty(need) and coming)
    result = make_room(state, tier, need, tenant=tenant, may_spill=may_spill)
    if not result.fits:
        raise NoRoom(_why(state, tier, need), waiting=result.waiting)
    return arena.alloc(need)


def make_room(state: CacheState, tier: Tier, need: Need, *, tenant: str | None = None, may_spill: bool = True) -> EvictionResult:
    """Evicts from `tier` until `need` fits, or nothing more can be evicted, or enough is being saved to fit afterwards."""
    state.give_back_host()
    if not state.tree.ranking.freeze_time(tier):
        return _make_room(state, tier, need, tenant, may_spill)
    try:
        return _make_room(state, tier, need, tenant, may_spill)
    finally:
        state.tree.ranking.unfreeze_time(tier)


def _make_room(state: CacheState, tier: Tier, need: Need, tenant: str | None, may_spill: bool) -> EvictionResult:
    spill = state.spill if may_spill and tier is Tier.DEVICE else None
    arena, asker = state.arena(tier), _asker(state, tier, need, tenant) if tenant is not None else None
    waiting, save = _is_saving(state, tier), _saver(state, tier)
    held_bytes = _held_below(state, tier)
    patience_bytes = patience_bytes_of(arena.layout)
    in_vain = 0  # bytes evicted of kinds that are not short; they help only once a whole slab is empty
    while short := arena.shortage(need):
        if waiting and (_is_coming(state, tier, short) or _is_held(state, tier, short, held_bytes)):
            break
        patient = in_vain < patience_bytes
        victim, excess_bytes = _choose(state, tier, short, asker, any_sort=patient)
        if victim is None and not patient:
            victim, excess_bytes = _choose(state, tier, short, asker, any_sort=True)
        if victim is None:
            # Last resorts, not while saves are in progress: reserved slabs are rarely enough, and would be used in vain.
            if not waiting and (arena.unreserve() or (spill is not None and spill(need))):
                continue
            if not waiting and ((tier is Tier.HOST and _drop_idle_backed(state)) or _cut_off(state, tier)):
                continue
            waiting = waiting or _may_be_shed_soon(state, tier, may_spill)
            break
        if save is not None and not victim.unsaved:
            if tier is Tier.DEVICE and isinstance(victim, Run):
                victim = _cut_end(state, victim, _wanted(state, victim, short, excess_bytes))
            leaving = save(victim)
            if leaving is Leaving.BLOCKED:
                state.tree.ranking.queue(victim)
                waiting = True
                break
            if leaving is not Leaving.NOW:
                waiting = True  # for its copy to end
                if leaving is Leaving.AT_ONCE and isinstance(victim, Residency):
                    _leave(state, victim, excess_bytes)
                continue
        if isinstance(victim, Run):
            freed, helps = _evict_run(state, victim, short, excess_bytes), _needs_runs(short)
        else:
            freed, helps = _evict_residency(state, victim, excess_bytes), any(kind in short for kind, _ in victim.spans())
        if not helps and victim.standing == USEFUL:
            in_vain += freed
    return EvictionResult(fits=not short, waiting=waiting)


def _cut_end(state: CacheState, run: Run, wanted: int) -> Run:
    """The end of a device run that must be saved now: what is wanted, and some more. A copy of the rest would be redundant until
    it must be evicted too. Not cut if a request uses its beginning, because a request refers to the node as it is.
    """
    node, host, arena = run.node, run.node.runs[Tier.HOST], state.arena(Tier.DEVICE)
    layout, is_used = arena.layout, bool(arena.refs[Kind.PREFIX][run.ids[0]] > 1)
    most = max(wanted, int(SAVED_AT_ONCE * layout.size_bytes) // layout.prefix_stride, LEAST_PAGES)
    missing = node.num_pages - (host.num_pages if host is not None else 0)
    if is_used or run.num_pages < node.num_pages or missing <= most + most // 4:
        return run
    state.tree.split(node, node.num_pages - most)
    end = node.runs[Tier.DEVICE]
    assert end is not None, f"{node} has no pages left where {run} had some"
    state.tree.ranking.unqueue_for_now(end)
    return end


def next_to_leave(state: CacheState, tier: Tier, size_bytes: int) -> list[Victim]:
    """The first `size_bytes` of a tier in the order of eviction: of tenants over their quota, then of all. Evicts nothing."""
    found: list[Victim] = []
    seen_bytes = 0
    while seen_bytes < size_bytes and (victim := _choose(state, tier, {}, None, any_sort=True)[0]) is not None:
        found.append(victim)
        seen_bytes += bytes_of(state, victim)
    for victim in found:
        state.tree.ranking.queue(victim)
    return found


def bytes_of(state: CacheState, victim: Victim) -> int:
    """The bytes that a victim takes up in its tier."""
    if isinstance(victim, Residency):
        return victim.size_bytes
    return victim.num_pages * state.arena(victim.tier).layout.prefix_stride


def _saver(state: CacheState, tier: Tier) -> Callable[[Victim], Leaving] | None:
    """The function that starts saving a victim of a tier to the one below, if there is one."""
    if tier is Tier.HOST:
        return state.below.before_eviction if state.below is not None else None
    return partial(state.write_back, state) if state.write_back is not None else None


def _is_saving(state: CacheState, tier: Tier) -> bool:
    """Whether space is being freed since an earlier call."""
    return state.write_back is not None and state.copies.saving_bytes(tier) > 0


def _may_be_shed_soon(state: CacheState, tier: Tier, may_spill: bool) -> bool:
    """Whether rows are being saved, so that they may leave the device afterwards."""
    return may_spill and state.spill is not None and tier is Tier.DEVICE and state.copies.saving_bytes(tier) > 0


def _is_coming(state: CacheState, tier: Tier, short: Need) -> bool:
    """Whether enough is being saved for what is short, and some more, so that not every request has to wait."""
    layout = state.arena(tier).layout
    short_bytes = sum(count * layout.strides[kind] for kind, count in short.items())
    return state.copies.saving_bytes(tier) >= short_bytes + SAVED_AHEAD * layout.size_bytes


def _held_below(state: CacheState, tier: Tier) -> int:
    """Bytes of the tier that a copy to the tier below still reads."""
    return state.below.putting_bytes if tier is Tier.HOST and state.below is not None else 0


def _is_held(state: CacheState, tier: Tier, short: Need, before_bytes: int) -> bool:
    """Whether enough for what is short was sent to the tier below since then, and will be free when it has arrived."""
    sent_bytes = _held_below(state, tier) - before_bytes
    return sent_bytes > 0 and sent_bytes >= sum(count * state.arena(tier).layout.strides[kind] for kind, count in short.items())


def _cut_off(state: CacheState, tier: Tier) -> bool:
    """The last resort: evicts pages on which those of the other tier depend, and those with them. False if there are none.

    Such pages are rare: they exist if a copy in the middle of a run failed, for example.
    """
    found = state.tree.ranking.pop_required_by_other_tier(tier)
    if found is None:
        return False
    run, tail = found
    state.counters.add("evicted_cut_off")
    discard_suffix(state.tree, run, tail.start, state.loss(LossReason.EVICTED, tier))
    return True


def _drop_idle_backed(state: CacheState) -> bool:
    """Evicts idle device pages whose rows only the host has, so that the host may evict these. False if there are none.

    They are complete on the host, and stay in the tree.
    """
    row_pages = state.row_pages
    if row_pages is None or not row_pages.num_backed:
        return False
    idle = row_pages.idle_backed()
    idle = idle[[owner is not None for owner in state.tree.owner[Tier.HOST][row_pages.host[idle]]]]
    discard_ids(state.tree, Tier.DEVICE, idle, state.loss(LossReason.EVICTED, Tier.DEVICE))
    state.counters.add("evicted_device_pages", len(idle))
    state.give_back_host()
    return len(idle) > 0


class _Asker(NamedTuple):
    """The tenant that needs space and has a quota, and its excess afterwards."""

    account: Account
    coming_bytes: int


def _asker(state: CacheState, tier: Tier, need: Need, tenant: str) -> _Asker | None:
    account = state.tree.accounts.limited.get(tenant)
    if account is None:
        return None
    strides = state.arena(tier).layout.strides
    return _Asker(account, sum(count * strides[kind] for kind, count in need.items()))


def _choose(
    state: CacheState, tier: Tier, short: Need, asker: _Asker | None, *, any_sort: bool
) -> tuple[Victim | None, int | None]:  # fmt: skip
    """Takes the next victim out of the order: of a tenant over its quota, else the least valuable of all.

    Also returns by how many bytes its tenant exceeds its quota, None if that is not the reason.
    """
    runs = any_sort or _needs_runs(short)
    checkpoints = any_sort or WINDOW in short or POINT in short
    ranking, over = state.tree.ranking, state.tree.accounts.are_over[tier]
    if asker is not None or over:
        first, coming_bytes = asker or (None, 0)  # a tenant that would exceed its quota loses its content before all others
        if first is not None and first.excess_bytes(tier, coming_bytes):
            over = {first: None, **over}
        for account in ranking.own.having(over, tier, runs=runs, checkpoints=checkpoints):
            victim = ranking.pop(tier, runs=runs, checkpoints=checkpoints, of=account)
            if victim is not None:
                return victim, account.excess_bytes(tier, coming_bytes if account is first else 0)
    return ranking.pop(tier, runs=runs, checkpoints=checkpoints), None


def patience_bytes_of(layout: ArenaLayout) -> int:
    """How much may be evicted in vain to keep to the order, before the kind that is short is evicted out of turn.

    With one slab's worth, a trace of agents loses hits: checkpoints are then evicted long before older prefix pages.
    """
    return max(layout.slab_bytes, min(PATIENCE_SLABS * layout.slab_bytes, int(PATIENCE_SHARE * layout.size_bytes)))


def _needs_runs(short: Need) -> bool:
    """Whether each page of a run counts."""
    return PREFIX in short or ROWS in short


def _evict_run(state: CacheState, run: Run, short: Need, excess_bytes: int | None) -> int:
    """Evicts the idle end of a run, no more of it than needed; returns the bytes freed."""
    ranking = state.tree.ranking
    tail = ranking.suffixes.of(run)
    if tail is None:  # it could not be saved, and host pages depend on it
        ranking.queue_run(run)
        return 0
    idle = ranking.suffixes.idle(run, tail.start, at_most=_wanted(state, run, short, excess_bytes))
    if not idle.num_pages:
        return 0  # in use; it is queued again when it is released
    discard_suffix(state.tree, run, idle.start, _loss(state, run.tier, excess_bytes))
    _count(state, run.tier, "pages", idle.num_pages, excess_bytes)
    return idle.num_pages * state.arena(run.tier).layout.prefix_stride


def _wanted(state: CacheState, run: Run, short: Need, excess_bytes: int | None) -> int:
    """How many pages of a run to evict: what is short, or a whole slab if a slab is needed."""
    layout = state.arena(run.tier).layout
    wanted = max(short.get(PREFIX, 0), short.get(ROWS, 0)) or -(-layout.slab_bytes // layout.strides[PREFIX])
    return wanted if excess_bytes is None else min(wanted, -(-excess_bytes // layout.prefix_stride))


def _evict_residency(state: CacheState, residency: Residency, excess_bytes: int | None) -> int:
    if residency.users or not residency.ready:
        return 0  # being read or still arriving; it is queued again when that ends
    _leave(state, residency, excess_bytes)
    return residency.size_bytes


def _leave(state: CacheState, residency: Residency, excess_bytes: int | None) -> None:
    drop_residency(state.tree, residency, _loss(state, residency.tier, excess_bytes))
    _count(state, residency.tier, "checkpoints", 1, excess_bytes)


def _loss(state: CacheState, tier: Tier, excess_bytes: int | None) -> Loss:
    return state.loss(LossReason.EVICTED if excess_bytes is None else LossReason.OVER_QUOTA, tier)


def _count(state: CacheState, tier: Tier, what: str, count: int, excess_bytes: int | None) -> None:
    state.counters.add(f"evicted_{tier.label}_{what}", count)
    if excess_bytes is not None:
        state.counters.add(f"over_quota_{tier.label}_{what}", count)


def _why(state: CacheState, tier: Tier, need: Need) -> str:
    arena = state.arena(tier)
    wanted = " + ".join(f"{count} {kind.label} page(s)" for kind, count in need.items())
    size = sum(count * arena.layout.strides[kind] for kind, count in need.items())
    if not arena.fits_when_empty(need):
        return (
            f"{wanted} ({size} bytes) can never fit into the {tier.label} tier of {arena.layout.size_bytes} bytes; make it larger"
        )
    return f"no space in the {tier.label} tier for {wanted} ({size} bytes): the rest is in use; release a lease or wait"
