"""Quest: of each unit the smallest and the largest number that its keys have in every channel.

    bound      of a unit for a query head: no key of the unit has a larger product with it
               sum over channels of max(query * smallest, query * largest)

A row has `[head][smallest | largest]`. Numbers are those of the keys, so a row is exact in whatever format the keys are kept.
Axes as in `summaries.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.engine.approximate.summaries import hidden_units, products


@dataclass(frozen=True, slots=True, kw_only=True)
class Quest:
    kv_heads: int
    unit: int = 16

    def make(self, key_URKD: torch.Tensor) -> torch.Tensor:
        return torch.cat([key_URKD.amin(dim=1), key_URKD.amax(dim=1)], dim=-1).flatten(1).float()

    def bounds(self, query_XHD: torch.Tensor, row_SUC: torch.Tensor) -> torch.Tensor:
        """`[X, H, U]`: what no product with a key of the unit exceeds, but for rounding."""
        query_XKGD = query_XHD.float().unflatten(1, (self.kv_heads, -1))
        signs_XKGY = torch.cat([query_XKGD.clamp(max=0), query_XKGD.clamp(min=0)], dim=-1)
        row_SKUY = row_SUC.unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        return products(signs_XKGY, row_SKUY).flatten(1, 2)

    def score(self, query_XHD: torch.Tensor, row_SUC: torch.Tensor, whole_X: torch.Tensor, *, scale: float) -> torch.Tensor:
        hidden_XU = hidden_units(row_SUC.shape[1], whole_X)
        bound_XHU = (self.bounds(query_XHD, row_SUC) * scale).masked_fill_(hidden_XU[:, None], -torch.inf)
        share_XU = bound_XHU.log_softmax(dim=-1).amax(dim=1).masked_fill_(hidden_XU, -torch.inf)
        return share_XU.repeat_interleave(self.unit, dim=1)
