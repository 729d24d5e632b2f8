"""Attention to latents by FlashInfer: rows `[512 channels | 64 rotated ones]`, key and value in one, shared by all heads.

    pages       read where they lie, when rows are plain numbers
    a copy      of a segment's rows, back to back: rows in eight bits, and arenas that the library cannot count through
    picked      singles: their picked rows, gathered; runs: one copy of all rows, and for each query the numbers of its own

What a pass looks at is worked out once for all layers (a plan). Which rows an index picked is not part of a plan, only how many.
What FlashInfer does not have (other widths, fp32) goes to the operations behind it. Axes as in `ops/attention.py` and
`ops/selection.py`, and M rows of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_flashinfer.latent_plans import (
    RANK,
    ROTATED,
    Copied,
    Each,
    Heads,
    Paged,
    Planned,
    Planner,
    Wrapper,
    groups,
)
from stepwell.engine.ops.on_triton.gather import gather_rows
from stepwell.engine.ops.selection import Selection
from stepwell.engine.passes.numbers import Send, copy
from stepwell.engine.passes.paging import Look, Paging, Run, Singles
from stepwell.engine.passes.rows import PLAIN, Rows
from stepwell.engine.passes.spilling import SHORT_RUN

WORKSPACE_BYTES = 64 << 20  # for partial results of contexts that are cut
REACH = 1 << 32  # the library counts elements from the first page on in 32 bits
ALIGNED_BYTES = 16  # where rows must begin


class FlashInferLatent:
    """`attend_latent` for CUDA, and `attend_selected`. Keeps one workspace, and what the library needs for each plan."""

    def __init__(self, device: torch.device, send: Send = copy) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._made_by = BatchMLAPagedAttentionWrapper
        self._device = device
        self._send = send
        self._kept: list[Wrapper] = []  # of passes that are not recorded, used again by every pass

    def __call__(self, query_NHC: torch.Tensor, rows: Rows, paging: Paging, *, rank: int, scale: float) -> torch.Tensor:
        _check(query_NHC, rows, paging, rank)
        layer = Heads(query_NHC.shape[1], scale, query_NHC.dtype)
        out_NHR = query_NHC.new_empty(*query_NHC.shape[:2], RANK)
        if within_reach(rows):
            for span, plan in self._paged(layer, paging):
                plan.run(query_NHC[span], rows.stored_PRE, out_NHR[span])
        else:
            for part in paging.parts:
                self._copied(layer, paging, part, query_NHC, rows, out_NHR)
        return out_NHR

    def attend_selected(
        self, query_NHC: torch.Tensor, rows: Rows, paging: Paging, selection: Selection, *, rank: int, scale: float
    ) -> torch.Tensor:
        _check(query_NHC, rows, paging, rank)
        if all(picked is None for picked in selection):
            return self(query_NHC, rows, paging, rank=rank, scale=scale)
        layer = Heads(query_NHC.shape[1], scale, query_NHC.dtype)
        out_NHR = query_NHC.new_empty(*query_NHC.shape[:2], RANK)
        for part, picked in zip(paging.parts, selection, strict=True):
            if picked is None:
                self._copied(layer, paging, part, query_NHC, rows, out_NHR)
            else:
                self._picked(layer, paging, part, picked.position_XK, query_NHC, rows, out_NHR)
        return out_NHR

    # ---- inside -----------------------------------------------------------------------------------

    def _copied(
        self, layer: Heads, paging: Paging, part: Singles | Run, query_NHC: torch.Tensor, rows: Rows, out_NHR: torch.Tensor
    ) -> None:
        """All rows of a part, back to back."""
        copy_SKC = gather_rows(rows, _table(part))
        for span, plan in self._plans_of(layer, paging, part, Copied(copy_SKC.shape[1])):
            plan.run(query_NHC[span], copy_SKC.flatten(0, 1)[:, None], out_NHR[span])

    def _picked(
        self, layer: Heads, paging: Paging, part: Singles | Run, position_XK: torch.Tensor, query_NHC: torch.Tensor, rows: Rows,
        out_NHR: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copies the picked rows of singles, and all rows of a run, and each query has the numbers of its own; unless some
        may be on the host alone, where all but the picked ones would be read for nothing.
        """
        table_SP, singles = _table(part), isinstance(part, Singles) or rows.places is not None
        if singles:
            assert isinstance(part, Singles) or len(position_XK) <= SHORT_RUN, "longer runs are resident or staged"
            table_SP = table_SP.expand(len(position_XK), -1)
        copy_SKC = gather_rows(rows, table_SP, position_XK if singles else None)
        for span, plan in self._plans_of(layer, paging, part, Each(position_XK.shape[1])):
            mine = position_XK[span.start - part.start : span.stop - part.start]
            numbers = None if singles else mine.to(torch.int32).flatten()
            plan.run(query_NHC[span], copy_SKC.flatten(0, 1)[:, None], out_NHR[span], numbers)

    def _paged(self, layer: Heads, paging: Paging) -> list[tuple[slice, Planned]]:
        """Singles, and runs, each all at once if they fit the library's workspace."""
        singles = paging.num_singles
        together = (paging.looks[:singles], paging.looks[singles:])
        return self._plans(layer, paging, (layer, "paged"), Paged(paging.sight.page_tokens), together)

    def _plans_of(self, layer: Heads, paging: Paging, part: Singles | Run, planner: Planner) -> list[tuple[slice, Planned]]:
        """The plans of one part, whose rows are copied."""
        looks = [look for look in paging.looks if part.start <= look.start < part.stop]
        return self._plans(layer, paging, (layer, part.start, planner), planner, (looks,))

    def _plans(
        self, layer: Heads, paging: Paging, key: tuple[Any, ...], planner: Planner, together: Sequence[Sequence[Look]]
    ) -> list[tuple[slice, Planned]]:
        if key not in paging.plans:
            made: list[tuple[slice, Planned]] = []
            for group in (group for looks in together for group in groups(looks, layer)):
                plan = Planned(self._wrapper(paging), layer, planner)
                plan.load(group)
                made.append((slice(group[0].start, group[-1].stop), plan))
            paging.plans[key] = made
        plans: list[tuple[slice, Planned]] = paging.plans[key]
        return plans

    @cached_property
    def _workspace(self) -> torch.Tensor:
        """One for all wrappers, which run one after the other. Models without latents need none."""
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)

    def _wrapper(self, paging: Paging) -> Wrapper:
        """A recorded step has its own. All other passes use the same ones again: the first, the second, and so on."""
        if paging.fixed:
            return Wrapper(self._made_by(self._workspace), self._send, recorded=True)
        number = next(paging.plan_numbers)
        while number >= len(self._kept):
            self._kept.append(Wrapper(self._made_by(self._workspace), self._send))
        return self._kept[number]


