"""Answers as HTTP responses: one JSON object when all have ended, or server-sent events as they grow; log probabilities in both
APIs.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from stepwell.engine.requests.request import Delta, GenerateRequest, TokenLogprob
from stepwell.engine.requests.text import Text
from stepwell.server.access.admission import arrived_s, client_of, principal_of
from stepwell.server.access.tenants import Principal
from stepwell.server.api.answers import Answers, EventStream, collect
from stepwell.server.api.bodies import GenerationBody
from stepwell.server.api.requests import UnknownFields, read_body, refuse_unsupported
from stepwell.server.errors import CLIENT_CLOSED, ApiError
from stepwell.server.handover import wants_offer
from stepwell.server.served import Served

_LOWEST = -9999.0  # in place of -inf, which JSON lacks

Word = Callable[[int], str]


def words(text: Text | None, *, as_ids: bool | None) -> Word:
    """How logprobs write a token: as its text, as its number without a tokenizer, or as `token_id:NUMBER` like vLLM."""
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
    """`offset` counts the characters of earlier tokens. A bare number is a prompt's first token, which has no logprob."""
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
    """In vLLM's form: for each prompt token but the first, the likeliest tokens by id, and the token itself."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": word(token)}

    def all_of(each: TokenLogprob) -> dict[str, Any]:
        top = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(each.top, start=1)}
        return {str(each.token): entry(each.token, each.logprob, each.rank), **top}

    return [None, *(all_of(each) for each in tokens)]


def _alternatives(word: Word, token: TokenLogprob) -> dict[str, float]:
    """By text. If two tokens have the same text, as partial characters do, the likelier one is kept."""
    found: dict[str, float] = {}
    for each, logprob in ((token.token, token.logprob), *token.top):
        name = word(each)
        found[name] = max(found.get(name, _LOWEST), _number(logprob))
    return found


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)


B = TypeVar("B", bound=GenerationBody)


class Form(Protocol):
    """The wire format of an answer, which differs between the APIs. Made for each request; may keep state between chunks."""

    @property
    def prefix(self) -> str:
        """Prefix of response ids."""
        ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first token of a choice in a stream, if the format has one."""
        ...

    def first_fields(self) -> dict[str, Any]:
        """Fields of a stream's first chunk in addition to its choices."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """The choice of a chunk; None if there is nothing to send yet."""
        ...

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a response that is not streamed, from all its deltas joined."""
        ...

    def extra_fields(self, answers: Mapping[int, Delta]) -> dict[str, Any]:
        """Fields of a response that is not streamed, in addition to its choices."""
        ...

    def usage(self) -> Mapping[str, int]:
        """Details of the usage: kinds of tokens among those written."""
        ...


async def answer(
    request: Request,
    served: Served,
    kind: type[B],
    unknown: UnknownFields,
    requests_of: Callable[[Served, B, Principal, float], Sequence[GenerateRequest]],
    form_of: Callable[[Served, B, Sequence[GenerateRequest]], Form],
) -> Response:
    """Reads a body of a kind, makes `GenerateRequest`s from it and responds. `unknown` logs unknown fields. Raises ApiError."""
    body, size_bytes = await read_body(served, request, kind)
    model, principal = served.response_name(body.model), principal_of(request)
    refuse_unsupported(body, principal, unknown, client_of(request))
    requests = await make_in_thread(
        served, body, size_bytes, principal, lambda: requests_of(served, body, principal, arrived_s(request))
    )
    form = await served.run_in_thread(size_bytes, lambda: form_of(served, body, requests))
    return await _reply(request, served, body, requests, form, model)


async def make_in_thread(
    served: Served, body: GenerationBody, size_bytes: int, principal: Principal, make: Callable[[], Sequence[GenerateRequest]]
) -> Sequence[GenerateRequest]:  # fmt: skip
    """Makes the requests of a body on a thread."""
    if body.compiles:
        return await served.compile_in_thread(size_bytes, principal.name, make)
    return await served.run_in_thread(size_bytes, make)


