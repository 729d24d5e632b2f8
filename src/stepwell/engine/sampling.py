"""From logits to tokens: the likeliest one, or one drawn by temperature, top-k and top-p. Keeps nothing.

A token is drawn with a number that follows from its request's seed and its place in the sequence. So the numbers of a pass are
known before its tokens are, and a token that is computed again, after preemption or for a draft, is drawn alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepwell.engine.ops.drawing import draw
from stepwell.engine.ops.to_host import ToHost
from stepwell.engine.passes.numbers import on_device
from stepwell.engine.request import Request, TokenLogprob

UNSOUND = -1  # in place of a token: its logits are not numbers
DRAWN_TOGETHER = 2**22  # logits: what drawing needs of memory does not grow with the batch

_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one token is drawn. Its `number` is from [0, 1)."""

    temperature: float
    top_k: int | None
    top_p: float
    number: float


def draw_of(request: Request, after: int = 0) -> Draw | None:
    """How a request's token is drawn that comes `after` so many that nobody has read yet; None for the likeliest."""
    sampling = request.ask.sampling
    if sampling.temperature == 0:
        return None
    number = number_for(request.seed, len(request.tokens) + after)
    return Draw(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, number=number)


def number_for(seed: int, position: int) -> float:
    """A number from [0, 1), of 53 random bits: SplitMix64, begun at a place that the seed gives."""
    return (_mixed(_mixed(seed) + position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


def pick(logits_BV: torch.Tensor, draws: Sequence[Draw | None]) -> torch.Tensor:
    """A token for each row, or UNSOUND for one that holds something else than numbers. On the device; nobody waits for it."""
    assert len(logits_BV) == len(draws), f"{len(draws)} draws from {len(logits_BV)} rows"
    low_B, high_B = logits_BV.aminmax(dim=-1)
    sound_B = (low_B > -torch.inf) & (high_B < torch.inf)  # neither holds for what is no number
    token_B = logits_BV.argmax(dim=-1)
    for rows in _rows_alike(draws, most=max(DRAWN_TOGETHER // logits_BV.shape[1], 1)):
        row_B = on_device(rows, logits_BV.device)
        token_B.index_copy_(0, row_B, _drawn(logits_BV[row_B], [each for row in rows if (each := draws[row]) is not None]))
    return token_B.where(sound_B, UNSOUND)


def _rows_alike(draws: Sequence[Draw | None], most: int) -> Iterator[list[int]]:
    """Rows that are drawn together: they are cut in the same way, or not at all."""
    alike: dict[tuple[bool, bool], list[int]] = {}
    for row, each in enumerate(draws):
        if each is not None:
            alike.setdefault((each.top_k is None, each.top_k is None and each.top_p == 1), []).append(row)
    for rows in alike.values():
        yield from (rows[start : start + most] for start in range(0, len(rows), most))


def _drawn(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    top_ks = [min(each.top_k or 0, logits_BV.shape[1]) for each in draws]
    settings = [(each.temperature, each.number, top_k, each.top_p) for each, top_k in zip(draws, top_ks, strict=True)]
    columns = on_device(np.array(settings, np.float64), logits_BV.device).split(1, dim=1)
    return draw(
        logits_BV,
        temperature_B1=columns[0],
        number_B1=columns[1],
        top_k_B1=columns[2] if top_ks[0] else None,
        most=max(top_ks),
        top_p_B1=columns[3] if any(each.top_p < 1 for each in draws) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A token, with its logprob where that was asked for."""

    token: int
    logprob: TokenLogprob | None = None


class Choices:
    """What was chosen from each row of a pass's logits. Waits for the pass."""

    def __init__(self, logits_BV: torch.Tensor, draws: Sequence[Draw | None], to_host: ToHost) -> None:
        self._logits_BV = logits_BV
        self._tokens = to_host(pick(logits_BV, draws)).read()

    def of(self, row: int, logprobs: int | None) -> Chosen | None:
        """None for a row that holds something else than numbers: nothing can be chosen from it."""
        token = self._tokens[row]
        if token == UNSOUND:
            return None
        return Chosen(token=token, logprob=None if logprobs is None else _logprob(self._logits_BV[row], token, logprobs))


def _logprob(logits_V: torch.Tensor, token: int, count: int) -> TokenLogprob:
    shares = logits_V.float().log_softmax(-1)
    values, ids = shares.topk(min(count, len(shares))) if count else (shares[:0], shares[:0])
    top = tuple((int(each), value) for each, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(shares[token]), top=top)
