"""`/cache`: what the cache holds and why a prompt would resume where it would; and, with the admin token, orders to it.

GET     /cache                state, sizes, counters of all together; what each tenant has in memory
POST    /cache/explain        why a prompt would resume where it would
POST    /cache/flush          empty device and host memory, of one tenant, one salt or of all; pins go too
POST    /cache/audit          check the bookkeeping of memory: every reference held by somebody, every page in one place
POST    /cache/store          attach a store; DELETE takes it away
POST    /cache/pins           keep what is cached of a prompt; GET lists pins, DELETE /cache/pins/{id} releases one

What tenants and salts separate stays apart here too: without the admin token nobody learns what others have asked, or pinned.
Tenants ask for themselves, and see their own pins; who has the admin token names the tenant that is meant.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field, field_validator

from stepwell import __version__
from stepwell.cache.explain import Explanation
from stepwell.cache.question import Question
from stepwell.engine.engine import Engine
from stepwell.server.access.door import asking, changing, owning, principal_of, watching
from stepwell.server.access.principals import Principal
from stepwell.server.api.bodies import Body, Kept, TokenIds, whole
from stepwell.server.api.chat import chat_prompt
from stepwell.server.api.requests import must_be_within_ttl, read_body
from stepwell.server.errors import AUTHENTICATION, ApiError
from stepwell.server.pins import Pins
from stepwell.server.served import Served
from stepwell.server.state import read_state
from stepwell.server.stores import Stores

log = logging.getLogger(__name__)

_OF_NO_TENANT = ". This looked in what belongs to no tenant: name a tenant to look in its prompts"
_POLL_S = 0.005  # between looks at whether a question is ready
_DETACH_WAIT_S = 10.0  # for the store to be closed, before the answer is that it will be


class Owned(Kept):
    """What belongs to somebody: to whoever asks, unless the operator names a tenant."""

    tenant: str | None = None


class PromptBody(Owned):
    """A prompt in any of the ways the other routes take one."""

    prompt: str | TokenIds | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    chat_template_kwargs: dict[str, Any] | None = None


class PinBody(PromptBody):
    model_config = ConfigDict(extra="forbid")

    ttl_s: float | None = Field(None, gt=0)


class FlushBody(Owned):
    model_config = ConfigDict(extra="forbid")  # a field that is misspelt must not empty everything


class StoreBody(Body):
    model_config = ConfigDict(extra="forbid")

    store: str
    options: dict[str, str] = Field(default_factory=dict)

    @field_validator("store")
    @classmethod
    def _encodable(cls, store: str) -> str:
        if "\0" in store:
            raise ValueError("a store's name must be text that can be written down")
        return whole(store)


def question_router(served: Served, stores: Stores, pins: Pins) -> APIRouter:
    router, principals = APIRouter(), served.principals

    @router.get("/cache", dependencies=[watching(principals)])
    async def state(request: Request) -> dict[str, Any]:
        """Tiers, requests, store and counters of all callers together; what each tenant has in memory."""
        found = await served.call(lambda engine: _state(engine, served, stores))
        return {**found, "admin": principal_of(request).operates}  # whether orders of whoever asks would be taken

    @router.get("/cache/pins", dependencies=[owning(principals)])
    async def listed(request: Request) -> dict[str, Any]:
        """Pins: a tenant sees its own, the admin token all."""
        return {"pins": await served.call(lambda engine: pins.shown(engine, principal_of(request)))}

    @router.post("/cache/explain", dependencies=[asking(principals)])
    async def explain(request: Request) -> dict[str, Any]:
        """Why a prompt would resume where it would, and from which tier. Tenants ask about themselves; the admin token may name a
        `tenant`."""
        body, size_bytes = await read_body(served, request, PromptBody)
        owner = _owner(served, request, body)
        tokens = await served.aside(size_bytes, lambda: _tokens(served, body))
        question = await served.call(lambda engine: _question(engine, owner, tokens, body.cache_salt))
        while not await served.call(lambda engine: question.ready):
            await asyncio.sleep(_POLL_S)  # the store answers between passes, or its time runs out
        quote = principal_of(request).operates  # what a store says of itself is for the operator
        found = await served.call(lambda engine: _explained(engine, question.answer(quote_store=quote)))
        whose = _OF_NO_TENANT if owner.name is None and principals.names else ""
        return {**found, "says": found["says"] + whose, "tenant": owner.name}

    return router


def order_router(served: Served, stores: Stores, pins: Pins) -> APIRouter:
    router = APIRouter(dependencies=[changing(served.principals)])

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
        tokens = await served.aside(size_bytes, lambda: _tokens(served, body))
        return await served.call(lambda engine: pins.add(engine, owner, tokens, salt=body.cache_salt, ttl_s=body.ttl_s))

    @router.delete("/cache/pins/{number}")
    async def unpin(number: int) -> dict[str, Any]:
        """Releases a pin."""
        if not await served.call(lambda engine: pins.release(engine, number)):
            raise ApiError(404, f"there is no pin {number}, or it ran out", param="id", code="pin_not_found")
        return {"id": number, "released": True}

    return router


def _closed_late(closing: asyncio.Future[None]) -> None:
    """Whoever detached the store has gone by now."""
    if not closing.cancelled() and (error := closing.exception()) is not None:
        log.warning("a store that was detached did not close: %s", error)


def _owner(served: Served, request: Request, body: Owned) -> Principal:
    """Whose state a body means. Raises ApiError for a tenant that is not the asker's to name, or that is not known."""
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
        log.exception("the cache's bookkeeping is wrong")
        return {"clean": False, "says": str(error)}
    return {"clean": True, "says": "every reference is accounted for"}


def _flush(engine: Engine, pins: Pins, owner: Principal, salt: str | None) -> dict[str, Any]:
    """One tenant, one salt of somebody, or all. Pins go first: they would keep bytes that nobody can reach any more."""
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
