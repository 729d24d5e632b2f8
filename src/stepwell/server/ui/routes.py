"""`/ui`, a page to watch a server with, and the read-only routes that the page reads in addition to `/cache`.

GET     /ui                   the page; its files hold no secrets, so every client may read them
GET     /cache/history        the last hour: tokens by source, memory, requests
GET     /cache/requests       open requests: their progress, never their text
GET     /cache/tree           the largest stretches of cached paths, and checkpoints with the reason they were made
GET     /cache/store          how full the store is, by namespace

The page sends the token that is typed into it. Its headers allow a browser to load these files only, forbid framing, and forbid
making markup from text, because clients choose names of models, tenants and namespaces. The data routes require the same access
as `/cache`; salted entries and the store's own labels require the admin token. No route changes anything, and the time a route
takes does not grow with the tree or the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from itertools import chain, islice
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from stepwell.base.errors import StepwellError
from stepwell.base.ids import CACHED_TIERS
from stepwell.base.prompt import Namespace
from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Request as Running
from stepwell.server.access.admission import principal_of, require_overview
from stepwell.server.monitoring.engine_metrics import read_state
from stepwell.server.served import Served
from stepwell.server.stores import Stores
from stepwell.sim.page import STYLE
from stepwell.store.api import SpaceSize, Store, StoreSize, largest_spaces, size_of
from stepwell.tiers.lease import LeaseState
from stepwell.tree.survey import Stretch, Survey, SurveyedCheckpoint

MOST_REQUESTS, MOST_PATHS, MOST_SPACES = 50, 10, 50
REUSED_S = 1.0  # how long a survey is reused, so that many pages open at once cost the engine one survey
ID_DIGITS = 12  # hexadecimal digits of a namespace's digest, as in `stepwell store stat`


def watch_router(served: Served, stores: Stores) -> APIRouter:
    router = APIRouter(dependencies=[require_overview(served.principals)])
    surveys: dict[bool, tuple[float, dict[str, Any]]] = {}  # by whether salted entries are included: time and result
    surveying = asyncio.Lock()  # requests that arrive meanwhile get the same result

    @router.get("/cache/history")
    async def history() -> Response:
        """The last hour, a sample every 5 s: prompt tokens by source, answer tokens, memory, requests."""
        return JSONResponse(await served.call(lambda engine: served.history.read()))  # numbers by the thousand, as they are

    @router.get("/cache/requests")
    async def requests(request: Request) -> dict[str, Any]:
        """Up to 50 requests in progress: how far they are, never their text. Those with a salt need the admin token."""
        all_of_them = principal_of(request).operates
        return await served.call(lambda engine: _requests(engine, salted=all_of_them))

    @router.get("/cache/tree")
    async def tree(request: Request) -> dict[str, Any]:
        """The largest stretches of cached paths and the cost of computing them; checkpoints, and why they were left."""
        all_of_it = principal_of(request).operates
        async with surveying:
            since_s, found = surveys.get(all_of_it, (float("-inf"), {}))
            if served.clock.now() - since_s >= REUSED_S:
                found = await served.call(lambda engine: _tree(engine, salted=all_of_it))
                surveys[all_of_it] = served.clock.now(), found
        return found

    @router.get("/cache/store")
    async def store(request: Request) -> dict[str, Any]:
        """The store's state and size. Its largest namespaces need the admin token."""
        state = await served.call(read_state)
        size, spaces = await asyncio.to_thread(_held, state.attached, list_spaces=principal_of(request).operates)
        return {
            "name": stores.where,
            "state": state.store.name.lower(),
            "says": state.store.value,
            "breaker": state.breaker.value if state.breaker is not None else None,
            "used_bytes": size.used_bytes if size is not None else None,
            "budget_bytes": size.budget_bytes if size is not None else None,
            "disk_full": size is not None and size.disk_full,
            "namespaces": None if spaces is None else [_space(each) for each in spaces],
        }

    return router


# ---- on a thread: a store may take its time ---------------------------------------------------------


def _held(store: Store | None, *, list_spaces: bool) -> tuple[StoreSize | None, list[SpaceSize] | None]:
    """Size and namespaces; None for a store that does not know them, was closed meanwhile or cannot be reached."""
    if store is None:
        return None, None
    try:
        return size_of(store), largest_spaces(store, MOST_SPACES) if list_spaces else None
    except StepwellError:
        return None, None


def _space(held: SpaceSize) -> dict[str, Any]:
    return {
        "id": held.space.digest.hex()[:ID_DIGITS],
        "label": held.space.label,
        "tenant": held.space.tenant or None,
        "values": held.values,
        "used_bytes": held.used_bytes,
    }


# ---- on the engine's thread -----------------------------------------------------------------------


