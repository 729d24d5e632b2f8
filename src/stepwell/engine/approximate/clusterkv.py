"""ClusterKV: the keys of each unit in a few groups of like direction, and the mean of each group.

    made       by a few rounds of k-means with cosine similarity, from keys at equal distances: nothing is drawn
    score      of a token for a query head: the product with the mean of the token's group, as if its key were that

Every key head groups for itself. A row has `[head][mean of group 0 | 1 | ... | group of token 0 | 1 | ...]`, all as numbers of
one format: groups are few enough to be exact in any. Products are sums over one axis of fixed length, never matrix products:
their rounding may depend on how many are computed together. Axes as in `summaries.py`, and M groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.engine.approximate.summaries import hidden_units, products

ROUNDS = 4
_TINY = 1e-20
_BLOCK_NUMBERS = 64 << 20  # of products at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKV:
    kv_heads: int
    unit: int
    groups: int

    def make(self, key_URKD: torch.Tensor) -> torch.Tensor:
        _, tokens, heads, width = key_URKD.shape
        assert tokens == self.unit and heads == self.kv_heads, f"{key_URKD.shape=} {self}"
        size = max(_BLOCK_NUMBERS // (heads * tokens * self.groups * width), 1)
        rows = [self._make(block) for block in key_URKD.float().split(size)]
        return torch.cat(rows) if rows else key_URKD.new_empty(0, heads * (self.groups * width + tokens), dtype=torch.float32)

    def _make(self, key_URKD: torch.Tensor) -> torch.Tensor:
        key_UKRD = key_URKD.transpose(1, 2).contiguous()
        unit_UKRD = key_UKRD / key_UKRD.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(_TINY)
        key_UKDR = key_UKRD.mT.contiguous()
        mean_UKMD = key_UKRD[:, :, self._first(key_URKD.device)]
        for _ in range(ROUNDS):
            group_UKR = self._nearest(unit_UKRD, mean_UKMD)
            mean_UKMD = self._means(key_UKDR, group_UKR, mean_UKMD)
        group_UKR = self._nearest(unit_UKRD, mean_UKMD)
        mean_UKMD = self._means(key_UKDR, group_UKR, mean_UKMD)  # of the groups as they are kept
        return torch.cat([mean_UKMD.flatten(2), group_UKR.float()], dim=-1).flatten(1)

    def _first(self, device: torch.device) -> torch.Tensor:
        """Tokens at equal distances, in the middle of each."""
        return (torch.arange(self.groups, device=device) * 2 + 1) * self.unit // (2 * self.groups)

    def _nearest(self, unit_UKRD: torch.Tensor, mean_UKMD: torch.Tensor) -> torch.Tensor:
        length_UKM1 = mean_UKMD.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(_TINY)
        likeness_UKRM = (unit_UKRD[:, :, :, None] * (mean_UKMD / length_UKM1)[:, :, None]).sum(dim=-1)
        return likeness_UKRM.argmax(dim=-1)

    def _means(self, key_UKDR: torch.Tensor, group_UKR: torch.Tensor, before_UKMD: torch.Tensor) -> torch.Tensor:
        """An empty group keeps its mean: no token refers to it."""
        inside_UKMR = (group_UKR[:, :, None] == torch.arange(self.groups, device=group_UKR.device)[:, None]).float()
        total_UKMD = (key_UKDR[:, :, None] * inside_UKMR[:, :, :, None]).sum(dim=-1)
        count_UKM1 = inside_UKMR.sum(dim=-1, keepdim=True)
        return torch.where(count_UKM1 > 0, total_UKMD / count_UKM1.clamp_min(1), before_UKMD)

    def score(self, query_XHD: torch.Tensor, row_SUC: torch.Tensor, whole_X: torch.Tensor, *, scale: float) -> torch.Tensor:
        units = row_SUC.shape[1]
        row_SUKC = row_SUC.unflatten(2, (self.kv_heads, -1))
        mean_SUKX, group_SUKR = row_SUKC.split((row_SUKC.shape[3] - self.unit, self.unit), dim=3)
        mean_SKYD = mean_SUKX.unflatten(3, (self.groups, -1)).transpose(1, 2).flatten(2, 3)
        query_XKGD = query_XHD.unflatten(1, (self.kv_heads, -1))
        product_XKGY = products(query_XKGD, mean_SKYD) * scale
        group_SUKR = group_SUKR.long().clamp_(0, self.groups - 1)  # of units that are not there it is anything
        count_SKY = self._counts(group_SUKR).transpose(1, 2).flatten(2)
        hidden_XU = hidden_units(units, whole_X)
        hidden_XY = hidden_XU.repeat_interleave(self.groups, dim=1)
        weight_XKGY = (product_XKGY + count_SKY.log()[:, :, None]).masked_fill_(hidden_XY[:, None, None], -torch.inf)
        share_XKY = (product_XKGY - weight_XKGY.logsumexp(dim=-1, keepdim=True)).amax(dim=2)
        at_U11 = torch.arange(units, device=row_SUC.device)[:, None, None] * self.groups
        at_SKT = (group_SUKR + at_U11).transpose(1, 2).flatten(2)  # which of all means a token's is
        score_XT = share_XKY.gather(2, at_SKT.expand(len(query_XHD), -1, -1)).amax(dim=1)
        return score_XT.masked_fill_(hidden_XU.repeat_interleave(self.unit, dim=1), -torch.inf)

    def _counts(self, group_SUKR: torch.Tensor) -> torch.Tensor:
        """How many tokens each group has: `[S, U, K, M]`."""
        one = torch.ones((), device=group_SUKR.device).expand(group_SUKR.shape)
        return torch.zeros(*group_SUKR.shape[:3], self.groups, device=group_SUKR.device).scatter_add_(3, group_SUKR, one)
