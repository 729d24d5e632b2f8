"""`/v1/completions`: prompts as text or as token ids, one or several."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request, Response

from stepwell.engine.request import Ask, Delta
from stepwell.engine.text import Text
from stepwell.server.door import asking
from stepwell.server.errors import ApiError
from stepwell.server.logprobs import completion_logprobs
from stepwell.server.principals import Principal
from stepwell.server.replies import answer
from stepwell.server.requests import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionBody,
    Unknown,
    asks_of,
    sampling_of,
)
from stepwell.server.served import MAX_CHOICES, Served


def completions_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[asking(served.principals)]), Unknown()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, served, CompletionBody, unknown, _asks, CompletionForm(served.text))

    return router


def _asks(served: Served, body: CompletionBody, principal: Principal, arrived_s: float) -> list[Ask]:
    max_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    sampling = sampling_of(body, served.defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    prompts = _prompts(served, body.prompt)
    if len(prompts) * body.choices > MAX_CHOICES:
        raise ApiError(400, f"prompts times n is {len(prompts) * body.choices}, and at most {MAX_CHOICES}", param="n")
    for tokens in prompts:
        served.must_fit(tokens, max_tokens=max_tokens, param="prompt")
    return [ask for tokens in prompts for ask in asks_of(body, principal, tokens, sampling, arrived_s=arrived_s)]


def _prompts(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    """Every prompt's tokens. A list of numbers is one prompt; an empty list is one that is empty."""
    if isinstance(prompt, str):
        return [_tokens(served, prompt)]
    if all(isinstance(each, int) for each in prompt):
        return [[each for each in prompt if isinstance(each, int)]]
    if len(prompt) > MAX_CHOICES:
        raise ApiError(400, f"at most {MAX_CHOICES} prompts at a time, got {len(prompt)}", param="prompt")
    return [_tokens(served, each) if isinstance(each, str) else each for each in prompt if not isinstance(each, int)]


def _tokens(served: Served, text: str) -> list[int]:
    """None for empty text, even where the tokenizer would put a token before it."""
    return served.encode(text, param="prompt") if text else []


class CompletionForm:
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._offsets: Counter[int] = Counter()  # characters of tokens written so far, by choice

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs:
            logprobs = completion_logprobs(self._text, delta.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(word) for word in logprobs["tokens"])
        finish = delta.finish.value if delta.finish is not None else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish}

    whole = piece
