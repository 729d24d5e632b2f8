"""One token for each row of logits, drawn by temperature, top-k and top-p. Plain torch on every device; the host never waits.

    weights          | 3 | 0 | 9 | 1 | 0 | 4 |      whole numbers; tokens that are cut away weigh 0
    running sums     | 3 | 3 |12 |13 |13 |17 |      a random number of 0.5 is 8 of 17, and the third is the first above 8

What a row draws depends on that row alone, and not on who is in the batch. Weights are whole numbers in float64, less than 2**52
in all: their sums are exact in whatever order a device makes them. Whole vocabularies are never sorted. Devices differ in the
last bit of `exp`, so that for the same number another device may draw another token at times.

Axes: B rows, V tokens of the vocabulary, C candidates (all tokens, or the likeliest), N weights, P parts, S weights in a part.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

EXACT_BITS = 52  # whole numbers up to this are exact in float64, with one bit to spare
HALF_BITS = 15  # of the 30 that a float32 from 0 to 1 has
HALF = 2**HALF_BITS
PART = 128  # weights that are summed before one of them is looked for: running sums of long rows are slow on a GPU


def draw(
    logits_BV: torch.Tensor, *, temperature_B1: torch.Tensor, number_B1: torch.Tensor,
    top_k_B1: torch.Tensor | None = None, most: int = 0, top_p_B1: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A token for each row of logits (fp32): `[B]`.

    Rows are cut to the `top_k` likeliest tokens, then to the fewest of these that make up `top_p` of what they weigh together.
    Of equally likely tokens those with the smaller ids are kept. Settings and `number`, from [0, 1), are in float64; `most` is
    the largest `top_k`. A row that holds something else than numbers gives some token. Weights are rounded down to whole numbers:
    tokens that are less likely than the likeliest by 2**-33, in a vocabulary of 262,144, are never drawn.
    """
    assert logits_BV.dtype == torch.float32, f"logits must be in fp32, got {logits_BV.dtype}"
    scale = 2.0 ** (EXACT_BITS - logits_BV.shape[1].bit_length())
    id_BC = None if top_k_B1 is None else _likeliest(logits_BV, most)
    logits_BC = logits_BV if id_BC is None else logits_BV.gather(1, id_BC)
    share_BC = ((logits_BC - logits_BC.amax(-1, keepdim=True)) / temperature_B1.float()).exp()  # 1 for the likeliest
    share_BC = share_BC.nan_to_num_(0.0)  # or what is no number would become a place outside of the row
    weight_BC = share_BC.double().mul_(scale).floor_()
    if top_k_B1 is not None:
        weight_BC = weight_BC.where(torch.arange(most, device=weight_BC.device) < top_k_B1, 0)
    if top_p_B1 is not None:
        enough_B1 = (weight_BC.sum(-1, keepdim=True) * top_p_B1).ceil().clamp_min(1)
        if id_BC is None:
            kept_BC = _make_up(share_BC, weight_BC, enough_B1)
        else:  # the likeliest are first
            kept_BC = weight_BC.cumsum(-1) - weight_BC < enough_B1
        weight_BC = weight_BC.where(kept_BC, 0)
    total_B1 = weight_BC.sum(-1, keepdim=True)
    place_B1 = _place_in_parts(weight_BC, torch.minimum((number_B1 * total_B1).floor(), total_B1 - 1))
    return (place_B1 if id_BC is None else id_BC.gather(1, place_B1)).squeeze(1)


def _likeliest(logits_BV: torch.Tensor, count: int) -> torch.Tensor:
    """The likeliest tokens, in order; of equally likely ones the smaller id first, which `topk` alone does not promise."""
    bits_BV = (logits_BV + 0.0).view(torch.int32)  # and no -0
    order_BV = bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)  # whole numbers in the order of the logits
    vocab = logits_BV.shape[1]
    return (order_BV.long().mul_(vocab) - torch.arange(vocab, device=logits_BV.device)).topk(count).indices


def _make_up(share_BV: torch.Tensor, weight_BV: torch.Tensor, enough_B1: torch.Tensor) -> torch.Tensor:
    """Which tokens are the fewest of the likeliest that together weigh enough.

    The share of the last one is found by the halves of its bits: those of numbers that are not negative have their order.
    """
    bits_BV, id_V = share_BV.view(torch.int32), torch.arange(share_BV.shape[1], device=share_BV.device)
    high_BV = bits_BV >> HALF_BITS
    high_B1, rest_B1 = _place(_by_half(high_BV, weight_BV), enough_B1 - 1)
    high_B1 = HALF - 1 - high_B1
    alike_BV = high_BV == high_B1
    # The others add nothing. They are spread, or on a GPU all would wait to add it in one place.
    low_BV = (bits_BV & (HALF - 1)).where(alike_BV, (id_V & (HALF - 1)).int())
    low_B1, rest_B1 = _place(_by_half(low_BV, weight_BV.where(alike_BV, 0)), rest_B1)
    last_B1 = ((high_B1 << HALF_BITS) + HALF - 1 - low_B1).int()
    tied_BV = bits_BV == last_B1
    id_B1 = _place_in_parts(weight_BV.where(tied_BV, 0), rest_B1)
    kept_BV: torch.Tensor = (bits_BV > last_B1) | (tied_BV & (id_V <= id_B1))
    return kept_BV


def _by_half(half_BV: torch.Tensor, weight_BV: torch.Tensor) -> torch.Tensor:
    """What the tokens with each value of half the bits weigh together, for the largest value first."""
    sums = weight_BV.new_zeros(len(weight_BV), HALF)
    return sums.scatter_add_(1, half_BV.long(), weight_BV).flip(1)


def _place_in_parts(weight_BN: torch.Tensor, rest_B1: torch.Tensor) -> torch.Tensor:
    """As `_place`, for long rows."""
    if missing := -weight_BN.shape[1] % PART:
        weight_BN = pad(weight_BN, (0, missing))
    weight_BPS = weight_BN.view(len(weight_BN), -1, PART)
    part_B1, rest_B1 = _place(weight_BPS.sum(-1), rest_B1)
    weight_B1S = weight_BPS.gather(1, part_B1[:, :, None].expand(-1, -1, PART))
    place_B1, _ = _place(weight_B1S.squeeze(1), rest_B1)
    return part_B1 * PART + place_B1


def _place(weight_BN: torch.Tensor, rest_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place at which the running sum of a row is above `rest`, and what is left of `rest` before it."""
    upto_BN = weight_BN.cumsum(-1)
    place_B1 = torch.searchsorted(upto_BN, rest_B1, right=True).clamp_max(weight_BN.shape[1] - 1)
    return place_B1, rest_B1 - (upto_BN - weight_BN).gather(1, place_B1)