async def _reply(
    request: Request, served: Served, body: GenerationBody, requests: Sequence[GenerateRequest], form: Form, model: str
) -> Response:
    """Queues the requests and responds as the body wants. Raises ApiError."""
    peers = served.peers
    taken = await peers.take(body.kv_transfer_params) if peers is not None else None
    id = f"{form.prefix}-{uuid.uuid4().hex}"

    def begun() -> None:
        if peers is not None:
            peers.done(taken)

    answers = Answers(served, requests, id=id, request=request, on_begun=begun)
    await answers.begin()
    envelope = {"id": id, "created": int(time.time()), "model": model}
    if body.stream:
        envelope["object"] = form.chunk_object
        return EventStream(answers, _events(answers, body, requests, form, envelope))
    envelope["object"] = form.whole_object
    return await _whole(request, served, answers, body, requests, form, envelope)


async def _whole(
    request: Request, served: Served, answers: Answers, body: GenerationBody, requests: Sequence[GenerateRequest], form: Form,
    envelope: dict[str, Any],
) -> Response:  # fmt: skip
    ahead = served.ahead if _is_handed_over(body, requests) else None
    computed = None if ahead is None else ahead.begin(served.loop, requests[0], body.kv_transfer_params)
    try:
        found = await collect(request, answers)
    finally:
        if computed is not None:
            computed.set()
    if found is None:
        return Response(status_code=CLIENT_CLOSED)
    more = await _offered(served, body, requests)
    return await asyncio.to_thread(_written, form, found, envelope, lambda: answers.usage(body.choices, form.usage()), more)


def _written(
    form: Form, found: Mapping[int, Delta], envelope: dict[str, Any], usage: Callable[[], Mapping[str, Any]], more: dict[str, Any]
) -> Response:  # fmt: skip
    """Runs on a thread: logprobs of a long prompt are slow to write."""
    choices = [form.whole(index, delta) for index, delta in found.items()]
    content = {**envelope, "choices": choices, "usage": usage(), **more, **form.extra_fields(found)}
    return Response(_json(content, long=_are_long(found.values())), media_type="application/json")


async def _offered(served: Served, body: GenerationBody, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The fields for the decode server, if the router asked for them and there is one prompt."""
    if served.offers is None or not _is_handed_over(body, requests):
        return {}
    return {"kv_transfer_params": await served.offers.offer(served.loop, requests[0])}


def _is_handed_over(body: GenerationBody, requests: Sequence[GenerateRequest]) -> bool:
    return wants_offer(body.kv_transfer_params) and len(requests) == 1 and requests[0].use_cache


async def _events(
    answers: Answers, body: GenerationBody, requests: Sequence[GenerateRequest], form: Form, envelope: dict[str, Any]
) -> AsyncIterator[str]:  # fmt: skip
    usage: dict[str, Any] = {"usage": None} if body.wants_usage_chunk else {}  # every chunk then has the field
    prompt, completion = sum(len(request.tokens) for request in requests[:: body.choices]), 0
    begun: set[int] = set()  # choices with a first token
    try:
        async for index, delta in answers.deltas():
            completion += len(delta.tokens)
            if body.wants_usage_always:
                total = prompt + completion
                usage = {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}
            if index not in begun:
                begun.add(index)
                first = form.first_fields() if len(begun) == 1 else {}
                if (choice := form.first_choice(index)) is not None:
                    yield _event({**envelope, "choices": [choice], **usage, **first})
            if delta.prompt_logprobs:  # the first chunk, possibly long
                event = await asyncio.to_thread(_piece, form, index, delta, envelope, usage)
            else:
                event = _piece(form, index, delta, envelope, usage)
            if event is not None:
                yield event
    except ApiError as error:  # the status was already sent: clients look for this event
        yield _event(error.body())
        return
    if body.wants_usage_chunk:
        yield _event({**envelope, "choices": [], "usage": answers.usage(body.choices, form.usage())})
    yield "data: [DONE]\n\n"


def _piece(form: Form, index: int, delta: Delta, envelope: dict[str, Any], usage: dict[str, Any]) -> str | None:
    piece = form.piece(index, delta)
    return None if piece is None else _event({**envelope, "choices": [piece], **usage}, long=_are_long([delta]))


def _event(content: dict[str, Any], *, long: bool = False) -> str:
    return f"data: {_json(content, long=long)}\n\n"


def _are_long(answers: Iterable[Delta]) -> bool:
    return any(answer.prompt_logprobs for answer in answers)


def _json(content: dict[str, Any], *, long: bool) -> str:
    """`long` content is encoded in Python: the encoder in C would hold the interpreter lock, and with it all streams, for
    seconds.
    """
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    return "".join(encoder.iterencode(content)) if long else encoder.encode(content)
