"""Index scores and the best of them by Triton: keys are read where they lie, plain or in eight bits, and nothing is gathered.

    score      one program for a block of keys and a few queries: products in tensor cores, sums over heads in fp32
    best       the value that the last of the best has by a library's top-k, then positions in their order, ties to the earliest

Of fixed shapes and without asking the device for anything, so that a step with an index can be recorded. Importing needs Triton.
Axes as in `selection.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from stepwell.engine.ops import selection
from stepwell.engine.ops.selection import LastScores, Picked, Selection
from stepwell.engine.ops.triton_rows import power_of_two, views_of
from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import PLAIN, Powers, Rows

SCORE_BYTES = 256 << 20  # of scores at a time
_KEYS, _QUERIES = 128, 8  # of one program; singles come one by one
_BLOCK = 2048  # scores that are looked through at once
_LEAST = 16  # rows and columns of a product

TopK = Callable[[torch.Tensor, int], torch.Tensor]  # the highest values of each row, in any order


def highest(score_XT: torch.Tensor, count: int) -> torch.Tensor:
    """By torch."""
    return score_XT.topk(count, dim=-1, sorted=False).values


class TritonSelect:
    """`select` for CUDA."""

    def __init__(self, top_k: TopK = highest) -> None:
        self._top_k = top_k

    def __call__(
        self, query_NHD: torch.Tensor, weight_NH: torch.Tensor, rows: Rows, paging: Paging, *, count: int, scored: int = 0
    ) -> Selection:
        if views_of(rows) is None or paging.sight.first_seen:
            return selection.select(query_NHD, weight_NH, rows, paging, count=count, scored=scored)
        return tuple(self._pick(query_NHD, weight_NH, rows, part, count, scored) for part in paging.parts)

    def _pick(
        self, query_NHD: torch.Tensor, weight_NH: torch.Tensor, rows: Rows, part: Singles | Run, count: int, scored: int
    ) -> Picked | None:
        mine = slice(part.start, part.stop)
        if isinstance(part, Singles):
            table_SP, last_X = part.table_BP, part.position_B
        else:
            table_SP, last_X = part.pages_P[None], part.position_N
        handed = LastScores(part, scored)
        return self.pick(query_NHD[mine], weight_NH[mine], rows, table_SP, last_X, count=count, handed=handed)

    def pick(
        self, query_XHD: torch.Tensor, weight_XH: torch.Tensor, rows: Rows, table_SP: torch.Tensor, last_X: torch.Tensor, *,
        count: int, handed: LastScores | None = None,
    ) -> Picked | None:  # fmt: skip
        """`table_SP` has pages for each query, or the same ones for all; `last_X` is the last position that each may look at.
        `handed` gets the scores that are handed on.
        """
        length = table_SP.shape[1] * rows.stored_PRE.shape[1]
        if length <= count:
            return None
        size, made = max(SCORE_BYTES // (4 * length), 1), []
        for start in range(0, len(query_XHD), size):
            at = slice(start, start + size)
            table = table_SP[at] if len(table_SP) > 1 else table_SP
            score_XT = scores(query_XHD[at], weight_XH[at], rows, table, last_X[at])
            made.append(best(score_XT, count, self._top_k))
            if handed is not None:
                handed.add(score_XT)
        position_XK = made[0] if len(made) == 1 else torch.cat(made)
        return Picked(position_XK=position_XK, score_YT=None if handed is None else handed.score_YT)


def scores(
    query_XHD: torch.Tensor, weight_XH: torch.Tensor, rows: Rows, table_SP: torch.Tensor, last_X: torch.Tensor
) -> torch.Tensor:
    """`[X, T]` in fp32: the sum over heads of weight * relu(query . key), and -inf for positions behind a query's last."""
    (count, heads, width), views, page_rows = query_XHD.shape, views_of(rows), rows.stored_PRE.shape[1]
    assert views is not None and views.width + views.exact == width, f"{width=} of {rows.format}"
    length, shared = table_SP.shape[1] * page_rows, len(table_SP) == 1 and count > 1
    score_XT = torch.empty(count, length, dtype=torch.float32, device=query_XHD.device)
    queries = _QUERIES if shared else 1
    query_XHD, weight_XH = query_XHD.to(rows.dtype).contiguous(), weight_XH.float().contiguous()
    _score_kernel[(triton.cdiv(length, _KEYS), triton.cdiv(count, queries))](
        query_XHD, weight_XH, views.eight_PRE, views.scale_PRE, score_XT, table_SP, last_X, count, length,
        0 if shared else table_SP.stride(0), last_X.stride(0),
        views.eight_PRE.stride(0), views.eight_PRE.stride(1), views.scale_PRE.stride(0), views.scale_PRE.stride(1),
        PAGE=page_rows, HEADS=heads, HEAD_BLOCK=max(triton.next_power_of_2(heads), _LEAST), WIDTH=width,
        WIDTH_BLOCK=max(triton.next_power_of_2(width), _LEAST), TILE=views.tile, SCALE_AT=views.scale_at,
        QUERIES=queries, KEYS=_KEYS, PLAIN=rows.format is PLAIN, POWERS=isinstance(rows.format, Powers),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return score_XT


def best(score_XT: torch.Tensor, count: int, top_k: TopK = highest) -> torch.Tensor:
    """As `selection.best`, and changes `score_XT`: what is no number counts as the highest."""
    score_XT.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    high_XK = top_k(score_XT, count)
    least_X = high_XK.amin(dim=-1)
    room_X = (high_XK == least_X[:, None]).sum(dim=-1, dtype=torch.int32)  # for those that are level with the last
    position_XK = torch.empty(len(score_XT), count, dtype=torch.int32, device=score_XT.device)
    length = score_XT.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(length))
    _pick_kernel[(len(score_XT),)](
        score_XT, least_X, room_X, position_XK, length, count, score_XT.stride(0), BLOCK=block, num_warps=8
    )
    return position_XK


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def _score_kernel(
    query, weight, eight, scales, score, table, last, count, length,
    table_stride, last_stride, page_stride, row_stride, scale_page, scale_row,
    PAGE: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    TILE: tl.constexpr, SCALE_AT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PLAIN: tl.constexpr,
    POWERS: tl.constexpr,
):  # fmt: skip
    """A block of keys, read once for all queries of the program. With more than one query their pages are the same."""
    at, first = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.program_id(1) * QUERIES
    start, stop = tl.program_id(0) * KEYS, tl.minimum(first + QUERIES, count)
    head, channel, inside = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK), at < length
    seen_last = tl.load(last + (stop - 1) * last_stride)  # queries of one program come in their order
    reached = start <= seen_last
    page = tl.load(table + first.to(tl.int64) * table_stride + at // PAGE, mask=inside & reached, other=0).to(tl.int64)
    row = (at % PAGE).to(tl.int64)
    good = (inside & reached & (at <= seen_last))[:, None] & (channel < WIDTH)[None, :]
    stored = tl.load(eight + (page * page_stride + row * row_stride)[:, None] + channel[None, :], mask=good, other=0.0)
    if PLAIN:
        key = stored.to(query.dtype.element_ty)
    else:
        place = scales + (page * scale_page + row * scale_row)[:, None] + SCALE_AT + (channel // TILE)[None, :]
        scale = tl.load(place, mask=good, other=0)
        if POWERS:
            scale = power_of_two(scale)
        key = (stored.to(tl.float32) * scale).to(query.dtype.element_ty)
    for number in tl.static_range(QUERIES):
        x = (first + number).to(tl.int64)
        known = x < count
        here = tl.load(last + x * last_stride, mask=known, other=-1)
        if known & (start > here):
            tl.store(score + x * length + at, tl.full([KEYS], float("-inf"), tl.float32), mask=inside)
        if known & (start <= here):
            whole = (head < HEADS)[:, None] & (channel < WIDTH)[None, :]
            asked = tl.load(query + (x * HEADS + head)[:, None] * WIDTH + channel[None, :], mask=whole, other=0.0)
            counts = tl.load(weight + x * HEADS + head, mask=head < HEADS, other=0.0)
            likeness = tl.dot(asked, tl.trans(key), input_precision="ieee")
            total = tl.sum(tl.where(likeness < 0, 0.0, likeness) * counts[:, None], axis=0)
            tl.store(score + x * length + at, tl.where(at <= here, total, float("-inf")), mask=inside)


@triton.jit
def _pick_kernel(score, least, room, position, length, count, score_stride, BLOCK: tl.constexpr):
    """One query: positions above its least score, and the first that are level with it, in their order."""
    x = tl.program_id(0).to(tl.int64)
    bound, free = tl.load(least + x), tl.load(room + x)
    level_before = 0
    picked_before = 0
    start = 0
    while start < length:
        at = start + tl.arange(0, BLOCK)
        number = tl.load(score + x * score_stride + at, mask=at < length, other=float("-inf"))
        inside = at < length
        level = ((number == bound) & inside).to(tl.int32)
        among = tl.cumsum(level, axis=0) + level_before
        picked = (((number > bound) & inside) | ((level > 0) & (among <= free))).to(tl.int32)
        slot = tl.cumsum(picked, axis=0) + picked_before - 1
        tl.store(position + x * count + slot, at, mask=(picked > 0) & (slot < count))
        level_before += tl.sum(level, axis=0)
        picked_before += tl.sum(picked, axis=0)
        start += BLOCK
