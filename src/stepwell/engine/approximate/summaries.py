"""The summary that a selector keeps of the keys of a unit of tokens, from which a query finds the units worth reading.

    unit       consecutive tokens: nothing is kept of a unit before its last token is there
    row        the summary of one unit, for all key heads: a function of its keys alone, bit for bit
    score      of a token for a query; the same for tokens that the row cannot distinguish

There is one list for all heads of a layer. A token counts for what the head that wants it most would give it, as a share of all
that head gives: so no head counts for more because its numbers are larger. Computes on tensors that it is given; knows no pages
and no requests.
Axes: U units, R tokens of a unit, K key heads, H query heads, G of them per key head, D width of a key, C numbers of a row,
X queries, S sets of units: one for each query, or one for all of them.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Summary(Protocol):
    @property
    def unit(self) -> int:
        """Tokens of a unit."""
        ...

    def make(self, key_URKD: torch.Tensor) -> torch.Tensor:
        """Rows `[U, C]` in fp32. The same bits for a unit whichever units come with it."""
        ...

    def score(self, query_XHD: torch.Tensor, row_SUC: torch.Tensor, whole_X: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Scores `[X, U * R]` of all tokens, in fp32. Only the first `whole_X` units of a query are there: others have -inf.

        `scale` is what attention multiplies products with.
        """
        ...


def hidden_units(units: int, whole_X: torch.Tensor) -> torch.Tensor:
    """Which units are not there yet for a query: `[X, U]`."""
    return torch.arange(units, device=whole_X.device) >= whole_X[:, None]


def products(query_XKGD: torch.Tensor, row_SKUD: torch.Tensor) -> torch.Tensor:
    """Products of every query head with the rows of its key head: `[X, K, G, U]`, in fp32."""
    row_SKUD = row_SKUD.float()
    if len(row_SKUD) == 1 and len(query_XKGD) > 1:  # one product a key head for all queries
        count, heads, group = query_XKGD.shape[:3]
        query_KYD = query_XKGD.float().transpose(0, 1).flatten(1, 2)
        return (query_KYD @ row_SKUD[0].mT).view(heads, count, group, -1).transpose(0, 1)
    return query_XKGD.float() @ row_SKUD.mT
