"""Finds a place on the device for every row that a pass selects, and fetches missing rows. The interface, and plain torch.

    claim    a row in a page on the device: nothing to do. In a hot slot: the slot is in use now. Else it is missing, and the
             first reference to it whose request has hot pages wins it; later references find it there
    assign   winners of a request, in the order of its references, get slots of its own hot pages: slots of the highest
             bin first (`score_bins`). A row without a slot is read from the host in place, when rows are gathered
    fetch    rows of the plan, host page -> hot page, of one layer. Layers that share a selection replay the same plan

The result does not depend on the order of execution: a missing row is missing for all, and a claim is a minimum. Selections never
depend on where rows are. Plain torch is the reference: it runs anywhere, and waits on CUDA.

Axes as in `places.py`, and X query rows of a pass, K selected rows of each, B requests, A = B + 1, Q hot pages of a request,
T positions with scores, M entries of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from stepwell.base.errors import ConfigError
from stepwell.memory.row_pages import ABSENT
from stepwell.sparse.counts import FETCHED, HITS, READ_THROUGH, RESIDENT
from stepwell.sparse.places import HOST, ORDINAL, ROWS, Places

CLAIM = -(2**30)  # a hint of CLAIM + e: entry e claims the row. Entries are numbered x * K + k
MOST_ENTRIES = 2**30
IN_USE, EMPTY, LAST = 0, 255, 254  # bins of slots: used in this pass, empty, and of the lowest score
LARGEST = 3e38  # finite in fp32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """The selection of the query rows of one pass, in one layer. Query rows of one request are adjacent, and share a union."""

    position_XK: torch.Tensor  # -1 for none
    last_X: torch.Tensor  # positions after it are ignored
    owner_X: torch.Tensor  # the request of each query row, ascending
    first_A: torch.Tensor  # the first query row of each request, then the number of rows
    table_BP: torch.Tensor  # prefix pages of each request
    hot_BQ: torch.Tensor  # the numbers of each request's hot pages, padded with -1
    score_XT: torch.Tensor | None = None  # slots with the lowest scores are reused first; None: -inf throughout

    @classmethod
    def of(
        cls,
        position_XK: torch.Tensor,
        *,
        last_X: torch.Tensor,
        table_BP: torch.Tensor,
        hot_BQ: torch.Tensor,
        owner_X: torch.Tensor | None = None,
        first_A: torch.Tensor | None = None,
        score_XT: torch.Tensor | None = None,
    ) -> Wanted:
        """One query row per request, unless `owner_X` is given; `first_A` follows from it. Does not wait."""
        if owner_X is None:
            assert len(position_XK) == len(table_BP), f"{len(position_XK)} query rows of {len(table_BP)} requests"
            owner_X = torch.arange(len(table_BP), dtype=torch.int32, device=table_BP.device)
        if first_A is None:
            number_A = torch.arange(len(table_BP) + 1, dtype=owner_X.dtype, device=owner_X.device)
            first_A = torch.searchsorted(owner_X, number_A, out_int32=True)
        return cls(
            position_XK=position_XK, last_X=last_X, owner_X=owner_X, table_BP=table_BP, hot_BQ=hot_BQ, score_XT=score_XT,
            first_A=first_A,
        )  # fmt: skip


class Plan:
    """The rows to copy, by their numbers in host and hot pages. Allocated once for the largest pass; one group at a time."""

    def __init__(self, entries: int, device: torch.device) -> None:
        """Raises ConfigError for more entries than claims can number."""
        if entries > MOST_ENTRIES:
            raise ConfigError(
                f"{entries:,} rows may be selected in one pass, {MOST_ENTRIES:,} are the most: lower max_running, since each "
                f"request selects its share"
            )
        # The last two are used only between claim and assign.
        self.source_M, self.target_M, self.claim_M, self.winner_M = (
            torch.empty(entries, dtype=torch.int32, device=device) for _ in range(4)
        )
        self.count_1 = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def entries(self) -> int:
        return len(self.source_M)


class Resolve(Protocol):
    def __call__(self, places: Places, group: int, wanted: Wanted, plan: Plan) -> None: ...


class Sides(Protocol):
    """Source and target of row copies: host pages and device pages. `Places` has both."""

    @property
    def host_PLRE(self) -> torch.Tensor: ...
    @property
    def rows_PLRE(self) -> torch.Tensor: ...
    @property
    def page_rows(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class Fetch(Protocol):
    def __call__(self, places: Sides, layer: int, plan: Plan) -> None: ...


def resolve(places: Places, group: int, wanted: Wanted, plan: Plan) -> None:
    """Assigns slots to missing rows, and records in `plan` what to fetch. Copies no rows."""
    key_E, entry_E = _claim(places, group, wanted)
    owner_E = wanted.owner_X[entry_E // max(wanted.position_XK.shape[1], 1)]
    plan.count_1.zero_()
    for request in range(len(wanted.table_BP)):
        _assign(places, group, wanted, plan, request, key_E[owner_E == request])


def fetch(places: Sides, layer: int, plan: Plan) -> None:
    """Copies the rows of a plan in one layer."""
    count, size = int(plan.count_1), places.page_rows
    source, target = plan.source_M[:count].long().to(places.host_PLRE.device), plan.target_M[:count].long()
    row_ME = places.host_PLRE[source // size, layer, source % size]
    places.rows_PLRE[target // size, layer, target % size] = row_ME.to(places.device)


# ---- inside -----------------------------------------------------------------------------------------


def _claim(places: Places, group: int, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of missing rows that a request with hot pages wants, and the winning entry of each, in the order of entries."""
    size, owner_X, position_XK = places.page_rows, wanted.owner_X.long(), wanted.position_XK.long()
    asked_XK = (position_XK >= 0) & (position_XK <= wanted.last_X[:, None])
    position_XK = position_XK.masked_fill(~asked_XK, 0)
    page_XK, row_XK = wanted.table_BP[owner_X].long().gather(1, position_XK // size), position_XK % size
    header = places.header_P3[page_XK]
    bound_XK, backed_XK = header[..., ROWS] >= 0, header[..., HOST] >= 0
    slot_XK, hit_XK = places.hot_slot(page_XK, row_XK, group)
    hit_XK &= asked_XK & ~bound_XK
    places.stamp_GS[group, slot_XK[hit_XK]] = places.now_1
    missing_XK = asked_XK & ~bound_XK & ~hit_XK & backed_XK
    keeps_X1 = (wanted.hot_BQ >= 0).any(dim=1)[owner_X, None]
    counted = ((RESIDENT, asked_XK & bound_XK), (HITS, hit_XK), (READ_THROUGH, missing_XK & ~keeps_X1))
    for kind, counted_XK in counted:
        places.counts.tally_GBC[group, :, kind].index_add_(0, owner_X, counted_XK.sum(dim=1))
    entry_E = (missing_XK & keeps_X1).flatten().nonzero()[:, 0]
    key_E = (page_XK * size + row_XK).flatten()[entry_E]
    won_E = _firsts(key_E)
    key_E, entry_E = key_E[won_E], entry_E[won_E]
    # Not claimed before: has the effect of a minimum.
    lower_E = places.slot_PGR[key_E // size, group, key_E % size] < CLAIM + entry_E
    return key_E[~lower_E], entry_E[~lower_E]


def _firsts(number_E: torch.Tensor) -> torch.Tensor:
    """The index of the first occurrence of each number, ascending."""
    sorted_E, at_E = torch.sort(number_E, stable=True)
    first_E = torch.ones_like(sorted_E, dtype=torch.bool)
    first_E[1:] = sorted_E[1:] != sorted_E[:-1]
    return at_E[first_E].sort().values


def _assign(places: Places, group: int, wanted: Wanted, plan: Plan, request: int, key_W: torch.Tensor) -> None:
    size, number_Q = places.page_rows, wanted.hot_BQ[request].long()
    number_Q = number_Q[number_Q >= 0]
    slot_H = (number_Q[:, None] * size + torch.arange(size, device=number_Q.device)).flatten()
    bin_H = _bins(places, group, wanted, request, slot_H) if len(key_W) else slot_H
    given = min(len(key_W), int((bin_H > 0).sum()))
    chosen = torch.sort(bin_H, descending=True, stable=True).indices[:given].sort().values
    slot_W, key_W, left = slot_H[chosen], key_W[:given], key_W[given:]
    places.key_GS[group, slot_W] = key_W.int()
    places.stamp_GS[group, slot_W] = places.now_1
    places.slot_PGR[key_W // size, group, key_W % size] = slot_W.int()
    places.slot_PGR[left // size, group, left % size] = ABSENT
    mine = slice(int(plan.count_1), int(plan.count_1) + given)
    plan.source_M[mine] = places.header_P3[key_W // size, HOST] * size + (key_W % size).int()
    plan.target_M[mine] = places.hot_N[slot_W // size] * size + (slot_W % size).int()
    plan.count_1 += given
    places.counts.tally_GBC[group, request, FETCHED] += given
    places.counts.tally_GBC[group, request, READ_THROUGH] += len(left)


def _bins(places: Places, group: int, wanted: Wanted, request: int, slot_H: torch.Tensor) -> torch.Tensor:
    key_H, stamp_H = places.key_GS[group, slot_H], places.stamp_GS[group, slot_H]
    if wanted.score_XT is None:
        return score_bins(key_H, stamp_H, places.now_1, torch.full_like(key_H, -torch.inf, dtype=torch.float32))
    mine_YT = wanted.score_XT[int(wanted.first_A[request]) : int(wanted.first_A[request + 1])].float()
    mine_YT = mine_YT.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    held_H = key_H.long().clamp_min(0)
    ordinal_H = places.header_P3[held_H // places.page_rows, ORDINAL].long()
    position_H = ordinal_H * places.page_rows + held_H % places.page_rows
    known_H = (position_H >= 0) & (position_H < mine_YT.shape[1])
    score_H = mine_YT.amax(dim=0)[position_H.masked_fill(~known_H, 0)].masked_fill(~known_H, -torch.inf)
    return score_bins(key_H, stamp_H, places.now_1, score_H)


def score_bins(key_H: torch.Tensor, stamp_H: torch.Tensor, now: torch.Tensor, score_H: torch.Tensor) -> torch.Tensor:
    """A bin for each of a request's slots H. Slots of the highest bin are reused first, within one bin the earliest slot. Idle
    slots are binned in equal steps between the highest and the lowest score of their rows; -inf is in the last bin.
    """
    idle_H = (key_H >= 0) & (stamp_H < now)
    known_H = idle_H & score_H.isfinite()
    high = score_H.masked_fill(~known_H, -torch.inf).amax()
    low = score_H.masked_fill(~known_H, torch.inf).amin()
    span = (high - low).clamp(max=LARGEST)
    step = torch.where(high > low, torch.full_like(span, LAST - 1) / span, 0.0).clamp(max=LARGEST)  # rounded once, as kernels do
    below_H = torch.where(known_H, (high - score_H).clamp(max=LARGEST), 0.0)
    bin_H = 1 + (below_H * step).clamp(max=LAST - 1).to(torch.int32)
    bin_H = bin_H.masked_fill(score_H == -torch.inf, LAST)
    return bin_H.masked_fill(~idle_H, IN_USE).masked_fill(key_H < 0, EMPTY)
