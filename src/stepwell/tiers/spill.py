"""Rows of running requests leave the device when nothing idle is left to evict: the host has them already, and keeps them.

    a request's pages   |== shed, from the front ==|== resident ==|= last full page =|= being written =|
    rows of the first   become its hot pages; those of the others are room

What is shed is read where the host has it, or from hot pages, into which passes copy rows that they read often. Nothing comes
back to stay. Pages spill that the tree has and whose host page can be read; what a request computes for itself alone does not.
Decides and books; copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.arena import READY, Need
from stepwell.tiers.lease import Lease
from stepwell.tiers.state import CacheState
from stepwell.tree.node import ABSENT

TAIL_PAGES = 2  # that stay: the last full one, and the one that is being written
LEAST_SHED = 8  # pages at a time: looking for them costs as much as shedding some more
ALONE = 2  # references to a page that one request shares with nobody: its own and the tree's


def hot_pages_of(state: CacheState) -> int:
    """How many hot pages a request has once rows of it are on the host alone."""
    return -(-state.config.hot_rows // state.spec.page_tokens)


def _before_tail(state: CacheState, lease: Lease) -> int:
    """Up to which page of a lease rows may leave the device."""
    return max(lease.position // state.spec.page_tokens + 1 - TAIL_PAGES, 0)


def hot_missing(state: CacheState, lease: Lease) -> int:
    """How many ROWS pages a lease should get before its next pass: it works without them, but slowly."""
    row_pages = state.row_pages
    if row_pages is None or not row_pages.num_backed or not row_pages.backed(lease.prefix_pages).any():
        return 0
    return max(hot_pages_of(state) - len(lease.hot_pages), 0)


def lend(state: CacheState, lease: Lease, rows: PageIds) -> None:
    """Makes ROWS pages hot ones of a lease. Takes over the caller's reference to each; what it has too many is given back."""
    row_pages = state.row_pages
    assert row_pages is not None
    wanted = max(hot_pages_of(state) - len(lease.hot_pages), 0)
    state.tree.release(Tier.DEVICE, Kind.ROWS, rows[wanted:])
    numbers = row_pages.lend(rows[:wanted])
    lease.hot_pages = np.concatenate([lease.hot_pages, rows[:wanted]])
    lease.hot_numbers = np.concatenate([lease.hot_numbers, numbers])


def spill(state: CacheState, leases: Iterable[Lease], need: Need) -> bool:
    """Sheds rows of running requests until `need` fits on the device; false when nothing more can go, or all would not do.

    The least urgent first, and of those the one with most rows there. Pages that requests share go last: then each of these
    needs hot pages of its own.
    """
    arena = state.arena(Tier.DEVICE)
    running = [lease for lease in leases if lease.ready]
    if not _could_help(state, running, need):
        return False
    for shared in (False, True):
        left = list(running)
        while short := arena.shortage(need):
            lease = min(left, key=lambda each: (each.request.priority, -_num_resident(state, each)), default=None)
            if lease is None:
                break
            if not _shed(state, lease, _wanted(state, short), shared=shared):
                left.remove(lease)
    return not arena.shortage(need)


def _could_help(state: CacheState, leases: Iterable[Lease], need: Need) -> bool:
    """Whether there would be as many bytes as are needed with everything shed that can be: else nothing is."""
    arena = state.arena(Tier.DEVICE)
    strides = arena.layout.strides
    ids, hot = [NO_PAGES], 0
    for lease in leases:
        found = _sheddable(state, lease, shared=True)
        ids.append(lease.prefix_pages[found])
        hot += min(max(hot_pages_of(state) - len(lease.hot_pages), 0), len(found))
    pages = len(np.unique(np.concatenate(ids)))
    room = arena.layout.size_bytes - arena.used_bytes + max(pages - hot, 0) * strides[Kind.ROWS]
    return pages > 0 and sum(strides[kind] * count for kind, count in need.items()) <= room


def _wanted(state: CacheState, short: Need) -> int:
    """How many pages to shed: what is short, or a slab of them when it is the slab that is needed."""
    layout = state.arena(Tier.DEVICE).layout
    return max(short.get(Kind.ROWS) or layout.slab_bytes // layout.strides[Kind.ROWS], LEAST_SHED)


def _num_resident(state: CacheState, lease: Lease) -> int:
    assert state.row_pages is not None
    ids = lease.prefix_pages[: _before_tail(state, lease)]
    return int(np.count_nonzero(state.row_pages.rows[ids] != ABSENT))


def _shed(state: CacheState, lease: Lease, count: int, *, shared: bool) -> bool:
    """Sheds so many pages of a lease, beside those that become its hot pages; false when that would free nothing."""
    row_pages, device, host = state.row_pages, state.arena(Tier.DEVICE), state.arena(Tier.HOST)
    assert row_pages is not None
    found = _sheddable(state, lease, shared=shared)
    hot = max(hot_pages_of(state) - len(lease.hot_pages), 0)
    if len(found) <= hot:
        return False
    at = found[: hot + count]
    ids = lease.prefix_pages[at]
    rows = row_pages.rows[ids[:hot]].copy()
    device.retain(Kind.ROWS, rows)  # lent, not freed
    below = _host_pages(state, lease, int(at[-1]) + 1)[at]
    host.retain(Kind.PREFIX, below)
    row_pages.shed(ids, below)
    lend(state, lease, rows)
    state.tree.version += 1
    state.counters.add("spilled_pages", len(ids))
    return True


def _sheddable(state: CacheState, lease: Lease, *, shared: bool) -> PageIds:
    """Which pages of a lease may be shed, by index: those that the host has too, and nobody copies."""
    row_pages, device = state.row_pages, state.arena(Tier.DEVICE)
    assert row_pages is not None
    upto = _before_tail(state, lease)
    if upto <= 0:
        return NO_PAGES
    ids, below = lease.prefix_pages[:upto], _host_pages(state, lease, upto)
    rows = row_pages.rows[ids]
    may = (rows != ABSENT) & (device.state[Kind.PREFIX][ids] == READY)
    may &= (below != ABSENT) & (state.arena(Tier.HOST).state[Kind.PREFIX][below] == READY)
    may &= device.refs[Kind.ROWS][rows] == 1
    if not shared:
        may &= device.refs[Kind.PREFIX][ids] <= ALONE
    return np.flatnonzero(may).astype(np.int32)


def _host_pages(state: CacheState, lease: Lease, upto: int) -> PageIds:
    """The host pages of a lease's first pages, ABSENT where the tree has none, or has another's page on the device."""
    below = np.full(upto, ABSENT, np.int32)
    owner, ids, at = state.tree.owner[Tier.DEVICE], lease.prefix_pages, 0
    while at < upto:
        node = owner[int(ids[at])]
        if node is None:
            at += 1
            continue
        device, host = node.runs[Tier.DEVICE], node.runs[Tier.HOST]
        end = min(node.end, upto)
        if host is not None:
            here = slice(at - node.start, end - node.start)
            below[at:end] = np.where(device.ids[here] == ids[at:end], host.ids[here], ABSENT)
        at = end
    return below
