"""Log probabilities in the forms of both APIs. Tokens are written as the text they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepwell.engine.requests.request import TokenLogprob
from stepwell.engine.requests.text import Text

_LOWEST = -9999.0  # for what JSON has no number for


def chat_logprobs(text: Text | None, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        word = _word(text, token)
        return {"token": word, "logprob": _number(logprob), "bytes": None if "\ufffd" in word else list(word.encode())}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(text: Text | None, tokens: Sequence[TokenLogprob | int], offset: int) -> dict[str, Any]:
    """`offset`: characters of this answer's tokens before these. A bare number is a prompt's first token: it has no logprob."""
    words = [_word(text, each if isinstance(each, int) else each.token) for each in tokens]
    offsets = []
    for word in words:
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": words,
        "token_logprobs": [None if isinstance(each, int) else _number(each.logprob) for each in tokens],
        "top_logprobs": [None if isinstance(each, int) else _alternatives(text, each) for each in tokens],
        "text_offset": offsets,
    }


def prompt_logprobs(text: Text | None, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """In vLLM's form: for each token of a prompt the likeliest by id, and itself; none for its first."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": _word(text, token)}

    def all_of(each: TokenLogprob) -> dict[str, Any]:
        top = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(each.top, start=1)}
        return {str(each.token): entry(each.token, each.logprob, each.rank), **top}

    return [None, *(all_of(each) for each in tokens)]


def _alternatives(text: Text | None, token: TokenLogprob) -> dict[str, float]:
    """By their text; where two read the same, as halves of characters do, the likelier one stands."""
    found: dict[str, float] = {}
    for each, logprob in ((token.token, token.logprob), *token.top):
        word = _word(text, each)
        found[word] = max(found.get(word, _LOWEST), _number(logprob))
    return found


def _word(text: Text | None, token: int) -> str:
    return str(token) if text is None else text.decode([token])


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)
