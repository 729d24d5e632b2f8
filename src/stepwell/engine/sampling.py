"""From logits to tokens: the likeliest one, or one drawn by temperature, top-k and top-p. Keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell.engine.request import Request, Sampling, TokenLogprob


def choose(logits_BV: torch.Tensor, requests: Sequence[Request]) -> list[tuple[int, TokenLogprob | None] | None]:
    """The next token of each request, from its row of logits, with its logprob where that was asked for.

    None for a row that holds something else than numbers: nothing can be chosen from it.
    """
    likeliest = logits_BV.argmax(dim=-1).tolist()
    sound = torch.isfinite(logits_BV).all(dim=-1).tolist()
    chosen: list[tuple[int, TokenLogprob | None] | None] = []
    for row_V, first, good, request in zip(logits_BV, likeliest, sound, requests, strict=True):
        if not good:
            chosen.append(None)
            continue
        sampling = request.ask.sampling
        token = first if request.generator is None else _draw(row_V, sampling, request.generator)
        chosen.append((token, None if sampling.logprobs is None else _logprob(row_V, token, sampling.logprobs)))
    return chosen


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
