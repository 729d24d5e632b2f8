"""`/cache`: the state of the cache, explanations of hits and misses, and, with the admin token, commands.

GET     /cache                state, sizes, counters; what each tenant has in memory
POST    /cache/explain        why a prompt would resume where it would
POST    /cache/flush          empty device and host memory, of one tenant, one salt or all, pins included
POST    /cache/audit          check the bookkeeping: every reference has a holder, every page is in one place
POST    /cache/store          attach a store; DELETE detaches it
POST    /cache/pins           keep the cached part of a prompt; GET lists pins, DELETE /cache/pins/{id} releases one

Tenants and salts are isolated here too: without the admin token, no client learns what others sent or pinned. Tenants act for
themselves and see their own pins; the operator may name a tenant.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from math import isinf
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field, field_validator

from stepwell import __version__
from stepwell.cache.explain import Explanation
from stepwell.cache.question import Question
from stepwell.engine.engine import Engine
from stepwell.server.access.admission import principal_of, require_admin, require_key, require_overview, require_owner
from stepwell.server.access.tenants import Principal
from stepwell.server.api.bodies import Body, CacheBody, TokenIds, whole
from stepwell.server.api.chat import chat_prompt
from stepwell.server.api.requests import must_be_within_ttl, read_body
from stepwell.server.errors import AUTHENTICATION, ApiError
from stepwell.server.monitoring.engine_metrics import read_state
from stepwell.server.served import Served
from stepwell.server.stores import Stores
from stepwell.tiers.lifetime import Pin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _NumberedPin:
    pin: Pin
    prompt_tokens: int
    tenant: str | None
    salt: str | None  # the request's own, without the tenant's


class Pins:
    """Pins by number, for HTTP clients. Expired pins are dropped on the next access. The engine's thread."""

    def __init__(self) -> None:
        self._kept: dict[int, _NumberedPin] = {}
        self._last = 0

    def add(
        self, engine: Engine, owner: Principal, tokens: list[int], *, salt: str | None, ttl_s: float | None
    ) -> dict[str, object]:
        """Pins the cached part of an owner's prompt. If nothing is cached, nothing is pinned and the id is None."""
        namespace = engine.cache.namespace_for(salt=owner.salted(salt), tenant=owner.name)
        pin = engine.cache.pins.add(tokens, namespace=namespace, ttl_s=owner.ttl_s(ttl_s))
        kept = _NumberedPin(pin=pin, prompt_tokens=len(tokens), tenant=owner.name, salt=salt)
        if pin.tokens == 0:
            engine.cache.pins.release(pin)
            return _shown(engine, None, kept)
        self._last += 1
        self._kept[self._last] = kept
        return _shown(engine, self._last, kept)

    def shown(self, engine: Engine, to: Principal) -> list[dict[str, object]]:
        """The tenant's own pins; all pins for the operator."""
        self._drop_expired(engine)
        return [_shown(engine, number, kept) for number, kept in self._kept.items() if to.operates or kept.tenant == to.name]

    def release(self, engine: Engine, number: int) -> bool:
        """False if there is no such pin, or it has expired."""
        self._drop_expired(engine)
        kept = self._kept.pop(number, None)
        if kept is not None:
            engine.cache.pins.release(kept.pin)
        return kept is not None

    def release_all(self, engine: Engine, *, tenant: str | None, salt: str | None) -> int:
        """Releases the pins of a tenant or one of its salts, or all if neither is given. Returns the number released."""
        self._drop_expired(engine)
        release_all = tenant is None and salt is None
        numbers = [
            number
            for number, kept in self._kept.items()
            if release_all or (kept.tenant == tenant and (salt is None or kept.salt == salt))
        ]
        return sum(self.release(engine, number) for number in numbers)

    def _drop_expired(self, engine: Engine) -> None:
        """The cache releases expired pins in its next step, which may be yet to come."""
        now = engine.clock.now()
        for number, kept in list(self._kept.items()):
            if kept.pin.expires_at_s <= now:
                del self._kept[number]


def _shown(engine: Engine, number: int | None, kept: _NumberedPin) -> dict[str, object]:
    until = kept.pin.expires_at_s
    return {
        "id": number,
        "tenant": kept.tenant,
        "pinned_tokens": kept.pin.tokens,
        "prompt_tokens": kept.prompt_tokens,
        "expires_in_s": None if isinf(until) else max(until - engine.clock.now(), 0.0),
    }


log = logging.getLogger(__name__)

_OF_NO_TENANT = ". This covers only prompts without a tenant: name a tenant to search its prompts"
_POLL_S = 0.005  # polling interval
_DETACH_WAIT_S = 10.0  # longest wait for the store to close before the response is 202


class TenantBody(CacheBody):
    """Concerns the caller's own state, or that of the tenant that the operator names."""

    tenant: str | None = None


class PromptBody(TenantBody):
    """A prompt as text, token ids or messages."""

    prompt: str | TokenIds | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    chat_template_kwargs: dict[str, Any] | None = None


