"""One token for each row of logits: the likeliest, or one drawn by temperature, top-k and top-p. Plain torch on every device.

    weights          | 3 | 0 | 9 | 1 | 0 | 4 |      whole numbers; tokens that are cut away weigh 0
    running sums     | 3 | 3 |12 |13 |13 |17 |      a random number of 0.5 is 8 of 17, and the third is the first above 8

What a row draws depends on its logits and its settings alone, and neither on the rest of the batch nor on the device. Weights
are whole numbers, less than 2**52 in all, so their sums are exact in whatever order they are made. A weight is made by products
and sums in fp32, each rounded by itself, and by no library's `exp`: those differ in the last bit. The host never waits.

Axes: B rows, V tokens of the vocabulary, C candidates (all tokens, or the likeliest), N weights, P parts, S weights in a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import e, log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from stepwell.engine.passes.numbers import on_device

NAN_LOGITS = -1  # instead of a token: the row holds something other than numbers
DRAWN_TOGETHER = 2**22  # logits: what drawing needs of memory does not grow with the batch
EXACT_BITS = 52  # whole numbers up to this are exact in float64, with one bit to spare
LONG_ROW = 2**14
DIGITS = {False: ((21, 11), (10, 11), (0, 10)), True: ((16, 16), (0, 16))}  # of 32 bits, for short and long rows: from, and bits
BLOCK = 256  # tokens; only the likeliest blocks are searched
PART = 128  # weights that are summed before one of them is looked for: running sums of long rows are slow on a GPU

MOST_OCTAVES = 63  # halvings, after which a weight is nothing
# 2**-(x + 0.5) for x from -0.5 to 0.5, highest power first: relative error 2e-7, never above 1. fp32 holds each exactly.
POWERS = (
    -0.0009387883474119008, 0.006841640919446945, -0.039249468594789505, 0.1698620319366455, -0.49012893438339233,
    0.7071068286895752,
)  # fmt: skip


class Draw(NamedTuple):
    """How one token is drawn. Its `number` is from [0, 1)."""

    temperature: float
    top_k: int | None
    top_p: float
    number: float

    @property
    def rate(self) -> float:
        """Octaves for a difference of 1 between logits; fp32 holds it exactly."""
        return float(np.float32(log2(e) / self.temperature))


Pick = Callable[[torch.Tensor, Sequence[Draw | None]], torch.Tensor]


def pick(logits_BV: torch.Tensor, draws: Sequence[Draw | None]) -> torch.Tensor:
    """A token for each row of logits (fp32): `[B]`. The likeliest where there is no draw, and of equally likely ones the first.

    Rows are cut to the `top_k` likeliest tokens, then to the fewest of these that make up `top_p` of what they weigh together. Of
    equally likely tokens those with the smaller ids are kept. Weights are rounded down to whole numbers: tokens that are less
    likely than the likeliest by 2**-33, in a vocabulary of 262,144, are never drawn. A row that holds something other than
    numbers gives NAN_LOGITS.
    """
    assert len(logits_BV) == len(draws), f"{len(draws)} draws from {len(logits_BV)} rows"
    assert logits_BV.dtype == torch.float32, f"logits must be in fp32, got {logits_BV.dtype}"
    low_B, high_B = logits_BV.amin(dim=-1), logits_BV.amax(dim=-1)  # faster on a CPU than both in one
    sound_B = (low_B > -torch.inf) & (high_B < torch.inf)  # neither holds for what is no number
    token_B = logits_BV.argmax(dim=-1) if None in draws else torch.zeros_like(low_B, dtype=torch.int64)
    for rows in _rows_alike(draws, most=max(DRAWN_TOGETHER // logits_BV.shape[1], 1)):
        alike = [each for row in rows if (each := draws[row]) is not None]
        if len(rows) == len(draws):
            token_B = _drawn(logits_BV, high_B[:, None], alike)
        else:
            row_B = on_device(rows, logits_BV.device)
            token_B.index_copy_(0, row_B, _drawn(logits_BV[row_B], high_B[row_B, None], alike))
    return token_B.where(sound_B, NAN_LOGITS)


def settings_of(draws: Sequence[Draw | None], vocab: int) -> npt.NDArray[np.float64]:
    """Rate, number, top-k (0 for all) and top-p of each row; a rate of 0 for the likeliest token."""
    settings = [
        (0.0, 0.0, 0, 1.0) if each is None else (each.rate, each.number, min(each.top_k or 0, vocab), each.top_p)
        for each in draws
    ]
    return np.array(settings, np.float64)


def _rows_alike(draws: Sequence[Draw | None], most: int) -> Iterator[list[int]]:
    """Rows that are drawn together: they are cut in the same way, or not at all."""
    alike: dict[tuple[bool, bool], list[int]] = {}
    for row, each in enumerate(draws):
        if each is not None:
            alike.setdefault((each.top_k is None, each.top_k is None and each.top_p == 1), []).append(row)
    for rows in alike.values():
        yield from (rows[start : start + most] for start in range(0, len(rows), most))


def _drawn(logits_BV: torch.Tensor, high_B1: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    vocab = logits_BV.shape[1]
    settings = settings_of(draws, vocab)
    rate_B1, number_B1, top_k_B1, top_p_B1 = on_device(settings, logits_BV.device).split(1, dim=1)
    if most := int(settings[:, 2].max()):
        id_BC = likeliest(logits_BV, most)
        weight_BC = _weights(logits_BV.gather(1, id_BC), high_B1, rate_B1, vocab)
        weight_BC = weight_BC.where(torch.arange(most, device=weight_BC.device) < top_k_B1, 0)
        before_BC = weight_BC.cumsum(-1).sub_(weight_BC)
        weight_BC = weight_BC.where(before_BC < _enough(weight_BC, top_p_B1), 0)
        id_BC, order_BC = id_BC.sort()
        return id_BC.gather(1, _at_number(weight_BC.gather(1, order_BC), number_B1)).squeeze(1)
    weight_BV = _weights(logits_BV, high_B1, rate_B1, vocab)
    if draws[0].top_p < 1:  # so it is for all
        weight_BV.mul_(_make_up(logits_BV, weight_BV, _enough(weight_BV, top_p_B1)))
    return _at_number(weight_BV, number_B1).squeeze(1)


def _weights(logits_BC: torch.Tensor, high_B1: torch.Tensor, rate_B1: torch.Tensor, vocab: int) -> torch.Tensor:
    """What each token weighs, in whole numbers of float64. What is no number weighs something, and does no harm.

    octaves       7.31 = 7 + 0.31               how much less likely than the likeliest token
    weight        2**-7 * 2**-0.31              the first by the bits of an exponent, the second by POWERS
    """
    part_BC = (high_B1 - logits_BC).mul_(rate_B1.float()).clamp_max_(MOST_OCTAVES)
    whole_BC = part_BC.floor()
    part_BC.sub_(whole_BC).sub_(0.5)
    weight_BC = part_BC * POWERS[0]
    for power in POWERS[1:-1]:
        weight_BC.add_(power).mul_(part_BC)
    exponent_BC = whole_BC.int().bitwise_left_shift_(23).neg_().add_(127 << 23)
    weight_BC.add_(POWERS[-1]).mul_(exponent_BC.view(torch.float32))
    return weight_BC.double().mul_(2.0 ** weight_bits(vocab)).floor_()


def weight_bits(vocab: int) -> int:
    """The likeliest token weighs a little less than 2 to the power of this."""
    return EXACT_BITS - vocab.bit_length()


def _enough(weight_BC: torch.Tensor, top_p_B1: torch.Tensor) -> torch.Tensor:
    return (weight_BC.sum(-1, keepdim=True) * top_p_B1).ceil_().clamp_min_(1)


def _at_number(weight_BN: torch.Tensor, number_B1: torch.Tensor) -> torch.Tensor:
    """The place that a number from [0, 1) stands for."""
    total_B1 = weight_BN.sum(-1, keepdim=True)
    return _place_in_parts(weight_BN, torch.minimum((number_B1 * total_B1).floor_(), total_B1 - 1))


def likeliest(logits_BV: torch.Tensor, count: int) -> torch.Tensor:
    """The likeliest tokens, in order; of equally likely ones the smaller id first, which `topk` alone does not promise.

    They are all in the `count` blocks whose likeliest tokens come first in the same order, so only these are sorted.
    """
    vocab = logits_BV.shape[1]
    if vocab <= 2 * count * BLOCK:
        return (_order(logits_BV).long().mul_(vocab) - torch.arange(vocab, device=logits_BV.device)).topk(count).indices
    block_BSX = pad(logits_BV, (0, -vocab % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
    block_BK = likeliest(block_BSX.amax(dim=-1), count).sort(dim=-1).values
    logits_BC = block_BSX.gather(1, block_BK[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    at_BK = likeliest(logits_BC, count)
    return block_BK.gather(1, at_BK // BLOCK) * BLOCK + at_BK % BLOCK


def _order(logits_BV: torch.Tensor) -> torch.Tensor:
    """Whole numbers (int32) in the order of the logits."""
    bits_BV = (logits_BV + 0.0).view(torch.int32)  # and no -0
    return bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)


def _make_up(logits_BV: torch.Tensor, weight_BV: torch.Tensor, enough_B1: torch.Tensor) -> torch.Tensor:
    """Which tokens are the fewest of the likeliest that together weigh enough.

    The code of the last one is found digit by digit: by what those tokens weigh that have the digits so far, and each next one.
    """
    code_BV = _order(logits_BV).bitwise_xor_(0x7FFFFFFF)  # the smallest for the likeliest, read without a sign
    last_B1, rest_B1, alike_BV = torch.zeros_like(enough_B1).int(), enough_B1 - 1, weight_BV
    for shift, bits in DIGITS[logits_BV.shape[1] > LONG_ROW]:
        digit_BV = (code_BV >> shift).bitwise_and_(2**bits - 1)
        summed_BD = weight_BV.new_zeros(len(weight_BV), 2**bits).scatter_add_(1, digit_BV.long(), alike_BV)
        digit_B1, rest_B1 = _place(summed_BD, rest_B1)
        digit_B1 = digit_B1.int()
        alike_BV = alike_BV * (digit_BV == digit_B1)
        last_B1 = last_B1 + (digit_B1 << shift)
    id_B1 = _place_in_parts(alike_BV, rest_B1).int()
    id_V = torch.arange(logits_BV.shape[1], device=logits_BV.device, dtype=torch.int32)
    kept_BV: torch.Tensor = (code_BV == last_B1) & (id_V <= id_B1)
    return kept_BV.logical_or_(code_BV.bitwise_xor_(-(2**31)) < last_B1 ^ -(2**31))


def _place_in_parts(weight_BN: torch.Tensor, rest_B1: torch.Tensor) -> torch.Tensor:
    """As `_place`, for long rows."""
    count = weight_BN.shape[1]
    if missing := -count % PART:
        weight_BN = pad(weight_BN, (0, missing))
    weight_BPS = weight_BN.view(len(weight_BN), -1, PART)
    part_B1, rest_B1 = _place(weight_BPS.sum(-1), rest_B1)
    weight_B1S = weight_BPS.gather(1, part_B1[:, :, None].expand(-1, -1, PART))
    place_B1, _ = _place(weight_B1S.squeeze(1), rest_B1)
    return (part_B1 * PART + place_B1).clamp_max(count - 1)


def _place(weight_BN: torch.Tensor, rest_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place at which the running sum of a row is above `rest`, and what is left of `rest` before it."""
    upto_BN = weight_BN.cumsum(-1)
    place_B1 = torch.searchsorted(upto_BN, rest_B1, right=True).clamp_max(weight_BN.shape[1] - 1)
    return place_B1, rest_B1 - (upto_BN - weight_BN).gather(1, place_B1)
