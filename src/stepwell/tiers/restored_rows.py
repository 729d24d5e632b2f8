"""Where the rows of a restored prefix go, if rows are pages of their own: to the device with their pages, or they stay below.

Resident if that takes no space from running requests; else a request resumes without its rows, on hot pages.
"""

from __future__ import annotations

import numpy as np

from stepwell.base.errors import NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import Copy, PageIds, Span
from stepwell.memory.arena import Need
from stepwell.tiers.eviction import allocate
from stepwell.tiers.lease import Lease
from stepwell.tiers.spill import assign_hot, hot_pages_of
from stepwell.tiers.state import CacheState


def num_rows(state: CacheState, pages: int) -> int:
    """How many pages of rows belong to this number of prefix pages."""
    return pages if state.row_pages is not None else 0


def allocate_free(state: CacheState, need: Need) -> dict[Kind, PageIds] | None:
    """Device pages, if enough are free."""
    return state.arena(Tier.DEVICE).alloc_if_fits({kind: count for kind, count in need.items() if count})


def allocate_restored(
    state: CacheState, need: dict[Kind, int], *, tenant: str | None, held: PageIds
) -> tuple[dict[Kind, PageIds], bool]:
    """What a request needs, with rows for what is loaded if they fit in place of idle content alone; else with hot pages instead,
    and True. Also hot pages for pages that it shares, `held`, whose rows are on the host alone. If hot pages would take as
    much space as the rows themselves, the rows are chosen. Raises NoRoom.
    """
    assert state.row_pages is not None
    most, away, loaded = hot_pages_of(state), int(np.count_nonzero(state.row_pages.backed(held))), need[Kind.ROWS]
    resident, hot = need | {Kind.ROWS: loaded + min(most, away)}, need | {Kind.ROWS: min(most, away + loaded)}
    try:
        return allocate(state, Tier.DEVICE, resident, tenant=tenant, may_spill=False), False
    except NoRoom:
        index_only = hot[Kind.ROWS] < resident[Kind.ROWS]
        return allocate(state, Tier.DEVICE, hot if index_only else resident, tenant=tenant), index_only


def place_loaded(
    state: CacheState, lease: Lease, at: PageIds, below: PageIds, rows: PageIds, *, index_only: bool
) -> list[Copy]:  # fmt: skip
    """Records where the rows of the lease's pages `at`, loaded from host pages `below`, are. Other `rows` become hot pages."""
    if state.row_pages is None:
        return []
    loaded = lease.prefix_pages[at]
    if index_only:
        state.arena(Tier.HOST).retain(Kind.PREFIX, below)
        state.row_pages.back(loaded, below, at)
        assign_hot(state, lease, rows)
        state.counters.add("loaded_index_only_pages", len(loaded))
        return []
    assign_hot(state, lease, rows[len(loaded) :])
    return bind_loaded(state, loaded, rows[: len(loaded)], below, at)


def bind_loaded(state: CacheState, pages: PageIds, rows: PageIds, below: PageIds, ordinals: PageIds) -> list[Copy]:
    """Binds rows to loaded pages, if rows are pages of their own; returns the copy that fills them."""
    if state.row_pages is None or not len(pages):
        return []
    state.row_pages.bind(pages, rows, ordinals)
    source = Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=below)
    return [Copy(source=source, target=Span(tier=Tier.DEVICE, kind=Kind.ROWS, ids=rows))]
