"""Answers on their way from the engine's thread to the event loop.

    engine thread   on_delta  -- call_soon_threadsafe -->  queue   event loop

Whoever begins answers closes them: what has not ended by then is aborted, so that a client that leaves costs nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future

from stepwell.base.errors import StepwellError
from stepwell.engine.loop import OnDelta
from stepwell.engine.request import Ask, Delta, Finish, Usage
from stepwell.engine.scheduler import NO_ROOM
from stepwell.server.errors import SERVER, ApiError, api_error
from stepwell.server.served import Served

log = logging.getLogger(__name__)

_FAILED = "the engine failed on this request; the log says why"
_FOR_CLIENTS = (NO_ROOM,)  # reasons that say what to do; others may be texts of exceptions, also about somebody else's request


class Answers:
    """The answers to one HTTP request, one for each ask. For the event loop's thread."""

    def __init__(self, served: Served, asks: Sequence[Ask]) -> None:
        self._served = served
        self._asks = asks
        self._submitted: list[Future[int]] = []
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._usages: dict[int, Usage] = {}

    async def begin(self) -> None:
        """Queues all asks; or raises ApiError, and aborts those that were queued."""
        try:
            for index, ask in enumerate(self._asks):
                self._submitted.append(self._served.loop.submit(ask, self._listener(index)))
            for future in self._submitted:
                await asyncio.wrap_future(future)
        except BaseException as error:
            self.close()
            if isinstance(error, StepwellError):
                raise api_error(error) from None
            raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What is added, with the index of its ask, until all have ended. Raises ApiError when one cannot be finished."""
        while len(self._usages) < len(self._asks):
            index, delta = await self._deltas.get()
            if delta.finish is Finish.FAILED:
                log.error("request %d could not be finished: %s", delta.request, delta.error)
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
        for index, future in enumerate(self._submitted):
            if index not in self._usages and not future.cancel():
                future.add_done_callback(self._abort)

    def _abort(self, future: Future[int]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._served.loop.abort(future.result())  # ended ones are ignored

    def _listener(self, index: int) -> OnDelta:
        loop, metrics = asyncio.get_running_loop(), self._served.metrics

        def listen(delta: Delta) -> None:
            try:
                if delta.finish is not None:
                    metrics.ended(delta)  # first: who has an answer finds it counted
            finally:
                loop.call_soon_threadsafe(self._deltas.put_nowait, (index, delta))

        return listen
