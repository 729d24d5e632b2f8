"""Index scores and the best of them by Triton: keys are read where they lie, plain or in eight bits, and nothing is gathered.

    score      singles: one program for some blocks of a request's keys, whose query it reads once
               runs: one program for a block of keys, and a few queries over it
               products in tensor cores, sums over heads in fp32
               keys in eight bits are multiplied in fp16, which they become in one instruction, and into which queries fit after
               each head's was multiplied by a power of two
    best       the value that the last of the best has by a library's top-k, then positions in their order, ties to the earliest:
               counted in blocks, then written in blocks

Shapes are fixed and nothing waits for the device, so that a step with an index can be captured. Importing needs Triton.
Axes as in `ops/selection.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_triton.rows import power_of_two, views_of
from stepwell.engine.ops.selection import LastScores, Picked, Selection
from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import PLAIN, Powers, Rows

SCORE_BYTES = 256 << 20  # of scores at a time
_KEYS, _QUERIES = 128, 8  # of one program, where several queries look at the same pages
_SINGLE_KEYS, _MOST_BLOCKS = 64, 16  # of a block for singles, and blocks of a program
_SINGLE_WARPS, _SINGLE_STAGES = 4, 2  # on an H200 a third stage took 15 % longer
_FULL_PROGRAMS = 528  # four for each core of an H200: with fewer of them, programs have fewer blocks
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
        if views_of(rows) is None:
            raise NoKernel("rows of this layout")
        if paging.sight.first_seen:
            raise NoKernel("contexts that begin behind their first token")
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
            made.append(_best(score_XT, count, self._top_k))
            if handed is not None:
                handed.add(score_XT)
        position_XK = made[0] if len(made) == 1 else torch.cat(made)
        return Picked(position_XK=position_XK, score_YT=None if handed is None else handed.score_YT)


def scores(
    query_XHD: torch.Tensor, weight_XH: torch.Tensor, rows: Rows, table_SP: torch.Tensor, last_X: torch.Tensor
) -> torch.Tensor:
    """`[X, T]` in fp32: the sum over heads of weight * relu(query . key), and -inf for positions behind a query's last. What is
    no number is inf.
    """
    (count, heads, width), views, page_rows = query_XHD.shape, views_of(rows), rows.stored_PRE.shape[1]
    assert views is not None and views.width + views.exact == width, f"{width=} of {rows.format}"
    length, shared = table_SP.shape[1] * page_rows, len(table_SP) == 1 and count > 1
    score_XT = torch.empty(count, length, dtype=torch.float32, device=query_XHD.device)
    query_XHD, weight_XH = query_XHD.to(rows.dtype).contiguous(), weight_XH.float().contiguous()
    one_scale = rows.format is not PLAIN and width <= views.tile
    given = (
        query_XHD, weight_XH, views.eight_PRE, views.scale_PRE, score_XT, table_SP, last_X, count, length,
        0 if shared else table_SP.stride(0), last_X.stride(0), views.eight_PRE.stride(0), views.scale_PRE.stride(0),
    )  # fmt: skip
    sizes = {
        # Strides of rows are part of what is compiled: only so is it known that four bytes of a key may be read at once.
        "ROW": views.eight_PRE.stride(1), "SCALE_ROW": views.scale_PRE.stride(1),
        "PAGE": page_rows, "HEADS": heads, "HEAD_BLOCK": max(triton.next_power_of_2(heads), _LEAST), "WIDTH": width,
        "WIDTH_BLOCK": max(triton.next_power_of_2(width), _LEAST), "TILE": views.tile, "SCALE_AT": views.scale_at,
        "PLAIN": rows.format is PLAIN, "POWERS": isinstance(rows.format, Powers),
        "ONE_SCALE": one_scale, "HALF": one_scale and query_XHD.dtype is torch.bfloat16,
    }  # fmt: skip
    if shared:
        grid = (triton.cdiv(length, _KEYS), triton.cdiv(count, _QUERIES))
        _score_run_kernel[grid](*given, **sizes, KEYS=_KEYS, QUERIES=_QUERIES, num_warps=8, num_stages=2)
    else:
        blocks = triton.cdiv(length, _SINGLE_KEYS)
        each = _blocks_each(blocks, count)
        grid = (triton.cdiv(blocks, each), count)
        _score_single_kernel[grid](
            *given, **sizes, KEYS=_SINGLE_KEYS, BLOCKS=each, num_warps=_SINGLE_WARPS, num_stages=_SINGLE_STAGES
        )
    return score_XT


def _blocks_each(blocks: int, singles: int) -> int:
    """Blocks of keys for one program: many, so that queries are read seldom, while there are programs enough for the device."""
    each = _MOST_BLOCKS
    while each > 1 and triton.cdiv(blocks, each) * singles < _FULL_PROGRAMS:
        each //= 2
    return each


def best(score_XT: torch.Tensor, count: int, top_k: TopK = highest) -> torch.Tensor:
    """As `ops/selection.best`, and changes `score_XT`: what is no number counts as the highest."""
    score_XT.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return _best(score_XT, count, top_k)


def _best(score_XT: torch.Tensor, count: int, top_k: TopK) -> torch.Tensor:
    """For scores without NaN."""
    (queries, length), device = score_XT.shape, score_XT.device
    high_XK = top_k(score_XT, count).contiguous()
    block = min(_BLOCK, triton.next_power_of_2(length))
    blocks = triton.cdiv(length, block)
    found_XB2 = torch.empty(queries, blocks, 2, dtype=torch.int32, device=device)
    position_XK = torch.empty(queries, count, dtype=torch.int32, device=device)
    sizes = {"COUNT_BLOCK": triton.next_power_of_2(count), "BLOCK": block, "num_warps": 8}
    lengths = length, count, score_XT.stride(0)
    _count_kernel[(queries, blocks)](score_XT, high_XK, found_XB2, *lengths, **sizes)
    most = triton.next_power_of_2(blocks)
    _pick_kernel[(queries, blocks)](score_XT, high_XK, found_XB2, position_XK, *lengths, **sizes, BLOCKS=most)
    return position_XK


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def _keys_at(
    at, good, eight, scales, table, page_stride, scale_page,
    ROW: tl.constexpr, SCALE_ROW: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    TILE: tl.constexpr, SCALE_AT: tl.constexpr, PLAIN: tl.constexpr, POWERS: tl.constexpr, ONE_SCALE: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Keys `[K, D]` by their positions, as `TYPE`, and what each is still to be multiplied by; zeros where they are not `good`.
    Eight bits are numbers of that type as they are: a key's one scale can wait for its score.
    """
    channel = tl.arange(0, WIDTH_BLOCK)
    page = tl.load(table + at // PAGE, mask=good, other=0).to(tl.int64)
    row = at % PAGE
    whole = good[:, None]
    if WIDTH < WIDTH_BLOCK:
        whole = whole & (channel < WIDTH)[None, :]
    stored = tl.load(eight + (page * page_stride + row * ROW)[:, None] + channel[None, :], mask=whole, other=0.0)
    factor = tl.full(at.shape, 1.0, tl.float32)
    if PLAIN:
        key = stored.to(TYPE)
    elif ONE_SCALE:
        scale = tl.load(scales + page * scale_page + row * SCALE_ROW + SCALE_AT, mask=good, other=0)
        key, factor = stored.to(TYPE), (power_of_two(scale) if POWERS else scale)
    else:
        place = scales + (page * scale_page + row * SCALE_ROW)[:, None] + SCALE_AT + (channel // TILE)[None, :]
        scale = tl.load(place, mask=whole, other=0)
        if POWERS:
            scale = power_of_two(scale)
        key = (stored.to(tl.float32) * scale).to(TYPE)
    return key, factor


@triton.jit
def _weighed(key, factor, asked, counts):
    """Scores of keys for one query: over heads, the sum of weight * relu(product). What is no number is inf."""
    likeness = tl.dot(key, tl.trans(asked), input_precision="ieee")
    total = tl.sum(tl.where(likeness < 0, 0.0, likeness) * counts[None, :], axis=1) * factor
    return tl.where(total == total, total, float("inf"))


@triton.jit
def _asked_at(
    query, weight, x,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One query `[H, D]`, and the weights of its heads. In fp16 if `HALF`: times the power of two that brings a head's largest
    channel below 2^15. What is then too small for fp16 is 2^-29 of the largest or less; weights take the power back.
    """
    head, channel = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    whole = (head < HEADS)[:, None] & (channel < WIDTH)[None, :]
    asked = tl.load(query + (x * HEADS + head)[:, None] * WIDTH + channel[None, :], mask=whole, other=0.0)
    counts = tl.load(weight + x * HEADS + head, mask=head < HEADS, other=0.0)
    if HALF:
        largest = tl.max(tl.abs(asked.to(tl.float32)), axis=1)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        up = tl.minimum(tl.maximum(127 + 141 - exponent, 27), 227)  # within a power that fp32 has both ways
        asked = (asked.to(tl.float32) * power_of_two(up)[:, None]).to(tl.float16)
        counts = counts * power_of_two(254 - up)
    return asked, counts


@triton.jit
def _score_single_kernel(
    query, weight, eight, scales, score, table, last, count, length,
    table_stride, last_stride, page_stride, scale_page,
    ROW: tl.constexpr, SCALE_ROW: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TILE: tl.constexpr, SCALE_AT: tl.constexpr, KEYS: tl.constexpr,
    PLAIN: tl.constexpr, POWERS: tl.constexpr, ONE_SCALE: tl.constexpr, HALF: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Some blocks of one request's keys. Nothing is read behind its last position."""
    x = tl.program_id(1).to(tl.int64)
    first, here = tl.program_id(0) * (BLOCKS * KEYS), tl.load(last + x * last_stride).to(tl.int32)
    if first <= here:
        asked, counts = _asked_at(query, weight, x, HEADS, HEAD_BLOCK, WIDTH, WIDTH_BLOCK, HALF)
        for block in range(BLOCKS):
            at = first + block * KEYS + tl.arange(0, KEYS)
            good = (at <= here) & (at < length)
            key, factor = _keys_at(
                at, good, eight, scales, table + x * table_stride, page_stride, scale_page,
                ROW, SCALE_ROW, PAGE, WIDTH, WIDTH_BLOCK, TILE, SCALE_AT, PLAIN, POWERS, ONE_SCALE,
                tl.float16 if HALF else query.dtype.element_ty,
            )  # fmt: skip
            total = _weighed(key, factor, asked, counts)
            tl.store(score + x * length + at, tl.where(good, total, float("-inf")), mask=at < length)
    else:
        for block in range(BLOCKS):
            at = first + block * KEYS + tl.arange(0, KEYS)
            tl.store(score + x * length + at, tl.full([KEYS], float("-inf"), tl.float32), mask=at < length)


@triton.jit
def _score_run_kernel(
    query, weight, eight, scales, score, table, last, count, length,
    table_stride, last_stride, page_stride, scale_page,
    ROW: tl.constexpr, SCALE_ROW: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, TILE: tl.constexpr, SCALE_AT: tl.constexpr, KEYS: tl.constexpr,
    PLAIN: tl.constexpr, POWERS: tl.constexpr, ONE_SCALE: tl.constexpr, HALF: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """A block of keys, read once for all queries of the program, whose pages are the same."""
    start, first = tl.program_id(0) * KEYS, tl.program_id(1) * QUERIES
    at = start + tl.arange(0, KEYS)
    inside = at < length
    furthest = tl.load(last + (tl.minimum(first + QUERIES, count) - 1) * last_stride)  # queries come in their order
    key, factor = _keys_at(
        at, inside & (at <= furthest), eight, scales, table, page_stride, scale_page,
        ROW, SCALE_ROW, PAGE, WIDTH, WIDTH_BLOCK, TILE, SCALE_AT, PLAIN, POWERS, ONE_SCALE,
        tl.float16 if HALF else query.dtype.element_ty,
    )  # fmt: skip
    for number in tl.static_range(QUERIES):
        x = (first + number).to(tl.int64)
        known = x < count
        here = tl.load(last + x * last_stride, mask=known, other=-1)
        if known & (start > here):
            tl.store(score + x * length + at, tl.full([KEYS], float("-inf"), tl.float32), mask=inside)
        if known & (start <= here):
            asked, counts = _asked_at(query, weight, x, HEADS, HEAD_BLOCK, WIDTH, WIDTH_BLOCK, HALF)
            total = _weighed(key, factor, asked, counts)
            tl.store(score + x * length + at, tl.where(at <= here, total, float("-inf")), mask=inside)


@triton.jit
def _bound(high, x, count, COUNT_BLOCK: tl.constexpr):
    """The least of a query's highest scores, and how many of them are level with it."""
    number = tl.arange(0, COUNT_BLOCK)
    value = tl.load(high + x * count + number, mask=number < count, other=float("inf"))
    least = tl.min(value, axis=0)
    return least, tl.sum(((value == least) & (number < count)).to(tl.int32), axis=0)


@triton.jit
def _count_kernel(
    score, high, found, length, count, score_stride, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one query's scores: how many are above its least, and how many are level with it."""
    x, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least, _ = _bound(high, x, count, COUNT_BLOCK)
    at = block * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(score + x * score_stride + at, mask=at < length, other=float("-inf"))
    place = found + (x * tl.num_programs(1) + block) * 2
    tl.store(place, tl.sum((number > least).to(tl.int32), axis=0))
    tl.store(place + 1, tl.sum(((number == least) & (at < length)).to(tl.int32), axis=0))


@triton.jit
def _pick_kernel(
    score, high, found, position, length, count, score_stride, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One block of one query's scores: positions above its least score, and the first that are level with it, in their order."""
    x, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    least, left = _bound(high, x, count, COUNT_BLOCK)
    other = tl.arange(0, BLOCKS)
    place = found + (x * tl.num_programs(1) + other) * 2
    above_before = tl.sum(tl.load(place, mask=other < block, other=0), axis=0)
    level_before = tl.sum(tl.load(place + 1, mask=other < block, other=0), axis=0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(score + x * score_stride + at, mask=at < length, other=float("-inf"))
    level = ((number == least) & (at < length)).to(tl.int32)
    among = tl.cumsum(level, axis=0) + level_before
    picked = ((number > least) | ((level > 0) & (among <= left))).to(tl.int32)
    slot = tl.cumsum(picked, axis=0) - 1 + above_before + tl.minimum(level_before, left)
    tl.store(position + x * count + slot, at, mask=(picked > 0) & (slot < count))
