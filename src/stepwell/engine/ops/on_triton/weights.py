"""What the kernels of `drawing.py` share: what a token weighs, the order of tokens, and the last one that is kept.

    key       int32, in the order of the logits
    place     int64, the key with the token's id behind it: of equally likely tokens, the one with the smaller id is higher

Functions for kernels; launches nothing. Weights are those of `ops/drawing.py`, if kernels are built without fused products
and sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepwell.engine.ops.drawing import MOST_OCTAVES, POWERS

EDGES = tl.constexpr(8)
INF = tl.constexpr(float("inf"))
_MOST = tl.constexpr(float(MOST_OCTAVES))
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(power) for power in POWERS)


@triton.jit
def weights_of(x, high, rate, BITS: tl.constexpr):
    octaves = tl.minimum((high - x) * rate, _MOST)
    whole = tl.floor(octaves)
    part = octaves - whole - 0.5
    weight = part * _P0
    weight = (weight + _P1) * part
    weight = (weight + _P2) * part
    weight = (weight + _P3) * part
    weight = (weight + _P4) * part
    weight = (weight + _P5) * (1 << BITS)
    return weight.to(tl.int64) >> whole.to(tl.int64)


@triton.jit
def values_of(x, high, rate, counts, BITS: tl.constexpr):
    """What is summed: weights, or 1 for every token where tokens are counted."""
    return tl.where(counts, (x > -INF).to(tl.int64), weights_of(x, high, rate, BITS))


@triton.jit
def key_of(x):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # no -0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key, token, ID_BITS: tl.constexpr):
    return (key.to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - token)


@triton.jit
def edge_of(lo, hi, number):
    """One of the keys that part those from `lo` up to `hi`, evenly by the logit; the first is `lo`."""
    first, last = logit_of(lo), logit_of(hi - 1)
    key = key_of(first + (last / EDGES - first / EDGES) * number)
    return tl.where(number == 0, lo, tl.minimum(tl.maximum(key, lo), hi - 1))


@triton.jit
def enough(total, top_p):
    """The least whole number that is `top_p` of the total."""
    exact = total.to(tl.float64) * top_p
    below = exact.to(tl.int64)
    return tl.maximum(below + (below.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def narrowed(lo, hi, above, target, totals, edges):
    """Between which edges the last token is, and what lies above: where totals from an edge on reach the target."""
    reached = totals >= target
    least = tl.max(tl.where(reached, edges, lo), axis=0)
    most = tl.min(tl.where(reached, hi, edges), axis=0)
    return least, most, tl.max(tl.where(reached, above, totals), axis=0)


@triton.jit
def last_of(listed, count, lo, hi, above, target, inside, high, rate, counts, BLOCK: tl.constexpr, BITS: tl.constexpr,
            ID_BITS: tl.constexpr):  # fmt: skip
    """The lowest place that is kept, of the `inside` tokens of a list from `lo` up to `hi`. Tokens above may not be listed."""
    number = tl.arange(0, EDGES)
    unlisted, from_lo, from_hi = above, inside, tl.zeros([], tl.int64)
    while (hi - lo > 1) & (from_lo - from_hi > 1):
        edges = tl.minimum(lo + (hi - lo + EDGES) // (EDGES + 1) * (number + 1), hi)
        totals, counted = tl.zeros([EDGES], tl.int64) + unlisted, tl.zeros([EDGES], tl.int64)
        start = tl.zeros([], tl.int64)
        while start < count:
            at = start + tl.arange(0, BLOCK)
            place = tl.load(listed + at, mask=at < count, other=lo)
            value = values_of(logit_of((place >> ID_BITS).to(tl.int32)), high, rate, counts, BITS)
            reaches = (place[:, None] >= edges[None, :]) & (at < count)[:, None]
            totals += tl.sum(tl.where(reaches, value[:, None], 0), axis=0)
            counted += tl.sum(reaches.to(tl.int64), axis=0)
            start += BLOCK
        reached = totals >= target
        from_lo = tl.min(tl.where(reached, counted, from_lo), axis=0)
        from_hi = tl.max(tl.where(reached, from_hi, counted), axis=0)
        lo, hi, above = narrowed(lo, hi, above, target, totals, edges)
    return lo


@triton.jit
def weight_from(listed, count, last, high, rate, BLOCK: tl.constexpr, BITS: tl.constexpr, ID_BITS: tl.constexpr):
    """What the tokens of a list weigh, from a place on."""
    total, start = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    while start < count:
        at = start + tl.arange(0, BLOCK)
        place = tl.load(listed + at, mask=at < count, other=last)
        weight = weights_of(logit_of((place >> ID_BITS).to(tl.int32)), high, rate, BITS)
        total += tl.sum(tl.where((place >= last) & (at < count), weight, 0), axis=0)
        start += BLOCK
    return total
