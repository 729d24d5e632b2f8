"""Attention over rows that an index selects: for each query the best of the rows that it may attend to, gathered, in their order.

    score      of a row for a query: the sum over index heads of weight * relu(query . key), in fp32
    picked     the `count` best rows that a query may attend to, ties to the earliest; all of them if there are no more

Never masks over everything: what is not picked is not read. Takes a few queries at a time, so that scores and gathered rows need
a bounded piece of memory, however long the context. Axes: N tokens, H heads, D width of an index key, C channels of a row,
X queries of a part of the batch, K rows each looks at, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stepwell.engine.ops.attention import attend_part, weigh
from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import Rows

BLOCK_BYTES = 64 << 20  # of scores, or of gathered rows
_WIDTH_BYTES = 4  # what is counted for each number, whatever it is computed in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picked:
    """The positions that each of X queries attends to, ascending. Positions that it may not see come after the others.

    The part's first `first` queries attend to everything, and are not among the X. `score_YT` are the scores of the last Y
    queries, if requested: -inf for positions that they may not see, and NaN counts as the highest.
    """

    position_XK: torch.Tensor
    first: int = 0
    score_YT: torch.Tensor | None = None


Selection = tuple[
    Picked | None, ...
]  # of each part of a batch, singles first; None: no query can attend to more rows than it may pick


def without_scores(selection: Selection) -> Selection:
    return tuple(None if picked is None else replace(picked, score_YT=None) for picked in selection)


Best = Callable[[torch.Tensor, int], torch.Tensor]  # positions of the highest scores of each row, as `best`


class Select(Protocol):
    def __call__(
        self, query_NHD: torch.Tensor, weight_NH: torch.Tensor, rows: Rows, paging: Paging, *, count: int, scored: int = 0
    ) -> Selection: ...


class AttendSelected(Protocol):
    def __call__(
        self, query_NHC: torch.Tensor, rows: Rows, paging: Paging, selection: Selection, *, rank: int, scale: float
    ) -> torch.Tensor: ...


def select(
    query_NHD: torch.Tensor, weight_NH: torch.Tensor, rows: Rows, paging: Paging, *, count: int, scored: int = 0,
    block_bytes: int = BLOCK_BYTES,
) -> Selection:  # fmt: skip
    """The `count` rows of `rows` that each query scores best. Reads index keys, and changes nothing.

    Also returns the scores of the last `scored` queries of every run, and of all singles.
    """
    return tuple(_pick(query_NHD, weight_NH, rows, part, count, scored, block_bytes) for part in paging.parts)


def attend_selected(
    query_NHC: torch.Tensor, rows: Rows, paging: Paging, selection: Selection, *, rank: int, scale: float,
    block_bytes: int = BLOCK_BYTES,
) -> torch.Tensor:  # fmt: skip
    """The attention of each query over the first `rank` channels of its picked rows: `[N, H, R]`."""
    seen = []
    for part, picked in zip(paging.parts, selection, strict=True):
        if picked is None:
            mine_NHC = query_NHC[part.start : part.stop]
            seen.append(attend_part(mine_NHC, rows, part, heads=1, key_dim=None, scale=scale)[..., :rank])
        else:
            seen.extend(_look(query_NHC, rows, part, picked, rank, scale, block_bytes))
    return seen[0] if len(seen) == 1 else torch.cat(seen)


def best(score_XT: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the `count` highest scores, ascending, `[X, K]`. Ties go to the earliest. NaN is highest, so that it shows."""
    score_XT = score_XT.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least_X1 = score_XT.topk(count, dim=-1).values[:, -1:]
    above_XT, level_XT = score_XT > least_X1, score_XT == least_X1
    left_X1 = count - above_XT.sum(dim=-1, keepdim=True)
    picked_XT = above_XT | (level_XT & (level_XT.cumsum(dim=-1) <= left_X1))
    slot_XT = (picked_XT.cumsum(dim=-1) - 1).masked_fill_(~picked_XT, count)  # the others go to a last slot, which is cut off
    position_XT = torch.arange(score_XT.shape[1], device=score_XT.device).expand_as(slot_XT)
    return slot_XT.new_zeros(len(slot_XT), count + 1).scatter_(1, slot_XT, position_XT)[:, :count]


