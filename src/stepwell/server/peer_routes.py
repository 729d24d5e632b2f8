"""Routes between the servers of a prefill and decode pair. Every route requires the peer token.

GET     /handover/{number}    prefill server: the listing of an offer
DELETE  /handover/{number}    prefill server: the decode server no longer needs the offer
POST    /handover/ahead       decode server: a part of a prompt that is still being computed (`ahead.py`); fetch it now
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field, field_validator

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import BadTokens
from stepwell.engine.engine import Engine
from stepwell.engine.loop import EngineLoop
from stepwell.server.ahead import BUSY
from stepwell.server.api.bodies import Body, TokenIds, whole
from stepwell.server.api.requests import read_body
from stepwell.server.errors import AUTHENTICATION, ApiError
from stepwell.server.handover import Offers, Peers, call
from stepwell.server.served import Served
from stepwell.store_tier.ticket import Ticket
from stepwell.tree.match import Match

FETCH_S = 20.0  # the longest time a decode server waits for a part
MOST_FETCHES = 4  # parts fetched at once; further ones are refused
MAX_NAME = 8192  # characters of a salt or tenant: a tenant's salt contains the client's salt, escaped


def offers_router(offers: Offers, loop: EngineLoop) -> APIRouter:
    """For decode servers."""
    router = APIRouter(dependencies=[Depends(peer_check(offers.is_peer))])

    @router.get("/handover/{number}")
    async def listing(number: str) -> Response:
        """What a prefill server offers of a prompt."""
        found = offers.listing(number)
        if found is None:
            raise ApiError(404, "there is no such offer, or it has expired", code="offer_not_found")
        return Response(found, media_type="application/octet-stream")

    @router.delete("/handover/{number}")
    async def end(number: str) -> dict[str, bool]:
        """Ends an offer."""
        return {"ended": await offers.end(loop, number)}

    return router


def peer_check(is_peer: Callable[[bytes], bool]) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not is_peer(token.strip(" \t").encode("latin-1")):
            raise ApiError(401, "this route requires the peer token", type=AUTHENTICATION, code="invalid_peer_token")

    return check


class PartBody(Body):
    """A part: its tokens, namespace and lifetime. The fields of its offer are extra fields."""

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
    """For prefill servers."""
    router = APIRouter(dependencies=[Depends(peer_check(peers.is_peer))])
    places = asyncio.Semaphore(MOST_FETCHES)

    @router.post("/handover/ahead")
    async def ahead(request: Request) -> dict[str, int]:
        """Fetches a part of a prompt. Sent by a prefill server."""
        body, _ = await read_body(served, request, PartBody)
        served.must_fit(body.tokens, max_tokens=None, param="tokens")
        if places.locked():
            raise ApiError(BUSY, f"already fetching {MOST_FETCHES} parts", code="busy")
        async with places:
            return {"tokens": await fetch_ahead(peers, served.loop, body)}

    return router


async def fetch_ahead(peers: Peers, loop: EngineLoop, part: PartBody) -> int:
    """Prefetches an offer. Returns the number of tokens that can be resumed here now. Raises ApiError."""
    number = await peers.take({**(part.model_extra or {}), "do_remote_prefill": True})
    if number is None:
        return 0
    ticket: Ticket | None = None
    try:
        ticket = await call(loop, lambda engine: _prefetch(engine, part))
        until_s = asyncio.get_running_loop().time() + FETCH_S
        while not ticket.ready and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.01)
        return await call(loop, lambda engine: _lookup(engine, part).restore_tokens)
    except BadTokens as error:
        raise ApiError(400, str(error), param="tokens") from None
    finally:
        peers.done(number)
        if ticket is not None:
            opened = ticket
            await call(loop, lambda _: opened.close())


def _prefetch(engine: Engine, part: PartBody) -> Ticket:
    return engine.cache.prefetch(_lookup(engine, part), priority=part.priority, ttl_s=part.ttl_s, awaited=False)


def _lookup(engine: Engine, part: PartBody) -> Match:
    return engine.cache.lookup(part.tokens, namespace=engine.cache.namespace_for(salt=part.salt, tenant=part.tenant))
