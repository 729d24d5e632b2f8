"""Log probabilities in the forms of both APIs. Tokens are written as the text they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepwell.engine.requests.request import TokenLogprob
from stepwell.engine.requests.text import Text

_LOWEST = -9999.0  # for what JSON has no number for

Word = Callable[[int], str]


def words(text: Text | None, *, as_ids: bool | None) -> Word:
    """How logprobs write a token: its text; its number where there is no tokenizer; or `token_id:NUMBER`, as vLLM has it."""
    if as_ids:
        return lambda token: f"token_id:{token}"
    return str if text is None else lambda token: text.decode([token])


def chat_logprobs(word: Word, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        name = word(token)
        return {"token": name, "logprob": _number(logprob), "bytes": None if "\ufffd" in name else list(name.encode())}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(word: Word, tokens: Sequence[TokenLogprob | int], offset: int) -> dict[str, Any]:
    """`offset`: characters of this answer's tokens before these. A bare number is a prompt's first token: it has no logprob."""
    names = [word(each if isinstance(each, int) else each.token) for each in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [None if isinstance(each, int) else _number(each.logprob) for each in tokens],
        "top_logprobs": [None if isinstance(each, int) else _alternatives(word, each) for each in tokens],
        "text_offset": offsets,
    }


def prompt_logprobs(word: Word, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """In vLLM's form: for each token of a prompt the likeliest by id, and itself; none for its first."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": word(token)}

    def all_of(each: TokenLogprob) -> dict[str, Any]:
        top = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(each.top, start=1)}
        return {str(each.token): entry(each.token, each.logprob, each.rank), **top}

    return [None, *(all_of(each) for each in tokens)]


def _alternatives(word: Word, token: TokenLogprob) -> dict[str, float]:
    """By their text; where two read the same, as halves of characters do, the likelier one stands."""
    found: dict[str, float] = {}
    for each, logprob in ((token.token, token.logprob), *token.top):
        name = word(each)
        found[name] = max(found.get(name, _LOWEST), _number(logprob))
    return found


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)
