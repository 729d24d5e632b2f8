"""The likelihoods of tokens, for all rows of a pass at once, as `logprobs` and `prompt_logprobs` report them. Plain torch.

    of each row     logprob | rank | K ids of the likeliest tokens | K logprobs of these        in 32 bits each

All of it comes to the host in one copy, after the tokens. What a row gets depends on its own logits alone, not on which rows it
shares a pass with: of equally likely tokens the smaller id comes first. The host never waits.

Axes: L rows, V tokens of the vocabulary, K alternatives, X numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepwell.engine.ops.drawing import likeliest

ROWS_TOGETHER = 2**22  # logits: the memory this needs does not grow with the batch


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The logprob of one token, its rank from 1 on, and the likeliest tokens with their logprobs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def likelihoods(logits_LV: torch.Tensor, token_L: torch.Tensor, count: int) -> torch.Tensor:
    """The likelihood of one token of each row, with `count` alternatives: `[L, X]` in int32, for `read_likelihoods`."""
    rows = max(ROWS_TOGETHER // logits_LV.shape[1], 1)
    parts = zip(logits_LV.split(rows), token_L.split(rows), strict=True)
    return torch.cat([_packed(logits, token, min(count, logits.shape[1])) for logits, token in parts])


def _packed(logits_LV: torch.Tensor, token_L: torch.Tensor, count: int) -> torch.Tensor:
    share_LV = logits_LV.float().log_softmax(-1)
    mine_L1 = share_LV.gather(1, token_L[:, None])
    rank_L1 = (share_LV > mine_L1).sum(-1, keepdim=True, dtype=torch.int32) + 1
    if not count:
        return torch.cat([mine_L1.view(torch.int32), rank_L1], dim=1)
    id_LK = likeliest(share_LV, count)
    top_LK = share_LV.gather(1, id_LK)
    return torch.cat([mine_L1.view(torch.int32), rank_L1, id_LK.int(), top_LK.view(torch.int32)], dim=1)


def read_likelihoods(numbers: Sequence[int], counts: Sequence[int]) -> list[Likelihood]:
    """The rows of `likelihoods`, back to back; of each its own number of alternatives, the likeliest of those there are."""
    row_LX = np.array(numbers, np.int32).reshape(len(counts), -1)
    most = (row_LX.shape[1] - 2) // 2
    share_LX, id_LX = row_LX.view(np.float32).tolist(), row_LX.tolist()
    found = []
    for ids, shares, count in zip(id_LX, share_LX, counts, strict=True):
        top = zip(ids[2 : 2 + count], shares[2 + most : 2 + most + count], strict=False)
        found.append(Likelihood(shares[0], ids[1], tuple(top)[:most]))
    return found
