"""Settings by which requests' tokens are drawn, and the tokens chosen from a pass's logits. Stateless; `ops/drawing.py` draws.

A token is drawn with a number that follows from its request's seed and its place in the sequence. So the numbers of a pass are
known before its tokens are, and a token that is computed again, after preemption or for a draft, is drawn alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from stepwell.engine.ops.drawing import NAN_LOGITS, Draw, Pick
from stepwell.engine.ops.editing import Edit, edited
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.logprobs import likelihoods, read_likelihoods
from stepwell.engine.passes.numbers import Send, on_device
from stepwell.engine.requests.request import Chunk, Request, TokenLogprob
from stepwell.engine.sampling.edits import edit_of

_WORD = 2**64 - 1
_CHOSEN = -1  # in place of a token of the prompt


def draw_of(request: Request, after: int = 0) -> Draw | None:
    """The draw of a request's token, `after` places after the next one; None for the likeliest token."""
    sampling = request.submitted.sampling
    if sampling.temperature == 0:
        return None
    number = number_for(request.seed, len(request.tokens) + after)
    return Draw(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, number=number)


def choosing_for(chunks: Sequence[Chunk]) -> list[Choosing]:
    """How the token after each row of a pass's logits is chosen. The rows of a chunk are those of prompt logprobs, then, if it
    completes, of the next token, and of those after the proposed ones.
    """
    return [way for chunk in chunks for way in _choosing(chunk)]


def _choosing(chunk: Chunk) -> Iterator[Choosing]:
    request, sampling = chunk.request, chunk.request.submitted.sampling
    yield from (Choosing(given=token, logprobs=sampling.prompt_logprobs) for token in chunk.prompt_targets)
    for after in range(1 + len(chunk.proposed)) if chunk.completes else ():
        edit = edit_of(request, chunk.proposed[:after])
        yield Choosing(draw=draw_of(request, after), edit=edit, logprobs=sampling.logprobs)


def number_for(seed: int, position: int) -> float:
    """A number from [0, 1), of 53 random bits: SplitMix64, begun at a place that the seed gives."""
    return (_mixed(_mixed(seed) + position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def try_every_cut(pick: Pick, vocab: int, device: torch.device) -> None:
    """Draws from nothing in every way, so that kernels are built: other ones run for other batches."""
    plain = Draw(temperature=1.0, top_k=None, top_p=1.0, number=0.5)
    logits_1V = torch.zeros(1, vocab, device=device)
    for draw in (None, plain, plain._replace(top_k=2, top_p=0.9)):
        pick(logits_1V, [draw])


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


class Choosing(NamedTuple):
    """How the token after one row of logits is chosen, and its number of alternatives, None for no logprob."""

    draw: Draw | None = None
    edit: Edit | None = None
    given: int | None = None  # a token of the prompt: only its logprob is needed
    logprobs: int | None = None


class Chosen(NamedTuple):
    """A token, with its logprob if requested."""

    token: int
    logprob: TokenLogprob | None = None


class ChosenRows(Protocol):
    """The tokens chosen from each row of a pass's logits, here or on a rank."""

    def of(self, row: int) -> Chosen | None:
        """None for a row that holds something other than numbers: nothing can be chosen from it."""
        ...


WaitForChoices = Callable[[], ChosenRows]  # waits for the pass


class Choices:
    """What was chosen from each row of a pass's logits. Waits for the pass. Logprobs are the model's, before any edit."""

    def __init__(self, logits_BV: torch.Tensor, choosing: Sequence[Choosing], kernels: Kernels) -> None:
        self._choosing = choosing
        changed_BV = edited(logits_BV, [way.edit for way in choosing], kernels.send)
        token_B = kernels.pick(changed_BV, [way.draw for way in choosing])
        rows = [row for row, way in enumerate(choosing) if way.logprobs is not None]
        numbers = kernels.to_host(_with_logprobs(token_B, logits_BV, choosing, rows, kernels.send) if rows else token_B).read()
        self.tokens, packed = numbers[: len(choosing)], numbers[len(choosing) :]
        found = read_likelihoods(packed, [choosing[row].logprobs or 0 for row in rows]) if rows else []
        self._likelihoods = dict(zip(rows, found, strict=True))

    @property
    def tokens_alone(self) -> bool:
        """Whether `tokens` is the whole outcome: no logprob is requested, and no token was given."""
        return all(way[2] is way[3] is None for way in self._choosing)  # given, logprobs

    def of(self, row: int) -> Chosen | None:
        """None for a row that holds something other than numbers: nothing can be chosen from it."""
        way, token = self._choosing[row], self.tokens[row]
        if token == NAN_LOGITS:
            return None
        token = token if way.given is None else way.given
        if (likely := self._likelihoods.get(row)) is None:
            return Chosen(token=token)
        return Chosen(token, TokenLogprob(token=token, logprob=likely.logprob, rank=likely.rank, top=likely.top))


def _with_logprobs(
    token_B: torch.Tensor, logits_BV: torch.Tensor, choosing: Sequence[Choosing], rows: Sequence[int], send: Send
) -> torch.Tensor:
    """All tokens, then the likelihoods of `rows`, for one copy to the host."""
    given = [_CHOSEN if choosing[row].given is None else choosing[row].given for row in rows]
    row_L, given_L = on_device(np.array([rows, given], np.int64), logits_BV.device, send)
    token_L = token_B[row_L].where(given_L == _CHOSEN, given_L).clamp_min(0)  # an unsound row has no token
    asked_LV = logits_BV if len(rows) == len(logits_BV) else logits_BV[row_L]
    most = max(choosing[row].logprobs or 0 for row in rows)
    return torch.cat([token_B.int(), likelihoods(asked_LV, token_L, most).flatten()])
