"""`ops/drawing.py` as Triton kernels: the same tokens, bit for bit, two launches for the likeliest, seven for top-k and top-p.

    extremes    rows x splits    highest and lowest logit of each split
    narrow      rows x splits    twice: what tokens weigh, or how many there are, from each of eight logits on; the last
                                 token that is kept lies between two of them
    collect     rows x splits    the tokens that lie between them, in a list
    search      rows             the last one that is kept, from the list
    weigh       rows x splits    what kept tokens weigh
    choose      rows             the split that the number stands for, and the token in it

Sums are of whole numbers, so programs may add them in any order, and lists may be in any order too. Rows with other settings are
side by side; a kernel has nothing to do for rows that do not need it. The host never waits. Importing needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from stepwell.engine.ops import drawing
from stepwell.engine.ops.drawing import NAN_LOGITS, Draw, settings_of, weight_bits
from stepwell.engine.ops.on_triton.weights import (
    EDGES,
    INF,
    edge_of,
    enough,
    key_of,
    last_of,
    narrowed,
    place_of,
    values_of,
    weight_from,
    weights_of,
)  # fmt: skip
from stepwell.engine.passes.numbers import Send, copy, on_device

SPLIT = 4096  # tokens of one program
MOST_SPLITS = 512
LIST_BLOCK = 1024
LISTED = 2**24  # capacity of lists in tokens, 8 bytes each: longer batches are drawn in parts

_FIELDS = tl.constexpr(16)  # of a row: the length of its list, where its last token lies after each round, and that token
_NAN_LOGITS = tl.constexpr(NAN_LOGITS)


def pick(logits_BV: torch.Tensor, draws: Sequence[Draw | None], send: Send = copy) -> torch.Tensor:
    """As `ops/drawing.pick`."""
    rows, vocab = logits_BV.shape
    assert rows == len(draws), f"{len(draws)} draws from {rows} rows"
    assert logits_BV.dtype == torch.float32, f"logits must be in fp32, got {logits_BV.dtype}"
    if not rows or logits_BV.stride(1) != 1 or vocab > MOST_SPLITS * SPLIT:
        return drawing.pick(logits_BV, draws)
    together = max(LISTED // vocab, 1)
    if rows <= together:
        return _picked(logits_BV, draws, send)
    parts = [slice(start, start + together) for start in range(0, rows, together)]
    return torch.cat([_picked(logits_BV[part], draws[part], send) for part in parts])


def _picked(logits_BV: torch.Tensor, draws: Sequence[Draw | None], send: Send) -> torch.Tensor:
    (rows, vocab), device = logits_BV.shape, logits_BV.device
    splits = triton.cdiv(vocab, SPLIT)
    drawn = any(each is not None for each in draws)
    cut = any(each is not None and (each.top_k is not None or each.top_p < 1) for each in draws)
    token_B = torch.empty(rows, dtype=torch.int64, device=device)
    extreme_BS2 = torch.empty(rows, splits, 2, device=device)
    numbers = torch.empty(rows * (_FIELDS.value + splits * (1 + 2 * EDGES.value)), dtype=torch.int64, device=device)
    row_BF, sum_BS, edge_BSE, finer_BSE = numbers.split(
        [rows * _FIELDS.value, rows * splits, *[rows * splits * EDGES.value] * 2]
    )  # fmt: skip
    settings_B4 = on_device(settings_of(draws, vocab), device, send) if drawn else extreme_BS2
    about = (logits_BV, extreme_BS2, settings_B4, row_BF, vocab, splits, logits_BV.stride(0))
    sizes = {
        "SPLIT": min(SPLIT, triton.next_power_of_2(vocab)), "SPLITS": triton.next_power_of_2(splits),
        "BITS": weight_bits(vocab), "ID_BITS": vocab.bit_length(), "num_warps": 8,
        "enable_fp_fusion": False,  # weights must be those of plain torch
    }  # fmt: skip
    _extremes_kernel[rows, splits](*about, **sizes)
    if cut:
        list_BV = torch.empty(rows, vocab, dtype=torch.int64, device=device)
        _narrow_kernel[rows, splits](*about, edge_BSE, edge_BSE, AGAIN=False, **sizes)
        _narrow_kernel[rows, splits](*about, edge_BSE, finer_BSE, AGAIN=True, **sizes)
        _collect_kernel[rows, splits](*about, finer_BSE, list_BV, **sizes)
        _search_kernel[rows,](*about, list_BV, BLOCK=LIST_BLOCK, **sizes)
    if drawn:
        _weigh_kernel[rows, splits](*about, sum_BS, CUT=cut, **sizes)
    _choose_kernel[rows,](*about, sum_BS, token_B, DRAWN=drawn, CUT=cut, **sizes)
    return token_B


# ---- kernels: for all rows and splits ---------------------------------------------------------------


@triton.jit
def _extremes_kernel(
    logits, extremes, settings, rows, vocab, splits, stride,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    inside = at < vocab
    x = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    sound = tl.min(((x > -INF) & (x < INF)).to(tl.int32), axis=0)
    high = tl.max(tl.where(inside, x, -INF), axis=0)
    low = tl.where(sound == 1, tl.min(tl.where(inside, x, INF), axis=0), -INF)
    tl.store(extremes + (row * splits + split) * 2, high)
    tl.store(extremes + (row * splits + split) * 2 + 1, low)
    if split == 0:
        tl.store(rows + row * _FIELDS, 0)


@triton.jit
def _narrow_kernel(
    logits, extremes, settings, rows, vocab, splits, stride, before, sums,
    AGAIN: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high, low = _row_extremes(extremes, row, splits, SPLITS)
    rate, top_k, top_p = _row_settings(settings, row)
    if (low > -INF) & (rate > 0) & ((top_k > 0) | (top_p < 1)):
        lo, hi = key_of(tl.maximum(low, high - (BITS + 1) / rate)), key_of(high) + 1
        if top_k > 0:
            lo = key_of(low)
        number = tl.arange(0, EDGES)
        edges = edge_of(lo, hi, number)
        if AGAIN:
            totals, target = _totals(before, row, splits, SPLITS), top_k
            if top_k == 0:
                target = enough(tl.max(totals, axis=0), top_p)
            lo, hi, above = narrowed(lo, hi, tl.zeros([], tl.int64), target, totals, edges)
            edges = edge_of(lo, hi, number)
            if split == 0:
                _keep(rows + row * _FIELDS + 1, lo, hi, above, target)
        x = _split_of(logits, row, split, vocab, stride, SPLIT)
        key, value = key_of(x), values_of(x, high, rate, top_k > 0, BITS)
        for each in tl.static_range(EDGES):
            edge = tl.max(tl.where(number == each, edges, lo), axis=0)
            tl.store(sums + (row * splits + split) * EDGES + each, tl.sum(tl.where(key >= edge, value, 0), axis=0))


@triton.jit
def _collect_kernel(
    logits, extremes, settings, rows, vocab, splits, stride, sums, listed,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Tokens among which the last one is, in any order; with top-k and top-p, those that are likelier too."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high, low = _row_extremes(extremes, row, splits, SPLITS)
    rate, top_k, top_p = _row_settings(settings, row)
    if (low > -INF) & (rate > 0) & ((top_k > 0) | (top_p < 1)):
        mine = rows + row * _FIELDS
        lo, hi, above, target = _kept(mine + 1)
        lo, hi = lo.to(tl.int32), hi.to(tl.int32)
        edges = edge_of(lo, hi, tl.arange(0, EDGES))
        lo, hi, above = narrowed(lo, hi, above, target, _totals(sums, row, splits, SPLITS), edges)
        if (top_k > 0) & (top_p < 1):
            hi, above = key_of(high) + 1, tl.zeros([], tl.int64)
        if split == 0:
            _keep(mine + 5, lo, hi, above, target)
        x = _split_of(logits, row, split, vocab, stride, SPLIT)
        key = key_of(x)
        found = (key >= lo) & (key < hi)
        count = tl.sum(found.to(tl.int32), axis=0)
        if count > 0:
            start = tl.atomic_add(mine, count.to(tl.int64))
            at = listed + row * vocab + start + tl.cumsum(found.to(tl.int32), axis=0) - 1
            tl.store(at, place_of(key, split * SPLIT + tl.arange(0, SPLIT), ID_BITS), mask=found)


@triton.jit
def _weigh_kernel(
    logits, extremes, settings, rows, vocab, splits, stride, sums,
    CUT: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high, low = _row_extremes(extremes, row, splits, SPLITS)
    rate = tl.load(settings + row * 4).to(tl.float32)
    if (low > -INF) & (rate > 0):
        weight = _kept_weights(logits, rows, row, split, vocab, stride, high, rate, CUT, SPLIT, BITS, ID_BITS)
        tl.store(sums + row * splits + split, tl.sum(weight, axis=0))


# ---- kernels: for all rows --------------------------------------------------------------------------


@triton.jit
def _search_kernel(
    logits, extremes, settings, rows, vocab, splits, stride, listed,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    high, low = _row_extremes(extremes, row, splits, SPLITS)
    rate, top_k, top_p = _row_settings(settings, row)
    mine, last = rows + row * _FIELDS, tl.full([], -(2**62), tl.int64)  # so that a row that is not cut keeps everything
    if (low > -INF) & (rate > 0) & ((top_k > 0) | (top_p < 1)):
        count, mine_listed = tl.load(mine), listed + row * vocab
        lo, hi, above, target = _kept(mine + 5)
        lo, hi = lo << ID_BITS, hi << ID_BITS
        last = last_of(mine_listed, count, lo, hi, above, target, count, high, rate, top_k > 0, BLOCK, BITS, ID_BITS)
        if (top_k > 0) & (top_p < 1):
            total = weight_from(mine_listed, count, last, high, rate, BLOCK, BITS, ID_BITS)
            target = enough(total, top_p)
            last = last_of(mine_listed, count, last, hi, above, target, top_k, high, rate, top_k < 0, BLOCK, BITS, ID_BITS)
    tl.store(mine + 9, last)


@triton.jit
def _choose_kernel(
    logits, extremes, settings, rows, vocab, splits, stride, sums, tokens,
    DRAWN: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    high, low = _row_extremes(extremes, row, splits, SPLITS)
    at = tl.arange(0, SPLITS)
    token = tl.full([], _NAN_LOGITS, tl.int64)
    if low > -INF:
        split_high = tl.load(extremes + (row * splits + at) * 2, mask=at < splits, other=-INF)
        split = tl.min(tl.where(split_high == high, at, SPLITS), axis=0)
        x = _split_of(logits, row, split, vocab, stride, SPLIT)
        token = (split * SPLIT + tl.min(tl.where(x == high, tl.arange(0, SPLIT), SPLIT), axis=0)).to(tl.int64)
        if DRAWN:
            rate = tl.load(settings + row * 4).to(tl.float32)
            if rate > 0:
                weight = tl.load(sums + row * splits + at, mask=at < splits, other=0)
                total = tl.sum(weight, axis=0)
                rest = (tl.load(settings + row * 4 + 1) * total.to(tl.float64)).to(tl.int64)
                rest = tl.minimum(rest, total - 1)
                upto = tl.cumsum(weight, axis=0)
                split = tl.sum((upto <= rest).to(tl.int32), axis=0)
                rest -= tl.sum(tl.where(at < split, weight, 0), axis=0)
                weight = _kept_weights(logits, rows, row, split, vocab, stride, high, rate, CUT, SPLIT, BITS, ID_BITS)
                place = tl.sum((tl.cumsum(weight, axis=0) <= rest).to(tl.int32), axis=0)
                token = (split * SPLIT + place).to(tl.int64)
    tl.store(tokens + row, token)


# ---- what they read of a row ------------------------------------------------------------------------


@triton.jit
def _row_extremes(extremes, row, splits, SPLITS: tl.constexpr):
    at = tl.arange(0, SPLITS)
    here = extremes + (row * splits + at) * 2
    high = tl.max(tl.load(here, mask=at < splits, other=-INF), axis=0)
    low = tl.min(tl.load(here + 1, mask=at < splits, other=INF), axis=0)
    return high, low


@triton.jit
def _row_settings(settings, row):
    here = settings + row * 4
    return tl.load(here).to(tl.float32), tl.load(here + 2).to(tl.int64), tl.load(here + 3)


@triton.jit
def _split_of(logits, row, split, vocab, stride, SPLIT: tl.constexpr):
    at = split * SPLIT + tl.arange(0, SPLIT)
    return tl.load(logits + row * stride + at, mask=at < vocab, other=-INF)


@triton.jit
def _kept_weights(
    logits, rows, row, split, vocab, stride, high, rate,
    CUT: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    x = _split_of(logits, row, split, vocab, stride, SPLIT)
    weight = weights_of(x, high, rate, BITS)
    if CUT:
        place = place_of(key_of(x), split * SPLIT + tl.arange(0, SPLIT), ID_BITS)
        weight = tl.where(place >= tl.load(rows + row * _FIELDS + 9), weight, 0)
    return weight


@triton.jit
def _totals(sums, row, splits, SPLITS: tl.constexpr):
    at, edge = tl.arange(0, SPLITS)[:, None], tl.arange(0, EDGES)[None, :]
    return tl.sum(tl.load(sums + (row * splits + at) * EDGES + edge, mask=at < splits, other=0), axis=0)


@triton.jit
def _keep(fields, lo, hi, above, target):
    tl.store(fields, lo.to(tl.int64))
    tl.store(fields + 1, hi.to(tl.int64))
    tl.store(fields + 2, above)
    tl.store(fields + 3, target)


@triton.jit
def _kept(fields):
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
