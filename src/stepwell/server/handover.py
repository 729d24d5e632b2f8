"""Prefill and decode on two servers: one computes a prompt and offers its pages from host memory, the other reads them and
continues.

    router    POST a completion, kv_transfer_params {do_remote_decode: true}, one token  -->  prefill: Offers
              <--  kv_transfer_params {do_remote_prefill: true, remote_host, remote_port, remote_request_id, ...}
    router    POST the same completion with these  -->  decode: Peers
    decode    GET /handover/ID, with the peer token  -->  prefill: the listing (`store/peer/listing.py`)
    decode    reads the pages through its PeerStore, as from any store; DELETE /handover/ID when the request has begun

The fields are vLLM's. A client supplies only a server and a number, and only servers given at the start are contacted. If
anything fails, the decode server computes the prompt. Routes are in `peer_routes.py`.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from threading import Lock
from typing import Any, TypeVar

from stepwell.base.errors import StoreError
from stepwell.base.meters import Clock, SystemClock
from stepwell.base.store_key import StoreKey
from stepwell.engine.engine import Engine
from stepwell.engine.loop import EngineLoop
from stepwell.engine.requests.request import GenerateRequest
from stepwell.server.errors import ApiError
from stepwell.store.memory import MemoryStore
from stepwell.store.peer.lane import SharedHost, Shown, Wire
from stepwell.store.peer.listing import MAX_BYTES, Listing, parse
from stepwell.store.peer.store import PeerStore
from stepwell.store_tier.hand_out import HandOut, listing_of
from stepwell.transfer.store_worker import HostPages, StoreWorker

log = logging.getLogger(__name__)

TTL_S = 60.0  # lifetime of an offer; a decode server asks for it at once
HELD_SHARE = 0.5  # of the host tier, at most, may be held by offers; the oldest end first
SAVING_S, SAVING_POLL_S = 10.0, 0.01  # limit and polling interval while the last pages of a prompt reach the host
ASK_S = 5.0  # timeout of a request to a peer
THREADS = 4  # per peer
_NUMBER = re.compile(r"[A-Za-z0-9_-]{16,64}\Z")
Params = Mapping[str, Any]
T = TypeVar("T")


def wants_offer(params: Params | None) -> bool:
    return params is not None and params.get("do_remote_decode") is True


# ---- prefill ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Offer:
    out: HandOut
    listing: bytes
    size_bytes: int
    until_s: float
    shown: Shown  # the process that exposes the memory


class Offers:
    """The offers of a prefill server. `start` it before the engine's loop; afterwards it belongs to the event loop's thread."""

    def __init__(
        self, memory: SharedHost, wire: Wire, *, host: str, port: int, token: str, key: StoreKey | None = None,
        ttl_s: float = TTL_S, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`host` and `port` are the address for decode servers; `key` stamps pages as it does for a store."""
        self._memory, self._wire = memory, wire
        self._host, self._port, self._key = host, port, key
        self._token = sha256(token.encode()).digest()
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._id = secrets.token_hex(8)
        self._closed = False
        self._showing = Lock()  # guards _shown, which listing threads use
        self._shown: Shown | None = None
        self._offers: dict[str, _Offer] = {}  # oldest first

    def start(self) -> None:
        """Exposes host memory to engines on other machines. Raises StoreError."""
        self._shown = Shown(self._memory, self._wire)

    def close(self) -> None:
        with self._showing:
            self._closed = True
            if self._shown is not None:
                self._shown.close()

    @property
    def shown(self) -> Shown:
        """The process that exposes the memory, restarted if it died, which ends all offers. Any thread. Raises StoreError."""
        with self._showing:
            assert self._shown is not None, "Offers.start was not called"
            if self._closed:
                raise StoreError("the server is stopping")
            if not self._shown.alive:
                log.warning("the process that exposes host memory to other servers has died; restarting it")
                self._shown.close()
                self._shown = Shown(self._memory, self._wire)
            return self._shown

    def __len__(self) -> int:
        return len(self._offers)

    async def offer(self, loop: EngineLoop, request: GenerateRequest) -> dict[str, Any] | None:
        """Offers the computed part of a prompt. Returns the fields for the router, or None if there is nothing to offer.

        A thread stamps the pages. If that takes longer than their pin lasts, nothing is offered.
        """
        out = await self._held(loop, request)
        return None if out is None else await self._offer(loop, out, 0, self._make_space)

    async def offer_part(self, loop: EngineLoop, out: HandOut, *, since_tokens: int) -> dict[str, Any] | None:
        """Offers pinned pages from `since_tokens` on. Never ends another offer: returns None if there is no space left."""
        return await self._offer(loop, out, since_tokens, self._require_space)

    async def _offer(
        self, loop: EngineLoop, out: HandOut, since_tokens: int, make_space: Callable[[EngineLoop, int], Awaitable[None]]
    ) -> dict[str, Any] | None:
        kept = False
        try:
            until_s = self._clock.now() + self._ttl_s
            shown, listing = await asyncio.to_thread(self._listing, await call(loop, _pages_of), out, since_tokens)
            packed, size_bytes = listing.pack(), _held_bytes(out, listing, since_tokens)
            await make_space(loop, size_bytes)
            kept = await call(loop, lambda _: out.pin.held)
        except (StoreError, OSError) as error:
            log.warning("cannot offer a prompt to other servers: %s", error)
        finally:
            if not kept:
                await _release(loop, out)
        if not kept:
            return None
        number = secrets.token_urlsafe(24)
        self._offers[number] = _Offer(out=out, listing=packed, size_bytes=size_bytes, until_s=until_s, shown=shown)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._id,
            "remote_request_id": number,
            "remote_host": self._host,
            "remote_port": self._port,
            "remote_block_ids": [],
            "tp_size": 1,
        }

    def listing(self, number: str) -> bytes | None:
        offer = self._offers.get(number)
        if offer is None or offer.until_s <= self._clock.now() or not offer.shown.alive:
            return None
        return offer.listing

    async def end(self, loop: EngineLoop, number: str) -> bool:
        """Ends an offer and releases its pages. False if there is no such offer."""
        offer = self._offers.pop(number, None)
        if offer is not None:
            await _release(loop, offer.out)
        return offer is not None

    def is_peer(self, token: bytes) -> bool:
        return compare_digest(sha256(token).digest(), self._token)

    async def _held(self, loop: EngineLoop, request: GenerateRequest) -> HandOut | None:
        """Pins a prompt once all of it is on the host. None if that takes too long, or nothing can be resumed."""

        def hold(engine: Engine) -> tuple[HandOut | None, bool]:
            cache = engine.cache
            namespace = cache.namespace_for(salt=request.salt, tenant=request.tenant)
            out = cache.hand_out(request.tokens, namespace=namespace, ttl_s=self._ttl_s)
            may_come = out is None and cache.copying > 0 and cache.lookup(request.tokens, namespace=namespace).restore_tokens > 0
            return out, may_come

        until_s = self._clock.now() + SAVING_S
        out, may_come = await call(loop, hold)
        while may_come and self._clock.now() < until_s:
            await asyncio.sleep(SAVING_POLL_S)
            out, may_come = await call(loop, hold)
        return out

    def _listing(self, pages: HostPages, out: HandOut, since_tokens: int) -> tuple[Shown, Listing]:
        worker, shown = StoreWorker(MemoryStore(0), pages, key=self._key), self.shown
        part = out.since(since_tokens)
        return shown, listing_of(part, worker, pages.block, address=shown.address, session=shown.session)

    async def _require_space(self, loop: EngineLoop, size_bytes: int) -> None:
        """Raises StoreError."""
        await self._end_expired(loop)
        if sum(offer.size_bytes for offer in self._offers.values()) + size_bytes > self._memory.size_bytes * HELD_SHARE:
            raise StoreError("offers use all the memory they may")

    async def _make_space(self, loop: EngineLoop, size_bytes: int) -> None:
        await self._end_expired(loop)
        most = self._memory.size_bytes * HELD_SHARE - size_bytes
        while self._offers and sum(offer.size_bytes for offer in self._offers.values()) > most:
            await self.end(loop, next(iter(self._offers)))

    async def _end_expired(self, loop: EngineLoop) -> None:
        now = self._clock.now()
        for number in [number for number, offer in self._offers.items() if offer.until_s <= now]:
            await self.end(loop, number)


