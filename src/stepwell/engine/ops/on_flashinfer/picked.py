"""Attention over picked rows by FlashInfer: what was picked is gathered by Triton, back to back, and read like any other pages.

    singles      all at once: those that picked, and those that see no more than others pick, with all they see
    dense runs   all at once, over the pages where they lie, unless some of these may be on the host alone
    the others   runs that pick (a few guesses to be verified, answers that are computed again), and single tokens of prompts: in
                 plain torch

How many rows each single looks at is planned once for all layers, as in `attention.py`; which ones is not part of the
plan. Importing needs Triton. Axes as in `ops/picked.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch

from stepwell.engine.ops.attention import attend_part
from stepwell.engine.ops.on_flashinfer.attention import FlashInferAttention, Heads, Planned, keys_and_values
from stepwell.engine.ops.on_triton.gather import gather_rows
from stepwell.engine.ops.picked import attend_part_picked
from stepwell.engine.ops.selection import Picked, Selection
from stepwell.engine.passes.numbers import on_device
from stepwell.engine.passes.paging import Look, Paging, Run, Singles
from stepwell.engine.passes.rows import PLAIN, Rows

MOST_PAGE_ROWS = 16  # of gathered rows


class FlashInferPicked:
    """`attend_picked` for CUDA, by the wrappers of a `FlashInferAttention`."""

    def __init__(self, attention: FlashInferAttention) -> None:
        self._attention = attention

    def __call__(
        self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, selection: Selection, *, heads: int, key_dim: int,
        scale: float, cap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self._attention.check(query_NHD, rows, paging, heads=heads, key_dim=key_dim)
        layer = Heads(query_NHD.shape[1], heads, key_dim, scale, cap, False, query_NHD.dtype)
        self._attention.must_be_compiled(layer, paging)
        out_NHD = torch.empty_like(query_NHD, memory_format=torch.contiguous_format)
        pairs = list(zip(paging.parts, selection, strict=True))
        counts = [picked.position_XK.shape[1] for part, picked in pairs if isinstance(part, Singles) and picked is not None]
        if counts:
            self._singles(layer, paging, pairs, counts[0], query_NHD, rows, out_NHD)
        in_pages = rows.places is None
        if in_pages:
            self._dense_runs(layer, paging, pairs, query_NHD, rows, out_NHD)
        for part, picked in pairs:
            if isinstance(part, Run) and picked is None and in_pages:
                continue
            if isinstance(part, Singles) and counts and (picked is not None or _length(part) <= counts[0]):
                continue
            mine = slice(part.start, part.stop)
            out_NHD[mine] = (
                attend_part(query_NHD[mine], rows, part, heads=heads, key_dim=key_dim, scale=scale, cap=cap)
                if picked is None
                else attend_part_picked(query_NHD[mine], rows, part, picked, heads=heads, key_dim=key_dim, scale=scale, cap=cap)
            )
        return out_NHD

    # ---- inside -----------------------------------------------------------------------------------

    def _singles(
        self, layer: Heads, paging: Paging, pairs: Sequence[tuple[Singles | Run, Picked | None]], count: int,
        query_NHD: torch.Tensor, rows: Rows, out_NHD: torch.Tensor,
    ) -> None:  # fmt: skip
        """Tokens of prompts are computed with the others, over their first rows; what they see is overwritten."""
        key, page_rows, singles = (layer, "picked", count), gcd(count, MOST_PAGE_ROWS), paging.num_singles
        if key not in paging.plans:
            plan = PickedPlan(self._attention.planned(layer, paging, page_rows, decode=True, count=singles), count, page_rows)
            plan.load(paging.looks[:singles])
            paging.plans[key] = [(slice(0, singles), plan)]
        copies = [
            gather_rows(rows, part.table_BP, _all_of(part, count) if picked is None else picked.position_XK)
            for part, picked in pairs
            if isinstance(part, Singles)
        ]
        copy_BKE = copies[0] if len(copies) == 1 else torch.cat(copies)
        gathered = Rows(copy_BKE.view(-1, page_rows, copy_BKE.shape[2]), PLAIN, rows.dtype)
        for span, plan in paging.plans[key]:
            plan.run(query_NHD[span], keys_and_values(gathered, layer), out_NHD[span])

    def _dense_runs(
        self, layer: Heads, paging: Paging, pairs: Sequence[tuple[Singles | Run, Picked | None]], query_NHD: torch.Tensor,
        rows: Rows, out_NHD: torch.Tensor,
    ) -> None:  # fmt: skip
        starts = {part.start for part, picked in pairs if isinstance(part, Run) and picked is None}
        if not starts:
            return
        key = layer, "dense runs"
        if key not in paging.plans:
            looks = [look for look in paging.looks[paging.num_singles :] if look.start in starts]
            plan = self._attention.planned(layer, paging, paging.sight.page_tokens, decode=False, count=len(looks))
            plan.load(looks)
            token = np.concatenate([np.arange(look.start, look.stop) for look in looks])
            paging.plans[key] = [(on_device(token, query_NHD.device, self._attention.send), plan)]
        for token_M, plan in paging.plans[key]:
            seen_MHD = query_NHD.new_empty(len(token_M), *query_NHD.shape[1:])
            plan.run(query_NHD[token_M], keys_and_values(rows, layer), seen_MHD, None)
            out_NHD[token_M] = seen_MHD


class PickedPlan:
    """A plan for rows that were gathered for singles, `count` each: they attend to the first ones, up to the length of each."""

    def __init__(self, plan: Planned, count: int, page_rows: int) -> None:
        self._plan = plan
        self._count = count
        self._page_rows = page_rows

    def load(self, looks: Sequence[Look]) -> None:
        self._plan.load([self._gathered(number, look) for number, look in enumerate(looks)])

    def run(self, query_NHD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_NHD: torch.Tensor) -> None:
        self._plan.run(query_NHD, pages, out_NHD, None)

    def _gathered(self, number: int, look: Look) -> Look:
        seen = min(look.position + 1, self._count)
        first = number * (self._count // self._page_rows)
        pages = np.arange(first, first - (-seen // self._page_rows), dtype=np.int32)
        return Look(start=look.start, stop=look.stop, position=seen - 1, first=0, pages=pages)


def _length(part: Singles) -> int:
    return part.table_BP.shape[1] * part.sight.page_tokens


def _all_of(part: Singles, count: int) -> torch.Tensor:
    """The first `count` positions, those behind a table's last being its last."""
    position_K = torch.arange(count, dtype=torch.int32, device=part.table_BP.device).clamp_(max=_length(part) - 1)
    return position_K.expand(len(part.table_BP), -1).contiguous()
