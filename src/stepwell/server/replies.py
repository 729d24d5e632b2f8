"""Answers as HTTP replies: one JSON object when all have ended, or server-sent events as they grow.

    engine thread   on_delta  -- call_soon_threadsafe -->  queue   event loop

Whoever begins answers closes them: what has not ended by then is aborted, so that a client that disconnects costs nothing more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from stepwell.base.errors import StepwellError
from stepwell.engine.edits import OFF_GRAMMAR
from stepwell.engine.loop import OnDelta
from stepwell.engine.request import Ask, Delta, Finish, Usage
from stepwell.engine.runner import RANK_LOST
from stepwell.engine.scheduler import NO_ROOM
from stepwell.server.activity_log import log_ended
from stepwell.server.bodies import Asked
from stepwell.server.door import arrived_s, principal_of
from stepwell.server.errors import CLIENT_CLOSED, SERVER, ApiError, api_error
from stepwell.server.handover import wants_offer
from stepwell.server.principals import Principal
from stepwell.server.requests import Unknown, read_body, refuse_unsupported
from stepwell.server.served import Served

B = TypeVar("B", bound=Asked)

log = logging.getLogger(__name__)

_LATE = "request_timeout"
_FAILED = "the engine failed on this request; the log says why"
_FOR_CLIENTS = (
    NO_ROOM,
    OFF_GRAMMAR,
)  # reasons that say what to do; others may be texts of exceptions, also about somebody else's request


class Answers:
    """The answers to one HTTP request, one for each ask. For the event loop's thread."""

    def __init__(
        self, served: Served, asks: Sequence[Ask], *, id: str, left_s: float | None = None,
        headers: Mapping[str, str], on_begun: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`id` is what clients and the log call the request. What has not ended in `left_s` is aborted, and its client told.

        `on_begun` is called once the first of them has begun, or none will; it may be called again. `headers` may name the span
        of the client that the request is part of.
        """
        self._served = served
        self._id = id
        self._on_begun = on_begun
        self._on_ended = None if served.traces is None else served.traces.listener(id, headers)
        self._asks = asks
        self._submitted: list[Future[int]] = []
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._usages: dict[int, Usage] = {}
        self._late = False
        self._timer = None if left_s is None else asyncio.get_running_loop().call_later(left_s, self._expire)

    async def begin(self) -> None:
        """Queues all asks; or raises ApiError, and aborts those that were queued."""
        try:
            for index, ask in enumerate(self._asks):
                self._submitted.append(self._served.loop.submit(ask, self._listener(index)))
            for future in self._submitted:
                await asyncio.wrap_future(future)
        except BaseException as error:
            self.close()
            if self._late:  # which also cancelled what the engine had not taken yet
                raise self._too_late() from None
            if isinstance(error, StepwellError):
                raise api_error(error) from None
            raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What is added, with the index of its ask, until all have ended. Raises ApiError when one cannot be finished."""
        while len(self._usages) < len(self._asks):
            index, delta = await self._deltas.get()
            self._on_begun()
            if delta.error == _LATE:
                raise self._too_late()
            if delta.finish is Finish.FAILED:
                log.error("request %s could not be finished: %s", self._id, delta.error)
                if (delta.error or "").startswith(RANK_LOST):
                    raise ApiError(503, str(delta.error), type=SERVER, code="unavailable")
                message = delta.error if delta.error in _FOR_CLIENTS else _FAILED
                raise ApiError(500, message, type=SERVER, code="engine_error")
            if delta.finish is Finish.ABORTED:
                raise ApiError(503, "the server is stopping", type=SERVER, code="unavailable")
            if delta.usage is not None:
                self._usages[index] = delta.usage
            yield index, delta

    def usage(self, choices: int) -> dict[str, object]:
        """What ended answers cost together, in OpenAI's form; each prompt counts once, as its first choice met it."""
        firsts = [usage for index, usage in self._usages.items() if index % choices == 0]
        tiers = {f"{tier}_tokens": sum(getattr(each.sources, tier) for each in firsts) for tier in ("device", "host", "store")}
        prompt = sum(each.prompt_tokens for each in firsts)
        completion = sum(each.completion_tokens for each in self._usages.values())
        accepted = sum(each.accepted_tokens for each in self._usages.values())
        rejected = sum(each.proposed_tokens for each in self._usages.values()) - accepted
        guessed = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}  # a draft's, not a client's
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(tiers.values()), **tiers},
            **({"completion_tokens_details": guessed} if accepted or rejected else {}),
        }

    def close(self) -> None:
        """Aborts what has not ended. May be called at any moment, and again."""
        self._on_begun()
        if self._timer is not None:
            self._timer.cancel()
        for index, future in enumerate(self._submitted):
            if index not in self._usages and not future.cancel():
                future.add_done_callback(self._abort)

    def _expire(self) -> None:
        """Time is up. What was added before is still told; the engine computes nothing more of it."""
        self._late = True
        self._deltas.put_nowait((0, Delta(request=0, finish=Finish.ABORTED, error=_LATE)))
        self.close()

    def _too_late(self) -> ApiError:
        limit = f"the {self._served.request_timeout_s:g} s that this server gives a request (--request-timeout)"
        return ApiError(504, f"the answer took longer than {limit}: ask for less, or again later", type=SERVER, code=_LATE)

    def _abort(self, future: Future[int]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._served.loop.abort(future.result())  # ended ones are ignored

    def _listener(self, index: int) -> OnDelta:
        loop, metrics, ask = asyncio.get_running_loop(), self._served.metrics, self._asks[index]
        choice = index if len(self._asks) > 1 else None

        def listen(delta: Delta) -> None:
            try:
                if delta.finish is not None:
                    metrics.ended(delta, ask.tenant)  # first: who has an answer finds it counted
                    log_ended(self._id, choice, ask, delta)
                    if self._on_ended is not None:  # not on the engine's thread
                        loop.call_soon_threadsafe(self._on_ended, choice, ask, delta)
            finally:
                loop.call_soon_threadsafe(self._deltas.put_nowait, (index, delta))

        return listen


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

    def piece(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """The choice of a chunk; None where there is nothing to tell yet."""
        ...

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of an answer that is not streamed, from all its deltas as one."""
        ...

    def beside(self, answers: Mapping[int, Delta]) -> dict[str, Any]:
        """What stands beside the choices of answers that are not streamed."""
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
    served.must_be_called(body.model)
    principal = principal_of(request)
    refuse_unsupported(body, principal, unknown)
    asks = await served.aside(size_bytes, lambda: asks_of(served, body, principal, arrived_s(request)), slow=body.is_slow)
    form = await served.aside(size_bytes, lambda: form_of(served, body, asks))
    return await _reply(request, served, body, asks, form)


async def _reply(request: Request, served: Served, body: Asked, asks: Sequence[Ask], form: Form) -> Response:
    """Queues the asks and answers in the way the body wants. Raises ApiError."""
    peers = served.peers
    taken = await peers.take(body.kv_transfer_params) if peers is not None else None
    id, left_s = f"{form.prefix}-{uuid.uuid4().hex}", served.left_s(arrived_s(request))

    def begun() -> None:
        if peers is not None:
            peers.done(taken)

    answers = Answers(served, asks, id=id, left_s=left_s, headers=request.headers, on_begun=begun)
    await answers.begin()
    envelope = {"id": id, "created": int(time.time()), "model": body.model}
    if body.stream:
        envelope["object"] = form.chunk_object
        return EventStream(answers, _events(answers, body, len(asks), form, envelope))
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
    more = {"usage": answers.usage(body.choices), **await _offered(served, body, asks)}
    return await asyncio.to_thread(_written, form, found, envelope, more)


async def collect(request: Request, answers: Answers) -> dict[int, Delta] | None:
    """Every answer as one delta, and closes them; None where the client has gone before. Raises ApiError."""
    collecting = asyncio.ensure_future(_collect(answers))
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return dict(sorted(collecting.result().items())) if collecting.done() else None
    finally:
        answers.close()
        for task in (collecting, leaving):
            task.cancel()
        await asyncio.gather(collecting, leaving, return_exceptions=True)


def _written(form: Form, found: Mapping[int, Delta], envelope: dict[str, Any], more: dict[str, Any]) -> Response:
    """On a thread: logprobs of a long prompt and their alternatives are millions of words, which takes its time."""
    choices = [form.whole(index, delta) for index, delta in found.items()]
    content = {**envelope, "choices": choices, **more, **form.beside(found)}
    return Response(_json(content, long=_are_long(found.values())), media_type="application/json")


async def _offered(served: Served, body: Asked, asks: Sequence[Ask]) -> dict[str, Any]:
    """What a router is to tell the decode server, where it asked for that and there is one prompt to go on from."""
    if served.offers is None or not _is_handed_over(body, asks):
        return {}
    return {"kv_transfer_params": await served.offers.offer(served.loop, asks[0])}


def _is_handed_over(body: Asked, asks: Sequence[Ask]) -> bool:
    return wants_offer(body.kv_transfer_params) and len(asks) == 1 and asks[0].use_cache


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
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
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
        yield _event({**envelope, "choices": [], "usage": answers.usage(body.choices)})
    yield "data: [DONE]\n\n"


def _piece(form: Form, index: int, delta: Delta, envelope: dict[str, Any], usage: dict[str, None]) -> str | None:
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
