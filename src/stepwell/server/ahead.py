"""Sending while computing: a decode server gets the parts of a prompt that are finished while the rest is still computed.

    prefill   Ahead.follow, beside the request: whenever more of the prompt can be resumed from the host, that part is offered
              (`handover.Offers`) and told:
              POST /handover/ahead {remote_host, remote_port, remote_request_id, and what `Told` has}, with the peer token
    decode    fetch_ahead: takes the offer as it takes any, brings it up to its host with nobody waiting for it, and answers

The request comes later, with the offer of its whole prompt, and fetches what is still missing. Nothing depends on what was sent
ahead: it is verified when it arrives, evicted like anything else, and where it does not come it is fetched or computed then. So
whatever goes wrong here ends here.
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

from fastapi import APIRouter, Depends, Request
from pydantic import Field, field_validator

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import BadTokens, StoreError
from stepwell.base.meters import Clock, SystemClock
from stepwell.engine.engine import Engine
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import Ask
from stepwell.server.api.bodies import Body, TokenIds, whole
from stepwell.server.api.requests import read_body
from stepwell.server.errors import ApiError
from stepwell.server.handover import TTL_S, Offers, Params, Peers, call, peer_check
from stepwell.server.served import Served
from stepwell.store_tier.hand_out import HandOut
from stepwell.store_tier.ticket import Ticket
from stepwell.tree.match import Match

log = logging.getLogger(__name__)

PART_TOKENS = 1024  # that are worth a listing and two requests between servers
MOST_PARTS = 32  # of one prompt: each is told with all tokens before it, and looked up with them
LOOK_S = 0.1  # between looks at how far a prompt has come
TELL_S = 40.0  # for the other server to have fetched a part: longer than that waits for one
COOL_OFF_S = 10.0  # that a server which could not be told is left alone
FETCH_S = 20.0  # that a decode server waits for a part
MOST_FETCHES = 4  # parts that it fetches at a time; more are refused
MOST_FOLLOWED = 4  # prompts at a time: each is looked up again and again; those behind them wait to be computed, mostly
MOST_MISSED = 2  # parts that the other server had no room or time for; then the rest of a prompt comes with its request
MAX_NAME = 8192  # characters of a salt or tenant; a salt that a client chose is escaped in one of its tenant
_BUSY = 503
Address = tuple[str, int]


# ---- prefill ------------------------------------------------------------------------------------


class Ahead:
    """The decode servers that a prefill server sends to while it computes. The event loop's thread."""

    def __init__(
        self, offers: Offers, addresses: Sequence[Address], token: str, *, part_tokens: int = PART_TOKENS, look_s: float = LOOK_S,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._offers, self._token = offers, token
        self._part_tokens, self._look_s = part_tokens, look_s
        self._clock = clock or SystemClock()
        self._threads = {each: ThreadPoolExecutor(2, thread_name_prefix=f"stepwell-ahead-{each[1]}") for each in addresses}
        self._alone_until_s: dict[Address, float] = {}
        self._following: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, loop: EngineLoop, ask: Ask, params: Params | None) -> asyncio.Event | None:
        """Follows a request that was asked, until the event is set; None where nobody is known who will answer it."""
        address = self._answers(params)
        if address is None or len(ask.tokens) <= self._part_tokens or len(self._following) >= MOST_FOLLOWED:
            return None
        ended = asyncio.Event()
        task = asyncio.create_task(self.follow(loop, ask, address, ended))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return ended

    async def follow(self, loop: EngineLoop, ask: Ask, address: Address, ended: asyncio.Event) -> None:
        """Sends part after part. Raises nothing: the offer of the whole prompt is what counts."""
        told = missed = 0
        progress = Progress(ask, max(self._part_tokens, len(ask.tokens) // MOST_PARTS))
        try:
            while missed < MOST_MISSED and not ended.is_set() and self._clock.now() >= self._alone_until_s.get(address, 0.0):
                out = await call(loop, progress.part)
                if out is None:
                    await _wait(ended, self._look_s)
                    continue
                if await self._send(loop, ask, address, out, since=told):
                    told = out.tokens
                else:
                    missed += 1  # the next part begins where this one did
        except Exception as error:  # the boundary of a task that nobody waits for
            why = str(error) or type(error).__name__
            log.warning("parts of a prompt are not sent to %s:%d while it is computed: %s", *address, why)
            self._alone_until_s[address] = self._clock.now() + COOL_OFF_S

    def _answers(self, params: Params | None) -> Address | None:
        """The server that a router has named, or the only one there is."""
        named = (params or {}).get("remote_host"), (params or {}).get("remote_port")
        if named == (None, None):
            return next(iter(self._threads)) if len(self._threads) == 1 else None
        return next((each for each in self._threads if named in (each, (each[0], str(each[1])))), None)

    async def _send(self, loop: EngineLoop, ask: Ask, address: Address, out: HandOut, *, since: int) -> bool:
        """Offers a part, and has the other server fetch it; whether that could resume with it now. Raises StoreError, OSError or
        HTTPException where it cannot be asked.
        """
        params = await self._offers.offer_part(loop, out, since_tokens=since)
        if params is None:
            return False  # there is no room for it, or what was held is gone
        kept = {"salt": ask.salt, "tenant": ask.tenant, "priority": ask.priority, "ttl_s": ask.ttl_s}
        body = {**params, **kept, "tokens": list(ask.tokens[: out.tokens + 1])}
        try:
            tokens = await asyncio.get_running_loop().run_in_executor(self._threads[address], self._tell, address, body)
            return tokens >= out.tokens
        finally:
            await self._offers.end(loop, params["remote_request_id"])

    def _tell(self, address: Address, body: Mapping[str, Any]) -> int:
        """How many tokens the other server can resume with; none where it is busy."""
        connection = http.client.HTTPConnection(*address, timeout=TELL_S)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            connection.request("POST", "/handover/ahead", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            said = response.read(1 << 16)
            if response.status == _BUSY:
                return 0
            if response.status != 200:
                raise StoreError(f"it answers {response.status}")
            match json.loads(said):
                case {"tokens": int(tokens)}:
                    return tokens
            raise StoreError("it answers something else than how many tokens it has")
        finally:
            connection.close()


class Progress:
    """How far a prompt has come. The newest of what was computed is always on its way to the host: so what was found at one look
    is waited for, and only then is looked for more.
    """

    def __init__(self, ask: Ask, part_tokens: int) -> None:
        self._ask, self._part_tokens = ask, part_tokens
        self._given = self._awaited = 0  # tokens

    def part(self, engine: Engine) -> HandOut | None:
        """What can be resumed with from the host, where that is more than before by a part. The engine's thread."""
        ask, cache = self._ask, engine.cache
        namespace = cache.namespace_for(salt=ask.salt, tenant=ask.tenant)
        if self._awaited < self._given + self._part_tokens:
            self._awaited = cache.lookup(ask.tokens, namespace=namespace).restore_tokens
            if self._awaited < self._given + self._part_tokens:
                return None
        out = cache.hand_out(ask.tokens[: self._awaited + 1], namespace=namespace, ttl_s=TTL_S)
        if out is not None and out.tokens == self._awaited:
            self._given = out.tokens
            return out
        if out is not None:
            cache.pins.release(out.pin)
        if out is not None or not cache.copying:
            self._awaited = 0  # it will not come, or has gone: what there is now is looked for
        return None


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


# ---- decode -------------------------------------------------------------------------------------


class Told(Body):
    """What `Ahead` tells of a part, beside the name of its offer: whose it is, and how long it is kept."""

    tokens: TokenIds = Field(min_length=1)
    salt: str | None = Field(max_length=MAX_NAME)
    tenant: str | None = Field(max_length=MAX_NAME)
    priority: int = Field(ge=0, le=MAX_PRIORITY)
    ttl_s: float | None = Field(gt=0)

    @field_validator("salt", "tenant")
    @classmethod
    def _names_are_whole(cls, name: str | None) -> str | None:
        return None if name is None else whole(name)


def ahead_router(peers: Peers, served: Served) -> APIRouter:
    """For prefill servers, which have the peer token."""
    router = APIRouter(dependencies=[Depends(peer_check(peers.is_peer))])
    places = asyncio.Semaphore(MOST_FETCHES)

    @router.post("/handover/ahead")
    async def ahead(request: Request) -> dict[str, int]:
        """Which part of a prompt a decode server can fetch now. Sent by a prefill server."""
        body, _ = await read_body(served, request, Told)
        served.must_fit(body.tokens, max_tokens=None, param="tokens")
        if places.locked():
            raise ApiError(_BUSY, "so many parts are fetched already", code="busy")
        async with places:
            return {"tokens": await fetch_ahead(peers, served.loop, body)}

    return router


async def fetch_ahead(peers: Peers, loop: EngineLoop, told: Told) -> int:
    """Brings up what an offer has of some tokens; how many of them can be resumed with here then. Raises ApiError."""
    number = await peers.take({**(told.model_extra or {}), "do_remote_prefill": True})
    if number is None:
        return 0
    ticket: Ticket | None = None
    try:
        ticket = await call(loop, lambda engine: _prefetch(engine, told))
        until_s = asyncio.get_running_loop().time() + FETCH_S
        while not ticket.ready and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.01)
        return await call(loop, lambda engine: _lookup(engine, told).restore_tokens)
    except BadTokens as error:
        raise ApiError(400, str(error), param="tokens") from None
    finally:
        peers.done(number)
        if ticket is not None:
            opened = ticket
            await call(loop, lambda _: opened.close())


def _prefetch(engine: Engine, told: Told) -> Ticket:
    return engine.cache.prefetch(_lookup(engine, told), priority=told.priority, ttl_s=told.ttl_s, awaited=False)


def _lookup(engine: Engine, told: Told) -> Match:
    return engine.cache.lookup(told.tokens, namespace=engine.cache.namespace_for(salt=told.salt, tenant=told.tenant))