class PinBody(PromptBody):
    model_config = ConfigDict(extra="forbid")

    ttl_s: float | None = Field(None, gt=0)


class FlushBody(TenantBody):
    model_config = ConfigDict(extra="forbid")  # a misspelt field must not flush everything


class StoreBody(Body):
    model_config = ConfigDict(extra="forbid")

    store: str
    options: dict[str, str] = Field(default_factory=dict)

    @field_validator("store")
    @classmethod
    def _encodable(cls, store: str) -> str:
        if "\0" in store:
            raise ValueError("a store's name must not contain NUL")
        return whole(store)


def question_router(served: Served, stores: Stores, pins: Pins) -> APIRouter:
    router, principals = APIRouter(), served.principals

    @router.get("/cache", dependencies=[require_overview(principals)])
    async def state(request: Request) -> dict[str, Any]:
        """Tiers, requests, store and counters of all callers together; what each tenant has in memory."""
        found = await served.call(lambda engine: _state(engine, served, stores))
        return {**found, "admin": principal_of(request).operates}  # whether the caller may change anything

    @router.get("/cache/pins", dependencies=[require_owner(principals)])
    async def listed(request: Request) -> dict[str, Any]:
        """Pins: a tenant sees its own, the admin token all."""
        return {"pins": await served.call(lambda engine: pins.shown(engine, principal_of(request)))}

    @router.post("/cache/explain", dependencies=[require_key(principals)])
    async def explain(request: Request) -> dict[str, Any]:
        """Why a prompt would resume where it would, and from which tier. Tenants ask about themselves; the admin token may name a
        `tenant`."""
        body, size_bytes = await read_body(served, request, PromptBody)
        owner = _owner(served, request, body)
        tokens = await served.run_in_thread(size_bytes, lambda: _tokens(served, body))
        question = await served.call(lambda engine: _question(engine, owner, tokens, body.cache_salt))
        while not await served.call(lambda engine: question.ready):
            await asyncio.sleep(_POLL_S)  # until the store responds or times out
        quote = principal_of(request).operates  # the store's own messages are for the operator
        found = await served.call(lambda engine: _explained(engine, question.answer(quote_store=quote)))
        whose = _OF_NO_TENANT if owner.name is None and principals.names else ""
        return {**found, "says": found["says"] + whose, "tenant": owner.name}

    return router


def order_router(served: Served, stores: Stores, pins: Pins) -> APIRouter:
    router = APIRouter(dependencies=[require_admin(served.principals)])

    @router.post("/cache/flush")
    async def flush(request: Request) -> dict[str, Any]:
        """Empties device and host memory, or what `tenant` and `cache_salt` name of it. The store keeps its values."""
        body, _ = await read_body(served, request, FlushBody)
        owner = _owner(served, request, body)
        return await served.call(lambda engine: _flush(engine, pins, owner, body.cache_salt))

    @router.post("/cache/audit")
    async def audit() -> dict[str, Any]:
        """Checks the bookkeeping of memory. `clean` is true, or `says` names the bug. Nothing is computed meanwhile."""
        return await served.call(_audited)

    @router.post("/cache/store")
    async def attach(request: Request) -> dict[str, Any]:
        """Attaches a store."""
        body, _ = await read_body(served, request, StoreBody)
        await asyncio.shield(asyncio.wrap_future(stores.attach(body.store, body.options)))
        return {"store": body.store, "state": "attached"}

    @router.delete("/cache/store")
    async def detach() -> Response:
        """Detaches the store, once what is on the host is stored."""
        closed = await asyncio.shield(asyncio.wrap_future(stores.detach()))
        closing = asyncio.wrap_future(closed)
        done, _ = await asyncio.wait({closing}, timeout=_DETACH_WAIT_S)
        if done:
            closing.result()
            return JSONResponse({"state": "closed"})
        closing.add_done_callback(_closed_late)
        return JSONResponse({"state": "closing"}, status_code=202)

    @router.post("/cache/pins")
    async def pin(request: Request) -> dict[str, Any]:
        """Pins what is cached of a prompt, for `ttl_s`."""
        body, size_bytes = await read_body(served, request, PinBody)
        owner = _owner(served, request, body)
        must_be_within_ttl(owner, body.ttl_s, param="ttl_s")
        tokens = await served.run_in_thread(size_bytes, lambda: _tokens(served, body))
        return await served.call(lambda engine: pins.add(engine, owner, tokens, salt=body.cache_salt, ttl_s=body.ttl_s))

    @router.delete("/cache/pins/{number}")
    async def unpin(number: int) -> dict[str, Any]:
        """Releases a pin."""
        if not await served.call(lambda engine: pins.release(engine, number)):
            raise ApiError(404, f"there is no pin {number}, or it has expired", param="id", code="pin_not_found")
        return {"id": number, "released": True}

    return router