async def call(loop: EngineLoop, work: Callable[[Engine], T]) -> T:
    return await asyncio.wrap_future(loop.call(work))


async def _release(loop: EngineLoop, out: HandOut) -> None:
    def release(engine: Engine) -> None:
        if out.pin.held:
            engine.cache.pins.release(out.pin)

    await call(loop, release)


def _held_bytes(out: HandOut, listing: Listing, since_tokens: int) -> int:
    """Host memory that an offer holds: the pages it lists, and the pages before them, which have the same size."""
    pages_before = since_tokens * len(out.pages.keys) // out.tokens
    return sum(value.length for value in listing.values) + pages_before * listing.values[0].length


def _pages_of(engine: Engine) -> HostPages:
    (pages,) = engine.cache.store.host_pages
    return pages


# ---- decode -------------------------------------------------------------------------------------


class Peers:
    """The prefill servers of a decode server. The event loop's thread."""

    def __init__(self, store: PeerStore, addresses: Sequence[tuple[str, int]], token: str, *, ask_s: float = ASK_S) -> None:
        self._store = store
        self._token = token
        self._ask_s = ask_s
        self._threads = {
            address: ThreadPoolExecutor(THREADS, thread_name_prefix=f"stepwell-peer-{address[1]}") for address in addresses
        }
        self._open: dict[str, tuple[str, int]] = {}  # offers taken, and their servers

    @property
    def store(self) -> PeerStore:
        return self._store

    def is_peer(self, token: bytes) -> bool:
        return compare_digest(sha256(token).digest(), sha256(self._token.encode()).digest())

    async def take(self, params: Params | None) -> str | None:
        """Takes the offer that a request names, so that its prefetch finds the pages. Returns its number, or None if there is no
        usable offer. Raises ApiError for malformed fields.
        """
        if params is None or params.get("do_remote_prefill") is not True:
            return None
        address, number = _named(params)
        if address not in self._threads:
            log.warning("a request names %r:%d, which was not given with --peer; computing the prompt", *address)
            return None
        if number in self._open:
            return None  # a duplicate request: the first one uses the offer
        asked = asyncio.get_running_loop().run_in_executor(self._threads[address], self._ask, "GET", address, number)
        try:
            listing = parse(await asyncio.wait_for(asked, 2 * self._ask_s))
            if listing.session.rpartition(":")[0] != address[0]:
                raise StoreError(f"its memory is at {listing.session!r}, on another machine")
            self._store.add(number, f"{address[0]}:{address[1]}", listing)
        except (TimeoutError, OSError, http.client.HTTPException, StoreError) as error:
            log.warning("cannot fetch an offer of %s:%d; computing the prompt: %s", *address, error or type(error).__name__)
            return None
        self._open[number] = address
        return number

    def done(self, number: str | None) -> None:
        """Ends an offer on both servers when its request has begun or was cancelled. Idempotent."""
        address = self._open.pop(number, None) if number is not None else None
        if number is not None and address is not None:
            self._store.withdraw(number)
            self._threads[address].submit(self._end_remote_offer, address, number)

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, verb: str, address: tuple[str, int], number: str) -> bytes:
        connection = http.client.HTTPConnection(*address, timeout=self._ask_s)
        try:
            connection.request(verb, f"/handover/{number}", headers={"Authorization": f"Bearer {self._token}"})
            response = connection.getresponse()
            body = response.read(MAX_BYTES + 1)
            if response.status != 200 or len(body) > MAX_BYTES:
                raise StoreError(f"status {response.status}")
            return body
        finally:
            connection.close()

    def _end_remote_offer(self, address: tuple[str, int], number: str) -> None:
        try:
            self._ask("DELETE", address, number)
        except (OSError, http.client.HTTPException, StoreError) as error:
            log.debug("an offer of %s:%d was left to expire: %s", *address, error)


def _named(params: Params) -> tuple[tuple[str, int], str]:
    host, port, number = params.get("remote_host"), params.get("remote_port"), params.get("remote_request_id")
    if isinstance(port, str) and port.isascii() and port.isdecimal() and len(port) <= 5:
        port = int(port)
    if isinstance(host, str) and isinstance(port, int) and isinstance(number, str) and _NUMBER.match(number):
        return (host[:255], port), number
    message = "kv_transfer_params must name a server and a request: pass on the fields that the prefill server returned"
    raise ApiError(400, message, param="kv_transfer_params")
