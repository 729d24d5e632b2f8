"""Attention over picked rows that hold keys and values per head, in plain torch: runs everywhere, and is the reference of faster
kernels.

    gathered   a query's picked rows, back to back: single tokens, and runs so short that this reads less
    masked     all rows of a run once, with what a query did not pick masked: long runs, whose queries pick most rows together

Takes a few queries at a time, so that gathered rows and masks need a bounded piece of memory. Axes as in `attention.py`, and
X queries, P rows that each picked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from stepwell.engine.ops.attention import attend_part, weigh
from stepwell.engine.ops.selection import BLOCK_BYTES, Picked, Selection
from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import Rows

_WIDTH_BYTES = 4  # what is counted for each number, whatever it is computed in


class AttendPicked(Protocol):
    def __call__(
        self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, selection: Selection, *, heads: int, key_dim: int,
        scale: float, cap: float | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


def attend_picked(
    query_NHD: torch.Tensor, rows: Rows, paging: Paging, selection: Selection, *, heads: int, key_dim: int, scale: float,
    cap: float | None = None, block_bytes: int = BLOCK_BYTES,
) -> torch.Tensor:  # fmt: skip
    """The attention of each query over its picked rows, or over all if none were picked: `[N, H, V]`. `cap` as in `attend`."""
    seen = [
        attend_part(query_NHD[part.start : part.stop], rows, part, heads=heads, key_dim=key_dim, scale=scale, cap=cap)
        if picked is None
        else attend_part_picked(
            query_NHD[part.start : part.stop], rows, part, picked, heads=heads, key_dim=key_dim, scale=scale, cap=cap,
            block_bytes=block_bytes,
        )
        for part, picked in zip(paging.parts, selection, strict=True)
    ]  # fmt: skip
    return seen[0] if len(seen) == 1 else torch.cat(seen)


def attend_part_picked(
    query_NHD: torch.Tensor, rows: Rows, part: Singles | Run, picked: Picked, *, heads: int, key_dim: int, scale: float,
    cap: float | None = None, block_bytes: int = BLOCK_BYTES,
) -> torch.Tensor:  # fmt: skip
    """The same for one part of a batch, given its own queries."""
    look = _Look(rows, heads, key_dim, scale, cap, block_bytes)
    if isinstance(part, Singles):
        seen = list(look.gathered(query_NHD, part.table_BP, part.position_B, picked.position_XK))
    else:
        seen = list(look.in_run(query_NHD, part, picked))
    return seen[0] if len(seen) == 1 else torch.cat(seen)


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """What all parts of one call have in common."""

    rows: Rows
    heads: int
    key_dim: int
    scale: float
    cap: float | None
    block_bytes: int

    def gathered(
        self, query_XHD: torch.Tensor, table_SP: torch.Tensor, position_X: torch.Tensor, picked_XP: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """`table_SP` has the pages of each query, or the same ones for all."""
        page_rows = self.rows.stored_PRE.shape[1]
        for at in self._blocks(len(query_XHD), picked_XP.shape[1] * self.rows.stored_PRE.shape[2]):
            picked = picked_XP[at].long()
            index_XP, table = picked // page_rows, table_SP if len(table_SP) == 1 else table_SP[at]
            row_XPE = self.rows.some(table.expand(len(picked), -1).gather(1, index_XP), picked % page_rows)
            row_XKPE = row_XPE.unflatten(2, (self.heads, -1)).transpose(1, 2)
            unseen_XP = picked > position_X[at, None]
            mask_XP = torch.zeros_like(unseen_XP, dtype=row_XPE.dtype).masked_fill_(unseen_XP, -torch.inf)
            yield self._weigh(query_XHD[at].unflatten(1, (self.heads, -1)), row_XKPE, mask_XP[:, None, None]).flatten(1, 2)

    def in_run(self, query_NHD: torch.Tensor, run: Run, picked: Picked) -> Iterator[torch.Tensor]:
        """The first queries attend to everything, the others to the rows that they picked."""
        picking, context = len(query_NHD) - picked.first, len(run.pages_P) * self.rows.stored_PRE.shape[1]
        if not picked.first and picking * picked.position_XK.shape[1] <= context:
            yield from self.gathered(query_NHD, run.pages_P[None], run.position_N, picked.position_XK)
            return
        row_1KTE = self.rows.whole(run.pages_P[None]).flatten(1, 2).unflatten(2, (self.heads, -1)).transpose(1, 2)
        for at in self._blocks(len(query_NHD), context * query_NHD.shape[1] // self.heads):
            mask_XT = run.mask_NT[at].clone()
            chosen_XP = picked.position_XK[max(at.start - picked.first, 0) : max(at.stop - picked.first, 0)].long()
            if len(chosen_XP):
                mine = mask_XT[-len(chosen_XP) :]
                kept = torch.full_like(mine, -torch.inf).scatter_(1, chosen_XP, mine.gather(1, chosen_XP))
                mine.copy_(kept)
            query_KGXD = query_NHD[at].unflatten(1, (self.heads, -1)).permute(1, 2, 0, 3)
            group, length = query_KGXD.shape[1:3]
            out_KYV = self._weigh(query_KGXD.flatten(1, 2)[None], row_1KTE, mask_XT.repeat(group, 1))[0]
            yield out_KYV.unflatten(1, (group, length)).permute(2, 0, 1, 3).flatten(1, 2)

    def _weigh(self, query_BKXD: torch.Tensor, row_BKTE: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        key, value = row_BKTE[..., : self.key_dim], row_BKTE[..., self.key_dim :]
        return weigh(query_BKXD, key, value, mask, self.scale, cap=self.cap)

    def _blocks(self, count: int, query_numbers: int) -> Iterator[slice]:
        """Queries in blocks of bounded memory, with at least one query."""
        size = max(self.block_bytes // (query_numbers * _WIDTH_BYTES), 1)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))
