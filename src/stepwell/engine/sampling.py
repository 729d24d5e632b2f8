"""From logits to tokens: the likeliest one, or one drawn by temperature, top-k and top-p. Keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.engine.request import Request, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A token, with its logprob where that was asked for."""

    token: int
    logprob: TokenLogprob | None = None


class Choices:
    """A pass's rows of logits, from which requests choose one after the other."""

    def __init__(self, logits_BV: torch.Tensor) -> None:
        self._logits_BV = logits_BV
        self._likeliest: list[int] = logits_BV.argmax(dim=-1).tolist()
        self._sound: list[bool] = torch.isfinite(logits_BV).all(dim=-1).tolist()

    def choose(self, row: int, request: Request) -> Chosen | None:
        """The next token of a request; a drawn one takes the next number of its own stream.

        None for a row that holds something else than numbers: nothing can be chosen from it.
        """
        if not self._sound[row]:
            return None
        row_V, sampling = self._logits_BV[row], request.ask.sampling
        token = self._likeliest[row] if request.generator is None else _draw(row_V, sampling, request.generator)
        return Chosen(token=token, logprob=None if sampling.logprobs is None else _logprob(row_V, token, sampling.logprobs))


def _draw(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Cut to the `top_k` likeliest, then to the fewest that make up `top_p`; then drawn from the request's own stream."""
    scores = logits_V.float().cpu()
    scores = (scores - scores.max()) / sampling.temperature  # the largest is 0, however small the temperature
    kept = min(sampling.top_k or len(scores), len(scores))
    if kept < len(scores) or sampling.top_p < 1:
        scores, order = scores.topk(kept)
        shares = scores.softmax(-1)
        if sampling.top_p < 1:
            shares = shares[: max(int((shares.cumsum(-1) - shares < sampling.top_p).sum()), 1)]
    else:
        order, shares = None, scores.softmax(-1)
    drawn = int(torch.multinomial(shares, 1, generator=generator))
    return drawn if order is None else int(order[drawn])


def _logprob(logits_V: torch.Tensor, token: int, count: int) -> TokenLogprob:
    shares = logits_V.float().log_softmax(-1)
    values, ids = shares.topk(min(count, len(shares))) if count else (shares[:0], shares[:0])
    top = tuple((int(each), value) for each, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(shares[token]), top=top)