def highest(score_XT: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest values of each row, in any order, by FlashInfer."""
    import flashinfer

    values: torch.Tensor = flashinfer.top_k(score_XT, count)[0]
    return values


def within_reach(rows: Rows) -> bool:
    """Whether the library can read these rows where they lie."""
    stored = rows.stored_PRE
    if rows.places is not None or rows.format is not PLAIN or stored.dtype != rows.dtype or stored.stride(2) != 1:
        return False
    size = stored.element_size()
    aligned = all(number * size % ALIGNED_BYTES == 0 for number in (stored.stride(0), stored.stride(1)))
    return aligned and stored.data_ptr() % ALIGNED_BYTES == 0 and len(stored) * stored.stride(0) < REACH


def _check(query_NHC: torch.Tensor, rows: Rows, paging: Paging, rank: int) -> None:
    """Raises NoKernel where the library has none."""
    if rank != RANK or query_NHC.shape[2] != RANK + ROTATED:
        raise NoKernel(f"latents of {query_NHC.shape[2]} channels")
    if query_NHC.dtype != rows.dtype or rows.dtype == torch.float32:
        raise NoKernel(f"latents in {str(rows.dtype).removeprefix('torch.')}")
    if paging.sight.first_seen:
        raise NoKernel("contexts that begin behind their first token")


def _table(part: Singles | Run) -> torch.Tensor:
    return part.table_BP if isinstance(part, Singles) else part.pages_P[None]
