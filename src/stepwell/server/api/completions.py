"""`/v1/completions`: one or several prompts as text or token ids. Also `/tokenize` and `/detokenize`, as vLLM has them, and a
refusal of embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from stepwell.engine.requests.request import Delta, GenerateRequest, TokenLogprob
from stepwell.server.access.admission import require_key
from stepwell.server.access.tenants import Principal
from stepwell.server.api.bodies import Body, CompletionBody, TokenIds
from stepwell.server.api.chat import chat_prompt, ending_of
from stepwell.server.api.grammars import guide_of
from stepwell.server.api.replies import Word, answer, completion_logprobs, prompt_logprobs, words
from stepwell.server.api.requests import DEFAULT_COMPLETION_TOKENS, UnknownFields, read_body, requests_of, sampling_of
from stepwell.server.errors import ApiError
from stepwell.server.served import MAX_CHOICES, Served


def completions_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[require_key(served.principals)]), UnknownFields(served.clock)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Completes a prompt, as OpenAI's API does."""
        return await answer(request, served, CompletionBody, unknown, _requests, _form)

    return router


def _requests(served: Served, body: CompletionBody, principal: Principal, arrived_s: float) -> list[GenerateRequest]:
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens must be at least 1; 0 is only for echo=true, which returns the prompt alone", param="max_tokens"
        )
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
    if max_tokens is None and served.default_max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    prompt_logprobs = body.prompt_logprobs if body.prompt_logprobs is not None or not body.echo else body.logprobs
    sampling = sampling_of(served, body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)
    prompts = _prompts(served, body.prompt)
    if len(prompts) * body.choices > MAX_CHOICES:
        raise ApiError(400, f"prompts times n is {len(prompts) * body.choices}; the limit is {MAX_CHOICES}", param="n")
    for tokens in prompts:
        served.must_fit(tokens, max_tokens=max_tokens, param="prompt")
    guide = guide_of(served, body, principal.name)
    return [
        request
        for tokens in prompts
        for request in requests_of(body, principal, tokens, sampling, arrived_s=arrived_s, guide=guide)
    ]


def _form(served: Served, body: CompletionBody, requests: Sequence[GenerateRequest]) -> CompletionForm:
    word = words(served.text, as_ids=body.return_tokens_as_token_ids)
    prompts = [request.tokens for request in requests] if body.return_token_ids else None
    if not body.echo:
        return CompletionForm(word, prompt_logprobs_wanted=body.prompt_logprobs is not None, prompts=prompts)
    if served.text is None:
        raise ApiError(400, "echo needs a tokenizer, and this model has none: leave it out", param="echo")
    written = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [each for each in written if isinstance(each, str)] or [
        served.decode(request.tokens, param="prompt") for request in requests[:: body.choices]
    ]
    echoes = [
        Echo(text=texts[at // body.choices], first=request.tokens[0], alone=body.max_tokens == 0)
        for at, request in enumerate(requests)
    ]
    return CompletionForm(word, prompt_logprobs_wanted=body.prompt_logprobs is not None, echoes=echoes, prompts=prompts)


def _prompts(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    """The tokens of every prompt. A list of numbers is one prompt; an empty list is an empty prompt."""
    if isinstance(prompt, str):
        return [_tokens(served, prompt)]
    if all(isinstance(each, int) for each in prompt):
        return [[each for each in prompt if isinstance(each, int)]]
    if len(prompt) > MAX_CHOICES:
        raise ApiError(400, f"at most {MAX_CHOICES} prompts at a time, got {len(prompt)}", param="prompt")
    return [_tokens(served, each) if isinstance(each, str) else each for each in prompt if not isinstance(each, int)]


def _tokens(served: Served, text: str) -> list[int]:
    """No tokens for empty text, even if the tokenizer prepends one."""
    return served.encode(text, param="prompt") if text else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt to repeat before its answer; `alone` without an answer, in which case one token is computed and dropped."""

    text: str
    first: int
    alone: bool


class CompletionForm:
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        word: Word,
        *,
        prompt_logprobs_wanted: bool = False,
        echoes: Sequence[Echo] = (),
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`prompt_logprobs_wanted` adds logprobs of prompts in a field of their own, as vLLM does. `echoes` and `prompts` (for
        token ids) are by choice.
        """
        self._word = word
        self._prompts = None if prompts is None else dict(enumerate(prompts))  # not written yet
        self._with_prompt_logprobs = prompt_logprobs_wanted
        self._echoes = dict(enumerate(echoes))  # not written yet
        self._alone = any(echo.alone for echo in echoes)
        self._offsets: Counter[int] = Counter()  # characters of tokens written so far, by choice

    def first_choice(self, index: int) -> dict[str, Any] | None:
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
        extra: dict[str, Any] = (
            {"prompt_logprobs": prompt_logprobs(self._word, delta.prompt_logprobs)} if self._with_prompt_logprobs else {}
        )
        if self._prompts is not None:
            extra |= {"token_ids": list(delta.tokens), "prompt_token_ids": self._prompts.pop(index, None)}
        finish = delta.finish.value if delta.finish is not None else None
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": delta.stop_reason,
            **extra,
        }

    def first_fields(self) -> dict[str, Any]:
        return {}

    def extra_fields(self, answers: Mapping[int, Delta]) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, int]:
        return {}


class TokenizeBody(Body):
    """A prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


def tokens_router(served: Served) -> APIRouter:
    router = APIRouter(dependencies=[require_key(served.principals)])

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        """Token ids of a `prompt` or of `messages`."""
        body, size_bytes = await read_body(served, request, TokenizeBody)
        served.response_name(body.model)
        return await served.run_in_thread(size_bytes, lambda: _tokenized(served, body))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        body, size_bytes = await read_body(served, request, DetokenizeBody)
        served.response_name(body.model)
        return await served.run_in_thread(
            size_bytes, lambda: {"prompt": served.decode(body.tokens, param="tokens", special=True)}
        )

    @router.post("/v1/embeddings")
    async def embeddings() -> None:
        """Refused: this server generates text."""
        message = "this server does not compute embeddings: use a server of an embedding model"
        raise ApiError(400, message, code="unsupported_endpoint")

    return router


def _tokenized(served: Served, body: TokenizeBody) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either a prompt or messages", param="prompt")
    if body.messages is not None:
        ending = ending_of(
            body.messages, add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message
        )
        tokens, _ = chat_prompt(served, body.messages, body.tools, body.chat_template_kwargs, ending=ending)
    else:
        tokens = served.encode(body.prompt or "", param="prompt", special=body.add_special_tokens is not False)
    words = [served.text.decode([token], special=True) for token in tokens] if body.return_token_strs and served.text else None
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.max_context, "token_strs": words}
