"""The answers to one HTTP request, passed from the engine's thread to the event loop.

    engine thread   on_delta  -- call_soon_threadsafe -->  queue   event loop

The creator of `Answers` must close them. Closing aborts answers that have not ended, so that a client that disconnects costs
nothing more. Wire formats are in `replies.py` and `responses.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from stepwell.base.errors import StepwellError
from stepwell.engine.loop import OnDelta
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest, Usage
from stepwell.engine.running.runner import RANK_LOST
from stepwell.engine.sampling.edits import OFF_GRAMMAR
from stepwell.engine.scheduling.scheduler import NO_ROOM
from stepwell.server.access.admission import arrived_s, note_error, origin_of
from stepwell.server.errors import SERVER, ApiError, api_error
from stepwell.server.monitoring.activity import log_ended
from stepwell.server.served import Served

log = logging.getLogger(__name__)

_FAILED = "the engine failed on this request; the log says why"
# Reasons that concern the request and say what to do, with their codes. Other reasons may quote exceptions about other requests.
_ASKED_TOO_MUCH = {NO_ROOM: "context_length_exceeded", OFF_GRAMMAR: "invalid_grammar"}


class Answers:
    """The answers to one HTTP request, one per `GenerateRequest`. The event loop's thread."""

    def __init__(
        self, served: Served, requests: Sequence[GenerateRequest], *, id: str, request: Request,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`id` names the answers in responses and in the log. When the request times out, open answers are aborted and the client
        gets an error. `on_begun` is called when the first answer has begun, or none will; possibly several times.
        """
        self._served = served
        self._id = id
        self._on_begun = on_begun
        self._origin = origin_of(request.scope)
        self._on_ended = None if served.traces is None else served.traces.listener(id, request.headers)
        self._requests = requests
        self._submitted: list[Future[int]] = []
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._usages: dict[int, Usage] = {}
        self._late = False
        self.failed: int | None = None  # status of the error that ended them
        left_s = served.time_left_s(arrived_s(request))
        self._timer = None if left_s is None else asyncio.get_running_loop().call_later(left_s, self._expire)

    async def begin(self) -> None:
        """Queues all requests. On failure raises ApiError and aborts those already queued."""
        try:
            for index, request in enumerate(self._requests):
                self._submitted.append(self._served.loop.submit(request, self._listener(index)))
            for future in self._submitted:
                await asyncio.wrap_future(future)
        except BaseException as error:
            self.close()
            if self._late:  # the timeout also cancelled queued requests
                raise self._too_late() from None
            if isinstance(error, StepwellError):
                raise api_error(error) from None
            raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yields deltas with the index of their request until all answers have ended. Raises ApiError if one fails."""
        while len(self._usages) < len(self._requests):
            index, delta = await self._deltas.get()
            self._on_begun()
            error = self._error_of(delta)
            if error is not None:
                self.failed = error.status
                raise error
            if delta.usage is not None:
                self._usages[index] = delta.usage
            yield index, delta

    def usage(self, choices: int, details: Mapping[str, int]) -> dict[str, Any]:
        """The usage of all answers in OpenAI's form. Each prompt counts once, with the sources of its first choice. `details` are
        added to the details of the completion.
        """
        firsts = [usage for index, usage in self._usages.items() if index % choices == 0]
        tiers = {f"{tier}_tokens": sum(getattr(each.sources, tier) for each in firsts) for tier in ("device", "host", "store")}
        prompt = sum(each.prompt_tokens for each in firsts)
        completion = sum(each.completion_tokens for each in self._usages.values())
        accepted = sum(each.accepted_tokens for each in self._usages.values())
        rejected = sum(each.proposed_tokens for each in self._usages.values()) - accepted
        guessed = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}  # of a draft model
        details = {**details, **(guessed if accepted or rejected else {})}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(tiers.values()), **tiers},
            **({"completion_tokens_details": details} if details else {}),
        }

    def close(self) -> None:
        """Aborts open answers. Idempotent; may be called at any time."""
        self._on_begun()
        if self._timer is not None:
            self._timer.cancel()
        for index, future in enumerate(self._submitted):
            if index not in self._usages and not future.cancel():
                future.add_done_callback(self._abort)

    def _error_of(self, delta: Delta) -> ApiError | None:
        """The error of an answer that failed; None if it continues or ended normally."""
        if delta.finish is Finish.LATE:
            return self._too_late()
        if delta.error in _ASKED_TOO_MUCH:
            return ApiError(400, delta.error, code=_ASKED_TOO_MUCH[delta.error])
        if delta.finish is Finish.FAILED:
            log.error("request %s could not be finished: %s", self._id, delta.error)
            if (delta.error or "").startswith(RANK_LOST):
                return ApiError(503, str(delta.error), type=SERVER, code="unavailable")
            return ApiError(500, _FAILED, type=SERVER, code="engine_error")
        if delta.finish is Finish.ABORTED:
            return ApiError(503, "the server is stopping", type=SERVER, code="unavailable")
        return None

    def _expire(self) -> None:
        """Ends the request on timeout. Deltas that arrived before are still sent."""
        self._late = True
        self._deltas.put_nowait((0, Delta(request=0, finish=Finish.LATE)))
        self.close()

    def _too_late(self) -> ApiError:
        limit = f"the {self._served.request_timeout_s:g} s that this server gives a request (--request-timeout)"
        return ApiError(
            504, f"the answer took longer than {limit}: request less, or retry later", type=SERVER, code="request_timeout"
        )

    def _abort(self, future: Future[int]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._served.loop.abort(future.result())  # no effect on ended requests

    def _listener(self, index: int) -> OnDelta:
        loop, progress, request = asyncio.get_running_loop(), self._served.progress, self._requests[index]
        choice = index if len(self._requests) > 1 else None

        def listen(delta: Delta) -> None:
            try:
                if self._late and delta.finish is Finish.ABORTED:
                    delta = replace(delta, finish=Finish.LATE)
                progress.added(request, delta)
                if delta.finish is not None:
                    log_ended(self._id, choice, request, delta, self._origin)
                    if self._on_ended is not None:  # off the engine's thread
                        loop.call_soon_threadsafe(self._on_ended, choice, request, delta)
            finally:
                loop.call_soon_threadsafe(self._deltas.put_nowait, (index, delta))

        return listen


class EventStream(StreamingResponse):
    """Closes its answers however it ends, even before the first byte."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()
            if self._answers.failed is not None:
                note_error(scope, self._answers.failed)


async def collect(request: Request, answers: Answers) -> dict[int, Delta] | None:
    """Joins each answer into one delta and closes them. None if the client disconnected. Raises ApiError."""
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


async def _collect(answers: Answers) -> dict[int, Delta]:
    """Each answer as one delta."""
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
    """Returns when the client disconnects. The body was read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
