"""Builds the application from routes, error handlers and limits. Starts nothing. Small routes are here:

    /health     the process responds and the engine's thread runs
    /ready      the server accepts requests; false while it stops, although it lives until the last answer ends
    /v1/loads   requests, memory and speed, under SGLang's names
    /get_server_info, /model_info    settings and capabilities of the model, as SGLang has them
    /version    Stepwell's version; `--hide-version` removes it, because smg takes a server with this route for vLLM
    /v1/models, /metrics

No probe waits for a pass.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from stepwell import __version__
from stepwell.server.access.admission import Admission, AdmissionMiddleware, BodyLimit, HostCheck, require_key, require_overview
from stepwell.server.api.chat import chat_router
from stepwell.server.api.completions import completions_router, tokens_router
from stepwell.server.api.responses import responses_router
from stepwell.server.cache_routes import Pins, order_router, question_router
from stepwell.server.errors import SERVER, ApiError, install_errors
from stepwell.server.monitoring.activity import MAX_COUNT, Load
from stepwell.server.peer_routes import ahead_router, offers_router
from stepwell.server.served import Served
from stepwell.server.stores import Stores
from stepwell.server.ui.routes import ui_router, watch_router

_PROBED_BY = ["GET", "HEAD"]  # some load balancers send HEAD


def probe_router(served: Served, admission: Admission) -> APIRouter:
    router = APIRouter()
    keyed = [require_key(served.principals)]

    @router.api_route("/health", methods=_PROBED_BY)
    async def health() -> dict[str, Any]:
        """Whether the process responds and the engine's thread runs."""
        _must_live(served)
        return {"status": "ok", "model": served.name}

    @router.api_route("/ready", methods=_PROBED_BY)
    async def ready() -> dict[str, Any]:
        """Whether the server accepts requests."""
        _must_live(served)
        if admission.closed_at_s is not None:
            raise ApiError(503, "the server is stopping: ask another one, or again later", type=SERVER, code="unavailable")
        if (lost := served.loop.lost) is not None:
            raise ApiError(503, f"{lost}: ask another one, or again later", type=SERVER, code="unavailable")
        return {"status": "ready", "model": served.name}

    @router.get("/v1/loads", dependencies=[] if served.open_metrics else [require_overview(served.principals)])
    async def loads() -> dict[str, Any]:
        """Requests, memory and speed, in SGLang's form, for routers."""
        _must_live(served)
        load = served.load.read(arriving=served.loop.num_arriving)
        at = datetime.now(UTC).isoformat()
        return {"timestamp": at, "dp_rank_count": 1, "loads": [_rank(load)]}

    @router.get("/get_server_info", dependencies=keyed)
    async def server_info() -> dict[str, Any]:
        """Version, context length and the limit of running requests."""
        load = served.load.read(arriving=0)
        return {
            "version": __version__,
            "served_model_name": served.name,
            "context_length": served.max_context,
            "max_total_tokens": min(load.max_tokens, MAX_COUNT),
            "max_running_requests": load.max_running,
            "dp_size": 1,
            "is_embedding": False,
        }

    if not served.hide_version:

        @router.get("/version", dependencies=keyed)
        async def version() -> dict[str, Any]:
            """Stepwell's version; not with `--hide-version`."""
            return {"version": __version__}

    @router.get("/model_info", dependencies=keyed)
    async def model_info() -> dict[str, Any]:
        """Capabilities of the model."""
        return {"is_generation": True, "has_image_understanding": False, "has_audio_understanding": False}

    return router


def _must_live(served: Served) -> None:
    """Raises ApiError."""
    if not served.loop.alive or served.loop.gone:
        raise ApiError(503, "the engine has stopped", type=SERVER, code="unavailable")


def _rank(load: Load) -> dict[str, Any]:
    """One entry: the server is one engine, whatever it runs on."""
    return {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_total_reqs": load.running + load.waiting,
        "num_used_tokens": min(load.used_tokens, MAX_COUNT),
        "max_total_num_tokens": min(load.max_tokens, MAX_COUNT),
        "token_usage": load.used_share,
        "gen_throughput": load.tokens_per_s,
        "cache_hit_rate": load.hit_rate,
        "utilization": load.running / load.max_running,
        "max_running_requests": load.max_running,
    }


def build_app(served: Served, stores: Stores, admission: Admission) -> FastAPI:
    """The application. The caller runs the engine's loop around it."""
    app = FastAPI(title="stepwell", openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=served.max_body_bytes)
    app.add_middleware(HostCheck, names=served.hosts)
    app.add_middleware(
        AdmissionMiddleware, admission=admission, on_error=served.metrics.refused
    )  # outermost: it counts the errors of the others
    pins = Pins()
    install_errors(app)
    for router in (
        probe_router(served, admission),
        _models_router(served),
        completions_router(served),
        chat_router(served),
        responses_router(served),
        tokens_router(served),
        question_router(served, stores, pins),
        order_router(served, stores, pins),
        watch_router(served, stores),
        ui_router(),
        _metrics_router(served),
    ):
        app.include_router(router)
    if served.offers is not None:
        app.include_router(offers_router(served.offers, served.loop))
    if served.peers is not None:
        app.include_router(ahead_router(served.peers, served))
    return app


def _models_router(served: Served) -> APIRouter:
    router = APIRouter(dependencies=[require_key(served.principals)])
    card = {"object": "model", "created": int(time.time()), "owned_by": "stepwell", "max_model_len": served.max_context}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model's names and `max_model_len`."""
        return {"object": "list", "data": [{"id": name, **card} for name in served.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One name of the model."""
        return {"id": served.response_name(name), **card}

    return router


def _metrics_router(served: Served) -> APIRouter:
    router = APIRouter(dependencies=[] if served.open_metrics else [require_overview(served.principals)])

    @router.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        """All series, in Prometheus' text form."""
        return Response(await asyncio.to_thread(served.metrics.page), media_type=CONTENT_TYPE_LATEST)

    return router
