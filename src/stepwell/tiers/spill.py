"""Rows of running requests leave the device when nothing idle is left to evict: the host has them already, and keeps them.

    a request's pages   |== shed, from the front ==|== resident ==|= last full page =|= being written =|
    rows of the first   become its hot pages; those of the others are freed

Shed rows are read from the host, or from hot pages, into which passes copy rows that they read often. They are never restored to
stay. Only pages that the tree has and whose host page can be read are spilled; private pages of a request are not.
Decides and records; copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.arena import READY, Need
from stepwell.memory.row_pages import RowPages
from stepwell.tiers.lease import Lease
from stepwell.tiers.state import CacheState
from stepwell.tree.node import ABSENT

TAIL_PAGES = 2  # that stay: the last full one, and the one that is being written
LEAST_SHED = 8  # pages at a time: to find them costs as much as to shed some more
ALONE = 2  # references to a page that only one request uses: its own and the tree's


def hot_pages_of(state: CacheState) -> int:
    """The maximum number of hot pages of a request whose rows are partly on the host alone; never more than it has such pages."""
    return -(-state.config.hot_rows // state.spec.page_tokens)


def hot_missing(state: CacheState, lease: Lease) -> int:
    """How many ROWS pages a lease should get before its next pass: it works without them, but slowly."""
    row_pages = state.row_pages
    if row_pages is None or not row_pages.num_backed:
        return 0
    if not (allowed := _hot_allowed(state, lease)):
        return 0
    away = int(np.count_nonzero(row_pages.backed(lease.prefix_pages)))
    return min(allowed, max(away - len(lease.hot_pages), 0))


def assign_hot(state: CacheState, lease: Lease, rows: PageIds) -> None:
    """Makes ROWS pages hot pages of a lease. Takes over the caller's reference to each; surplus pages are released."""
    row_pages = state.row_pages
    assert row_pages is not None
    wanted = _hot_allowed(state, lease)
    state.tree.release(Tier.DEVICE, Kind.ROWS, rows[wanted:])
    numbers = row_pages.assign_hot(rows[:wanted])
    lease.hot_pages = np.concatenate([lease.hot_pages, rows[:wanted]])
    lease.hot_numbers = np.concatenate([lease.hot_numbers, numbers])


@dataclass(slots=True, kw_only=True, eq=False)
class _Sheddable:
    """What one lease could shed now: indices of its pages, the host pages that have them too, and which it does not share."""

    lease: Lease
    at: PageIds
    below: PageIds
    alone: npt.NDArray[np.bool_]


def spill(state: CacheState, leases: Iterable[Lease], need: Need) -> bool:
    """Sheds rows of running requests until `need` fits on the device; False if nothing more can be shed, or all is too little.

    The least urgent request first, among equals the one with most rows on the device. Shared pages go last: each of the requests
    that share them then needs hot pages of its own.
    """
    arena = state.arena(Tier.DEVICE)
    found = [each for lease in leases if lease.ready and len((each := _sheddable(state, lease)).at)]
    if not _could_help(state, found, need):
        return False
    found.sort(key=lambda each: (each.lease.request.priority, -len(each.at)))
    for shared in (False, True):
        for each in found:
            while (short := arena.shortage(need)) and _shed(state, each, _wanted(state, short), shared=shared):
                pass
    return not arena.shortage(need)


def _could_help(state: CacheState, found: list[_Sheddable], need: Need) -> bool:
    """Whether shedding everything possible would free enough bytes: else nothing is shed."""
    arena = state.arena(Tier.DEVICE)
    strides = arena.layout.strides
    hot = sum(min(_hot_allowed(state, each.lease), len(each.at)) for each in found)
    pages = len(np.unique(np.concatenate([NO_PAGES, *(each.lease.prefix_pages[each.at] for each in found)])))
    free_bytes = arena.layout.size_bytes - arena.used_bytes + max(pages - hot, 0) * strides[Kind.ROWS]
    return pages > 0 and sum(strides[kind] * count for kind, count in need.items()) <= free_bytes


