"""Answers as HTTP replies: one JSON object when all have ended, or server-sent events as they grow."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from stepwell.engine.requests.request import Ask, Delta
from stepwell.server.access.door import arrived_s, client_of, principal_of
from stepwell.server.access.principals import Principal
from stepwell.server.api.answers import Answers, EventStream, collect
from stepwell.server.api.bodies import Asked
from stepwell.server.api.requests import Unknown, read_body, refuse_unsupported
from stepwell.server.errors import CLIENT_CLOSED, ApiError
from stepwell.server.handover import wants_offer
from stepwell.server.served import Served

B = TypeVar("B", bound=Asked)


class Form(Protocol):
    """How an answer looks on the wire: the seam between the two APIs. Made for each request; may remember what it has written."""

    @property
    def prefix(self) -> str:
        """Of ids."""
        ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What stands before the first token of a choice in a stream, where anything does."""
        ...

    def before_all(self) -> dict[str, Any]:
        """Fields of the first chunk of a stream, in addition to its choices."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """The choice of a chunk; None where there is nothing to tell yet."""
        ...

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of an answer that is not streamed, from all its deltas as one."""
        ...

    def beside(self, answers: Mapping[int, Delta]) -> dict[str, Any]:
        """What stands beside the choices of answers that are not streamed."""
        ...

    def usage(self) -> Mapping[str, int]:
        """Kinds of tokens among those that it has written, as details of the usage."""
        ...


async def answer(
    request: Request,
    served: Served,
    kind: type[B],
    unknown: Unknown,
    asks_of: Callable[[Served, B, Principal, float], Sequence[Ask]],
    form_of: Callable[[Served, B, Sequence[Ask]], Form],
) -> Response:
    """Reads a body of some kind, makes asks of it and replies. `unknown` remembers fields that were told of. Raises ApiError."""
    body, size_bytes = await read_body(served, request, kind)
    model, principal = served.called(body.model), principal_of(request)
    refuse_unsupported(body, principal, unknown, client_of(request))
    asks = await made_aside(served, body, size_bytes, principal, lambda: asks_of(served, body, principal, arrived_s(request)))
    form = await served.aside(size_bytes, lambda: form_of(served, body, asks))
    return await _reply(request, served, body, asks, form, model)


async def made_aside(
    served: Served, body: Asked, size_bytes: int, principal: Principal, make: Callable[[], Sequence[Ask]]
) -> Sequence[Ask]:  # fmt: skip
    """Makes asks of a body on a thread, in turn with others of its kind."""
    if body.compiles:
        return await served.compile_aside(size_bytes, principal.name, make)
    return await served.aside(size_bytes, make)


async def _reply(request: Request, served: Served, body: Asked, asks: Sequence[Ask], form: Form, model: str) -> Response:
    """Queues the asks and answers in the way the body wants. Raises ApiError."""
    peers = served.peers
    taken = await peers.take(body.kv_transfer_params) if peers is not None else None
    id = f"{form.prefix}-{uuid.uuid4().hex}"

    def begun() -> None:
        if peers is not None:
            peers.done(taken)

    answers = Answers(served, asks, id=id, request=request, on_begun=begun)
    await answers.begin()
    envelope = {"id": id, "created": int(time.time()), "model": model}
    if body.stream:
        envelope["object"] = form.chunk_object
        return EventStream(answers, _events(answers, body, asks, form, envelope))
    envelope["object"] = form.whole_object
    return await _whole(request, served, answers, body, asks, form, envelope)


async def _whole(
    request: Request, served: Served, answers: Answers, body: Asked, asks: Sequence[Ask], form: Form, envelope: dict[str, Any]
) -> Response:  # fmt: skip
    ahead = served.ahead if _is_handed_over(body, asks) else None
    computed = None if ahead is None else ahead.begin(served.loop, asks[0], body.kv_transfer_params)
    try:
        found = await collect(request, answers)
    finally:
        if computed is not None:
            computed.set()
    if found is None:
        return Response(status_code=CLIENT_CLOSED)
    more = await _offered(served, body, asks)
    return await asyncio.to_thread(_written, form, found, envelope, lambda: answers.usage(body.choices, form.usage()), more)


def _written(
    form: Form, found: Mapping[int, Delta], envelope: dict[str, Any], usage: Callable[[], Mapping[str, Any]], more: dict[str, Any]
) -> Response:  # fmt: skip
    """On a thread: logprobs of a long prompt and their alternatives are millions of words, which takes its time."""
    choices = [form.whole(index, delta) for index, delta in found.items()]
    content = {**envelope, "choices": choices, "usage": usage(), **more, **form.beside(found)}
    return Response(_json(content, long=_are_long(found.values())), media_type="application/json")


async def _offered(served: Served, body: Asked, asks: Sequence[Ask]) -> dict[str, Any]:
    """What a router is to tell the decode server, where it asked for that and there is one prompt to go on from."""
    if served.offers is None or not _is_handed_over(body, asks):
        return {}
    return {"kv_transfer_params": await served.offers.offer(served.loop, asks[0])}


def _is_handed_over(body: Asked, asks: Sequence[Ask]) -> bool:
    return wants_offer(body.kv_transfer_params) and len(asks) == 1 and asks[0].use_cache


async def _events(
    answers: Answers, body: Asked, asks: Sequence[Ask], form: Form, envelope: dict[str, Any]
) -> AsyncIterator[str]:  # fmt: skip
    usage: dict[str, Any] = {"usage": None} if body.wants_usage_chunk else {}  # then every chunk has the field
    prompt, completion = sum(len(ask.tokens) for ask in asks[:: body.choices]), 0
    begun: set[int] = set()  # choices whose first token has come
    try:
        async for index, delta in answers.deltas():
            completion += len(delta.tokens)
            if body.wants_usage_always:
                total = prompt + completion
                usage = {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}
            if index not in begun:
                begun.add(index)
                first = form.before_all() if len(begun) == 1 else {}
                if (opening := form.opening(index)) is not None:
                    yield _event({**envelope, "choices": [opening], **usage, **first})
            if delta.prompt_logprobs:  # the first, and perhaps a long one
                event = await asyncio.to_thread(_piece, form, index, delta, envelope, usage)
            else:
                event = _piece(form, index, delta, envelope, usage)
            if event is not None:
                yield event
    except ApiError as error:  # the status is long out: clients look for this
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
    """`long`: written in Python, for the encoder in C would hold the interpreter, and with it every stream, for seconds."""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    return "".join(encoder.iterencode(content)) if long else encoder.encode(content)