def _requests(engine: Engine, *, salted: bool) -> dict[str, Any]:
    """Running requests, then waiting ones. Without `salted`, requests with a salt are only counted."""
    scheduler, now_s = engine.scheduler, engine.clock.now()
    rows = (
        each for each in chain(scheduler.active.values(), scheduler.waiting.values()) if salted or each.submitted.salt is None
    )
    return {
        "active": len(scheduler.active),
        "waiting": len(scheduler.waiting),
        "requests": [_request(each, now_s) for each in islice(rows, MOST_REQUESTS)],
    }


def _request(request: Running, now_s: float) -> dict[str, Any]:
    sources = request.sources
    return {
        "id": request.id,
        "tenant": request.submitted.tenant,
        "state": _state_of(request),
        "age_s": now_s - request.arrived_s,
        "prompt_tokens": request.prompt_tokens,
        "ready_tokens": min(request.position, request.prompt_tokens),
        "cached_tokens": None if sources is None else sources.total - sources.computed,
        "answer_tokens": request.answer_tokens,
        "max_tokens": request.max_tokens,
        "priority": request.submitted.priority,
        "preemptions": request.preemptions,
    }


def _state_of(request: Running) -> str:
    if request.lease is None:
        return "fetching" if request.ticket is not None and not request.ticket.ready else "waiting"
    if request.lease.state is LeaseState.LOADING:
        return "loading"
    return "prompt" if request.position < request.prompt_tokens else "answering"


def _tree(engine: Engine, *, salted: bool) -> dict[str, Any]:
    cache, now_s = engine.cache, engine.clock.now()
    found: Survey = cache.survey(show=MOST_PATHS, salted=salted)
    digests = {each.space for each in found.stretches} | {each.space for each in found.checkpoints}
    spaces = {digest: _namespace(cache.namespace_of(digest)) for digest in digests}
    speed = cache.compute_tokens_per_s

    def common(each: Stretch | SurveyedCheckpoint, tokens: int) -> dict[str, Any]:
        """Fields that stretches and checkpoints share. `tokens` would have to be computed again without the entry."""
        compute_s = tokens / speed if speed else None
        return {"namespace": spaces[each.space], "used_ago_s": now_s - each.used_at_s, "compute_s": compute_s}

    return {
        "complete": found.complete,
        "num_paths": found.num_stretches,
        "tokens_per_s": speed,
        "needs_checkpoints": cache.spec.needs_checkpoint,
        "paths": [
            {
                **common(each, each.end - each.start),
                "start": each.start,
                "end": each.end,
                "branches": each.branches,
                "used_bytes": _by_tier(each.page_bytes),
                "checkpoints": each.checkpoints,
                "hits": each.hits,
            }
            for each in found.stretches
        ],
        "triggers": [
            {
                "trigger": trigger.name.lower() if trigger is not None else None,
                "says": trigger.value if trigger is not None else "not known",
                "count": tally.count,
                "used_bytes": _by_tier(tally.size_bytes),
            }
            for trigger, tally in sorted(found.triggers.items(), key=lambda each: -each[1].count)
        ],
        "checkpoints": [
            {
                **common(each, each.saves_tokens),
                "at": each.boundary,
                "trigger": each.trigger.name.lower() if each.trigger is not None else None,
                "says": each.trigger.value if each.trigger is not None else "not known",
                "saves_tokens": each.saves_tokens,
                "used_bytes": _by_tier(each.size_bytes),
                "uses": each.uses,
                "in_use": each.in_use,
                "to_be_stored": each.to_be_stored,
            }
            for each in found.checkpoints
        ],
    }


def _by_tier(sizes: list[int] | tuple[int, int]) -> dict[str, int]:
    return {tier.label: sizes[tier] for tier in CACHED_TIERS}


def _namespace(namespace: Namespace | None) -> dict[str, Any] | None:
    """None for a namespace that is no longer known. Never includes the salt."""
    if namespace is None:
        return None
    names = {"tenant": namespace.tenant, "adapter": namespace.adapter, "salted": namespace.salt is not None}
    return {"id": namespace.digest.hex()[:ID_DIGITS], **names}


MEDIA = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}
FILES = ("page.css", "main.js", "panels.js", "charts.js", "dom.js", "icon.svg")
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer server has a newer page
}


def ui_router() -> APIRouter:
    router = APIRouter()
    router.add_api_route("/ui", _sends("page.html"))
    for name in FILES:
        router.add_api_route(f"/ui/{name}", _sends(name))
    return router


def _sends(name: str) -> Callable[[], Awaitable[Response]]:
    """A route for one file. The style shared by all of Stepwell's pages comes before the page's own."""
    content = (files("stepwell.server.ui") / name).read_text(encoding="utf-8")
    if name == "page.css":
        content = f"{STYLE}\n{content}"
    media = MEDIA[name.rpartition(".")[2]]

    async def send() -> Response:
        return Response(content, media_type=media, headers=HEADERS)

    return send
