"""`/v1/completions`: prompts as text or as token ids, one or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from stepwell.engine.requests.request import Ask, Delta, TokenLogprob
from stepwell.server.access.door import asking
from stepwell.server.access.principals import Principal
from stepwell.server.api.bodies import CompletionBody
from stepwell.server.api.grammars import guide_of
from stepwell.server.api.logprobs import Word, completion_logprobs, prompt_logprobs, words
from stepwell.server.api.replies import answer
from stepwell.server.api.requests import DEFAULT_COMPLETION_TOKENS, Unknown, asks_of, sampling_of
from stepwell.server.errors import ApiError
from stepwell.server.served import MAX_CHOICES, Served


def completions_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[asking(served.principals)]), Unknown(served.clock)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Completes a prompt, as OpenAI's API does."""
        return await answer(request, served, CompletionBody, unknown, _asks, _form)

    return router


def _asks(served: Served, body: CompletionBody, principal: Principal, arrived_s: float) -> list[Ask]:
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens must be at least 1; 0 is for echo=true, which asks for the prompt alone", param="max_tokens"
        )
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
    if max_tokens is None and served.default_max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    prompt_logprobs = body.prompt_logprobs if body.prompt_logprobs is not None or not body.echo else body.logprobs
    sampling = sampling_of(served, body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
    prompts = _prompts(served, body.prompt)
    if len(prompts) * body.choices > MAX_CHOICES:
        raise ApiError(400, f"prompts times n is {len(prompts) * body.choices}, and at most {MAX_CHOICES}", param="n")
    for tokens in prompts:
        served.must_fit(tokens, max_tokens=max_tokens, param="prompt")
    guide = guide_of(served, body, principal.name)
    return [ask for tokens in prompts for ask in asks_of(body, principal, tokens, sampling, arrived_s=arrived_s, guide=guide)]


def _form(served: Served, body: CompletionBody, asks: Sequence[Ask]) -> CompletionForm:
    word = words(served.text, as_ids=body.return_tokens_as_token_ids)
    prompts = [ask.tokens for ask in asks] if body.return_token_ids else None
    if not body.echo:
        return CompletionForm(word, told=body.prompt_logprobs is not None, prompts=prompts)
    if served.text is None:
        raise ApiError(400, "echo needs a tokenizer, and this model has none: leave it out", param="echo")
    written = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [each for each in written if isinstance(each, str)] or [
        served.decode(ask.tokens, param="prompt") for ask in asks[:: body.choices]
    ]
    echoes = [
        Echo(text=texts[at // body.choices], first=ask.tokens[0], alone=body.max_tokens == 0) for at, ask in enumerate(asks)
    ]
    return CompletionForm(word, told=body.prompt_logprobs is not None, echoes=echoes, prompts=prompts)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt that is to stand before its answer, or `alone`: then one token was computed that nobody sees."""

    text: str
    first: int
    alone: bool


class CompletionForm:
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, word: Word, *, told: bool = False, echoes: Sequence[Echo] = (), prompts: Sequence[Sequence[int]] | None = None
    ) -> None:
        """`told`: whether logprobs of prompts stand in a field of their own, as vLLM has them. `echoes` by choice, or none.
        `prompts` by choice, where token ids are wanted.
        """
        self._word = word
        self._prompts = None if prompts is None else dict(enumerate(prompts))  # that are still to be written
        self._told = told
        self._echoes = dict(enumerate(echoes))  # that are still to be written
        self._alone = any(echo.alone for echo in echoes)
        self._offsets: Counter[int] = Counter()  # characters of tokens written so far, by choice

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any] | None:
        says = delta.text or delta.logprobs or delta.finish is not None or self._prompts is not None
        return self.whole(index, delta) if says else None

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        tokens: list[TokenLogprob | int] = [] if self._alone else [*delta.logprobs]
        text, echo = "" if self._alone else delta.text, self._echoes.pop(index, None)
        if echo is not None:
            text = echo.text + text
            tokens = [echo.first, *delta.prompt_logprobs, *tokens] if delta.logprobs else []
        logprobs = None
        if tokens:
            logprobs = completion_logprobs(self._word, tokens, self._offsets[index])
            self._offsets[index] += sum(len(word) for word in logprobs["tokens"])
        told: dict[str, Any] = {"prompt_logprobs": prompt_logprobs(self._word, delta.prompt_logprobs)} if self._told else {}
        if self._prompts is not None:
            told |= {"token_ids": list(delta.tokens), "prompt_token_ids": self._prompts.pop(index, None)}
        finish = delta.finish.value if delta.finish is not None else None
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": delta.stop_reason,
            **told,
        }

    def before_all(self) -> dict[str, Any]:
        return {}

    def beside(self, answers: Mapping[int, Delta]) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, int]:
        return {}