def _closed_late(closing: asyncio.Future[None]) -> None:
    """Logs the error of a close that outlasted its request."""
    if not closing.cancelled() and (error := closing.exception()) is not None:
        log.warning("a detached store failed to close: %s", error)


def _owner(served: Served, request: Request, body: TenantBody) -> Principal:
    """The principal whose state a body concerns. Raises ApiError if the caller may not name the tenant, or it is unknown."""
    asker = principal_of(request)
    if body.tenant is None or body.tenant == asker.name:
        return asker
    if not asker.operates:
        raise ApiError(403, "only the admin token may name a tenant: leave it out", type=AUTHENTICATION, param="tenant")
    tenant = served.principals.tenant(body.tenant)
    if tenant is None:
        raise ApiError(404, f"there is no tenant {body.tenant!r:.80} here", param="tenant", code="tenant_not_found")
    return tenant


def _tokens(served: Served, body: PromptBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt (text or token ids) or messages", param="prompt")
    if body.messages is not None:
        tokens = chat_prompt(served, body.messages, body.tools, body.chat_template_kwargs)[0]
    elif isinstance(body.prompt, str):
        tokens = served.encode(body.prompt, param="prompt") if body.prompt else []
    else:
        tokens = body.prompt or []
    served.must_fit(tokens, max_tokens=None, param="prompt")
    return tokens


# ---- on the engine's thread -----------------------------------------------------------------------


def _write_policy(engine: Engine) -> dict[str, Any]:
    cache = engine.cache
    return {"policy": cache.config.write.value, "resumable_after_s": cache.store.resumable_after_s}


def _state(engine: Engine, served: Served, stores: Stores) -> dict[str, Any]:
    state, spec = read_state(engine), engine.cache.spec
    return {
        "model": served.name,
        "version": __version__,
        "page_tokens": spec.page_tokens,
        "bytes_per_token": float(spec.bytes_per_token),
        "checkpoint_bytes": spec.checkpoint_bytes(),
        "checkpoint_dtype": None if spec.narrow is None else spec.narrow.dtype,
        "max_context": engine.max_context,
        "kernels": engine.kernels,
        "write_policy": _write_policy(engine),
        "ranks": None if engine.ranks is None else asdict(engine.ranks),
        "requests": {"waiting": state.waiting, "active": state.active},
        "pending": state.pending,
        "deferred": state.deferred,
        "tiers": {tier.label: asdict(sizes) for tier, sizes in state.tiers.items()},
        "tenants": {name: {tier.label: asdict(sizes) for tier, sizes in tiers.items()} for name, tiers in state.tenants.items()},
        "store": {"name": stores.where, "state": state.store.name.lower(), "says": state.store.value},
        "counters": dict(state.counters),
        "sparse": None if state.spilling is None else asdict(state.spilling),
    }


def _question(engine: Engine, owner: Principal, tokens: list[int], salt: str | None) -> Question:
    return engine.cache.question(tokens, namespace=engine.cache.namespace_for(salt=owner.salted(salt), tenant=owner.name))


def _explained(engine: Engine, found: Explanation) -> dict[str, Any]:
    return {
        "says": str(found),
        "cause": found.cause.name.lower(),
        "reason": found.cause.value,
        "prompt_tokens": found.prompt_tokens,
        "usable_tokens": found.usable_tokens,
        "known_tokens": found.known_tokens,
        "arrived_tokens": found.arrived_tokens,
        "restore_tokens": found.restore_tokens,
        "device_tokens": found.device_tokens,
        "host_tokens": found.host_tokens,
        "store_tokens": found.store_tokens,
        "store_note": found.store_note,
        "states": list(found.states),
        "tier": found.tier.label if found.tier is not None else None,
        "at": found.at.isoformat(timespec="milliseconds") if found.at is not None else None,
        "seconds_ago": engine.clock.now() - found.at_s if found.at_s is not None else None,
        "detail": found.detail,
        "missing_states": dict(found.missing_states),
    }


def _audited(engine: Engine) -> dict[str, Any]:
    try:
        engine.cache.audit()
    except AssertionError as error:
        log.exception("the audit of the cache failed")
        return {"clean": False, "says": str(error)}
    return {"clean": True, "says": "every reference is accounted for"}


def _flush(engine: Engine, pins: Pins, owner: Principal, salt: str | None) -> dict[str, Any]:
    """Flushes one tenant, one salt, or everything. Pins are released first, because they would keep unreachable pages."""
    released = pins.release_all(engine, tenant=owner.name, salt=salt)
    if salt is not None:
        engine.cache.flush(namespace=engine.cache.namespace_for(salt=owner.salted(salt), tenant=owner.name))
        return {"flushed": "salt", "released_pins": released}
    if owner.name is None:
        engine.cache.flush()
        return {"flushed": "all", "released_pins": released}
    for namespace in engine.cache.namespaces:
        if namespace.tenant == owner.name:
            engine.cache.flush(namespace=namespace)
    return {"flushed": "tenant", "released_pins": released}