class LastScores:
    """Scores of a part's last queries, from blocks that come one after the other: no more is kept than is handed on."""

    def __init__(self, part: Singles | Run, scored: int) -> None:
        """`scored` as in `select`."""
        self._most = part.stop - part.start if scored and isinstance(part, Singles) else scored
        self.score_YT: torch.Tensor | None = None

    def add(self, score_XT: torch.Tensor) -> None:
        if not self._most:
            return
        last_YT = score_XT[-self._most :]
        if self.score_YT is not None:
            last_YT = torch.cat([self.score_YT, last_YT])[-self._most :]
        self.score_YT = last_YT.clone() if len(last_YT) < len(score_XT) else last_YT


# ---- inside -----------------------------------------------------------------------------------------


def _pick(
    query_NHD: torch.Tensor, weight_NH: torch.Tensor, rows: Rows, part: Singles | Run, count: int, scored: int, block_bytes: int
) -> Picked | None:
    mask_XT = _mask(part)
    length, (heads, width) = mask_XT.shape[1], query_NHD.shape[1:]
    if length <= count:
        return None
    picked, scores = [], LastScores(part, scored)
    for block, key in _keys(rows, part, _blocks(part, length * (heads + width) * _WIDTH_BYTES, block_bytes)):
        at = slice(part.start + block.start, part.start + block.stop)
        likeness_XHT = (query_NHD[at].float() @ key.mT).relu_()
        score_XT = (weight_NH[at, None].float() @ likeness_XHT)[:, 0] + mask_XT[block]
        picked.append(best(score_XT, count))
        scores.add(score_XT)
    return Picked(position_XK=torch.cat(picked), score_YT=scores.score_YT)


def _keys(rows: Rows, part: Singles | Run, blocks: Iterator[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Index keys for each block of queries: those of its own requests `[X, T, D]`, or the same `[T, D]` for all of a run."""
    if isinstance(part, Singles):
        for block in blocks:
            yield block, rows.whole(part.table_BP[block]).flatten(1, 2).float()
    else:
        key_TD = rows.whole(part.pages_P).flatten(0, 1).float()
        yield from ((block, key_TD) for block in blocks)


def _look(
    query_NHC: torch.Tensor, rows: Rows, part: Singles | Run, picked: Picked, rank: int, scale: float, block_bytes: int
) -> Iterator[torch.Tensor]:
    page_rows, (count, channels) = rows.stored_PRE.shape[1], (picked.position_XK.shape[1], query_NHC.shape[2])
    for block in _blocks(part, count * channels * _WIDTH_BYTES, block_bytes):
        position_XK = picked.position_XK[block].long()
        index_XK, row_XK = position_XK // page_rows, position_XK % page_rows
        page_XK = part.table_BP[block].gather(1, index_XK) if isinstance(part, Singles) else part.pages_P[index_XK]
        row_X1KC = rows.some(page_XK, row_XK)[:, None]
        query_X1HC = query_NHC[part.start + block.start : part.start + block.stop, None]
        mask_XK = _mask(part)[block].gather(1, position_XK)
        yield weigh(query_X1HC, row_X1KC, row_X1KC[..., :rank], mask_XK[:, None, None], scale)[:, 0]


def _mask(part: Singles | Run) -> torch.Tensor:
    return part.mask_BT if isinstance(part, Singles) else part.mask_NT


def _blocks(part: Singles | Run, query_bytes: int, block_bytes: int) -> Iterator[slice]:
    """Queries of a part in blocks of up to `block_bytes`, with at least one query."""
    count, size = part.stop - part.start, max(block_bytes // query_bytes, 1)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
