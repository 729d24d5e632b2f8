"""`/tokenize` and `/detokenize` as vLLM has them; and embeddings, which are refused with a reason."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from stepwell.server.access.door import asking
from stepwell.server.api.bodies import Body, TokenIds
from stepwell.server.api.chat import chat_prompt, ending_of
from stepwell.server.api.requests import read_body
from stepwell.server.errors import ApiError
from stepwell.server.served import Served


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
    router = APIRouter(dependencies=[asking(served.principals)])

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        """Token ids of a `prompt` or of `messages`."""
        body, size_bytes = await read_body(served, request, TokenizeBody)
        served.called(body.model)
        return await served.aside(size_bytes, lambda: _tokenized(served, body))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        body, size_bytes = await read_body(served, request, DetokenizeBody)
        served.called(body.model)
        return await served.aside(size_bytes, lambda: {"prompt": served.decode(body.tokens, param="tokens", special=True)})

    @router.post("/v1/embeddings")
    async def embeddings() -> None:
        """Refused: this server generates text."""
        message = "this server generates text and makes no embeddings: ask a server of an embedding model"
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
