"""Answers as HTTP replies: one JSON object when all have ended, or server-sent events as they grow.

A client that disconnects ends its answers either way.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from stepwell.engine.request import Ask, Delta
from stepwell.server.answers import Answers
from stepwell.server.errors import CLIENT_CLOSED, ApiError
from stepwell.server.requests import Asked
from stepwell.server.served import Served


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
        """The choice that begins a stream, where there is one."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""
        ...

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of an answer that is not streamed, from all its deltas as one."""
        ...


async def reply(request: Request, served: Served, body: Asked, asks: Sequence[Ask], form: Form) -> Response:
    """Queues the asks and answers in the way the body wants. Raises ApiError."""
    answers = Answers(served, asks)
    await answers.begin()
    envelope = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}
    if body.stream:
        envelope["object"] = form.chunk_object
        return _EventStream(answers, _events(answers, body, len(asks), form, envelope))
    envelope["object"] = form.whole_object
    return await _whole(request, answers, body, form, envelope)


async def _whole(request: Request, answers: Answers, body: Asked, form: Form, envelope: dict[str, Any]) -> Response:
    collecting = asyncio.ensure_future(_collect(answers))
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_CLOSED)
        choices = [form.whole(index, delta) for index, delta in sorted(collecting.result().items())]
        return JSONResponse({**envelope, "choices": choices, "usage": answers.usage(body.choices)})
    finally:
        answers.close()
        for task in (collecting, leaving):
            task.cancel()
        await asyncio.gather(collecting, leaving, return_exceptions=True)


async def _collect(answers: Answers) -> dict[int, Delta]:
    """Every answer as one delta."""
    parts: dict[int, list[Delta]] = {}
    async for index, delta in answers.deltas():
        parts.setdefault(index, []).append(delta)
    return {index: _joined(deltas) for index, deltas in parts.items()}


def _joined(deltas: Sequence[Delta]) -> Delta:
    return replace(
        deltas[-1],
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
    )


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Closes its answers however it ends, even before its first byte is out."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _events(answers: Answers, body: Asked, num_asks: int, form: Form, envelope: dict[str, Any]) -> AsyncIterator[str]:
    usage = {"usage": None} if body.wants_usage_chunk else {}  # then every chunk has the field
    for index in range(num_asks):
        opening = form.opening(index)
        if opening is not None:
            yield _event({**envelope, "choices": [opening], **usage})
    try:
        async for index, delta in answers.deltas():
            if delta.text or delta.logprobs or delta.finish is not None:
                yield _event({**envelope, "choices": [form.piece(index, delta)], **usage})
    except ApiError as error:  # the status is long out: clients look for this
        yield _event(error.body())
        return
    if body.wants_usage_chunk:
        yield _event({**envelope, "choices": [], "usage": answers.usage(body.choices)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
