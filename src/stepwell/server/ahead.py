"""Sends the finished parts of a prompt to a decode server while the rest is still being computed.

    prefill   PartSender.follow: whenever another part can be resumed from the host, it is offered (`handover.Offers`), and
              POST /handover/ahead {remote_host, remote_port, remote_request_id, and the fields of `peer_routes.PartBody`}
    decode    peer_routes.fetch_ahead: takes the offer, prefetches it to the host, and answers with the tokens it can resume

The request follows with the offer of the whole prompt, and fetches what is missing. Nothing depends on the parts: they are
verified on arrival and evicted like any page, and a part that does not arrive is fetched or computed later. Errors therefore end
here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stepwell.base.errors import StoreError
from stepwell.base.meters import Clock, SystemClock
from stepwell.engine.engine import Engine
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import GenerateRequest
from stepwell.server.handover import TTL_S, Offers, Params, call
from stepwell.store_tier.hand_out import HandOut

log = logging.getLogger(__name__)

PART_TOKENS = 1024  # worth a listing and two requests between servers
MOST_PARTS = 32  # per prompt: each part is sent and looked up with all tokens before it
LOOK_S = 0.1  # polling interval
SEND_S = 40.0  # timeout of the request; longer than the decode server's own
COOL_OFF_S = 10.0  # no parts are sent to a server for this long after an error
MOST_FOLLOWED = 4  # prompts at once: each is looked up repeatedly
MOST_MISSED = 2  # parts that the decode server could not fetch; the rest of the prompt then comes with its request
BUSY = 503
Address = tuple[str, int]


# ---- prefill ------------------------------------------------------------------------------------


class PartSender:
    """Sends parts to the decode servers that a prefill server knows. The event loop's thread."""

    def __init__(
        self, offers: Offers, addresses: Sequence[Address], token: str, *, part_tokens: int = PART_TOKENS, look_s: float = LOOK_S,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._offers, self._token = offers, token
        self._part_tokens, self._look_s = part_tokens, look_s
        self._clock = clock or SystemClock()
        self._threads = {each: ThreadPoolExecutor(2, thread_name_prefix=f"stepwell-ahead-{each[1]}") for each in addresses}
        self._paused_until_s: dict[Address, float] = {}
        self._following: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, loop: EngineLoop, request: GenerateRequest, params: Params | None) -> asyncio.Event | None:
        """Follows a request until the returned event is set. None if the decode server is not known."""
        address = self._target(params)
        if address is None or len(request.tokens) <= self._part_tokens or len(self._following) >= MOST_FOLLOWED:
            return None
        ended = asyncio.Event()
        task = asyncio.create_task(self.follow(loop, request, address, ended))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return ended

    async def follow(self, loop: EngineLoop, request: GenerateRequest, address: Address, ended: asyncio.Event) -> None:
        """Sends part after part. Raises nothing: the offer of the whole prompt follows."""
        sent = missed = 0
        progress = PromptParts(request, max(self._part_tokens, len(request.tokens) // MOST_PARTS))
        try:
            while missed < MOST_MISSED and not ended.is_set() and self._clock.now() >= self._paused_until_s.get(address, 0.0):
                out = await call(loop, progress.part)
                if out is None:
                    await _wait(ended, self._look_s)
                    continue
                if await self._send(loop, request, address, out, since=sent):
                    sent = out.tokens
                else:
                    missed += 1  # the next part starts where this one did
        except Exception as error:  # the boundary of a background task
            why = str(error) or type(error).__name__
            log.warning("cannot send parts of a prompt to %s:%d: %s", *address, why)
            self._paused_until_s[address] = self._clock.now() + COOL_OFF_S

    def _target(self, params: Params | None) -> Address | None:
        """The server that the router named, or the only one."""
        named = (params or {}).get("remote_host"), (params or {}).get("remote_port")
        if named == (None, None):
            return next(iter(self._threads)) if len(self._threads) == 1 else None
        return next((each for each in self._threads if named in (each, (each[0], str(each[1])))), None)

    async def _send(self, loop: EngineLoop, request: GenerateRequest, address: Address, out: HandOut, *, since: int) -> bool:
        """Offers a part and has the decode server fetch it. True if it can now resume with it. Raises StoreError, OSError or
        HTTPException.
        """
        params = await self._offers.offer_part(loop, out, since_tokens=since)
        if params is None:
            return False  # no space for the offer, or its pin has expired
        kept = {"salt": request.salt, "tenant": request.tenant, "priority": request.priority, "ttl_s": request.ttl_s}
        body = {**params, **kept, "tokens": list(request.tokens[: out.tokens + 1])}
        try:
            tokens = await asyncio.get_running_loop().run_in_executor(self._threads[address], self._post, address, body)
            return tokens >= out.tokens
        finally:
            await self._offers.end(loop, params["remote_request_id"])

    def _post(self, address: Address, body: Mapping[str, Any]) -> int:
        """The number of tokens the decode server can resume with; 0 if it is busy."""
        connection = http.client.HTTPConnection(*address, timeout=SEND_S)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            connection.request("POST", "/handover/ahead", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            answer = response.read(1 << 16)
            if response.status == BUSY:
                return 0
            if response.status != 200:
                raise StoreError(f"status {response.status}")
            match json.loads(answer):
                case {"tokens": int(tokens)}:
                    return tokens
            raise StoreError("its response is not a number of tokens")
        finally:
            connection.close()


class PromptParts:
    """Finds the parts of one prompt. The newest pages are always on their way to the host, so a part that was found is waited for
    before the next one is looked up.
    """

    def __init__(self, request: GenerateRequest, part_tokens: int) -> None:
        self._request, self._part_tokens = request, part_tokens
        self._handed_out = self._awaited = 0  # tokens

    def part(self, engine: Engine) -> HandOut | None:
        """Pins the next part once it can be resumed from the host; None until then. The engine's thread."""
        request, cache = self._request, engine.cache
        namespace = cache.namespace_for(salt=request.salt, tenant=request.tenant)
        if self._awaited < self._handed_out + self._part_tokens:
            self._awaited = cache.lookup(request.tokens, namespace=namespace).restore_tokens
            if self._awaited < self._handed_out + self._part_tokens:
                return None
        out = cache.hand_out(request.tokens[: self._awaited + 1], namespace=namespace, ttl_s=TTL_S)
        if out is not None and out.tokens == self._awaited:
            self._handed_out = out.tokens
            return out
        if out is not None:
            cache.pins.release(out.pin)
        if out is not None or not cache.copying:
            self._awaited = 0  # evicted or never saved: look up again
        return None


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