def _wanted(state: CacheState, short: Need) -> int:
    """How many pages to shed: what is short, or a whole slab if a slab is needed."""
    layout = state.arena(Tier.DEVICE).layout
    return max(short.get(Kind.ROWS) or layout.slab_bytes // layout.strides[Kind.ROWS], LEAST_SHED)


def _hot_allowed(state: CacheState, lease: Lease) -> int:
    """How many more hot pages a lease may get."""
    return max(hot_pages_of(state) - len(lease.hot_pages), 0)


def _shed(state: CacheState, each: _Sheddable, count: int, *, shared: bool) -> bool:
    """Sheds `count` pages of a lease, in addition to those that become its hot pages; False if that would free nothing."""
    row_pages, lease = state.row_pages, each.lease
    assert row_pages is not None
    left = row_pages.rows[lease.prefix_pages[each.at]] != ABSENT  # another request that shares them may have shed some
    chosen = np.flatnonzero(left if shared else left & each.alone)
    hot = _hot_allowed(state, lease)
    if len(chosen) <= hot:
        return False
    chosen = chosen[: hot + count]
    ids, below = lease.prefix_pages[each.at[chosen]], each.below[chosen]
    rows = np.sort(row_pages.rows[ids])[:hot]  # at low addresses, so that slabs at the high end become empty
    state.arena(Tier.DEVICE).retain(Kind.ROWS, rows)  # assigned, not freed
    state.arena(Tier.HOST).retain(Kind.PREFIX, below)
    row_pages.shed(ids, below)
    state.tree.accounts.shed_rows(state.tree.accounts.of(lease.namespace.tenant), len(ids))
    assign_hot(state, lease, rows)
    state.tree.version += 1
    state.counters.add("spilled_pages", len(ids))
    return True


def _sheddable(state: CacheState, lease: Lease) -> _Sheddable:
    """Pages before the lease's tail that the host has too, and that no job copies."""
    row_pages, device = state.row_pages, state.arena(Tier.DEVICE)
    assert row_pages is not None
    upto = max(lease.position // state.spec.page_tokens + 1 - TAIL_PAGES, 0)
    _skip_shed(lease, row_pages, upto)
    first = lease.first_resident
    ids, below = lease.prefix_pages[first:upto], _host_pages(state, lease, first, upto)
    rows = row_pages.rows[ids]
    may = (rows != ABSENT) & (device.state[Kind.PREFIX][ids] == READY)
    may &= (below != ABSENT) & (state.arena(Tier.HOST).state[Kind.PREFIX][below] == READY)
    may &= device.refs[Kind.ROWS][rows] == 1
    at = np.flatnonzero(may).astype(np.int32)
    return _Sheddable(lease=lease, at=at + first, below=below[at], alone=device.refs[Kind.PREFIX][ids[at]] <= ALONE)


def _skip_shed(lease: Lease, row_pages: RowPages, upto: int) -> None:
    """Notes up to where all of a lease's pages are shed, so that they are not visited again."""
    if lease.first_resident < upto:
        resident = row_pages.rows[lease.prefix_pages[lease.first_resident : upto]] != ABSENT
        lease.first_resident += int(resident.argmax()) if resident.any() else len(resident)


def _host_pages(state: CacheState, lease: Lease, first: int, upto: int) -> PageIds:
    """The host pages of a lease's pages from `first` on, ABSENT where the tree has none, or has another page on the device."""
    below = np.full(max(upto - first, 0), ABSENT, np.int32)
    owner, ids, at = state.tree.owner[Tier.DEVICE], lease.prefix_pages, first
    while at < upto:
        node = owner[int(ids[at])]
        if node is None:
            at += 1
            continue
        device, host = node.runs[Tier.DEVICE], node.runs[Tier.HOST]
        end = min(node.end, upto)
        if host is not None:
            here = slice(at - node.start, end - node.start)
            below[at - first : end - first] = np.where(device.ids[here] == ids[at:end], host.ids[here], ABSENT)
        at = end
    return below
