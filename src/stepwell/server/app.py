"""Puts the server together: routes, errors, limits. The small routes (models, metrics) are here. Starts nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from stepwell.server.access.door import BodyLimit, Door, Doorway, HostCheck, asking, watching
from stepwell.server.ahead import ahead_router
from stepwell.server.api.chat import chat_router
from stepwell.server.api.completions import completions_router
from stepwell.server.api.responses import responses_router
from stepwell.server.api.tokens import tokens_router
from stepwell.server.cache_routes import order_router, question_router
from stepwell.server.errors import install_errors
from stepwell.server.handover import offers_router
from stepwell.server.pins import Pins
from stepwell.server.probes import probe_router
from stepwell.server.served import Served
from stepwell.server.stores import Stores
from stepwell.server.ui.page_routes import ui_router
from stepwell.server.ui.watch_routes import watch_router


def build_app(served: Served, stores: Stores, door: Door) -> FastAPI:
    """The application. Whoever runs it starts the engine's loop before, and stops it after."""
    app = FastAPI(title="stepwell", openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=served.max_body_bytes)
    app.add_middleware(HostCheck, names=served.hosts)
    app.add_middleware(Doorway, door=door, on_error=served.metrics.refused)  # around the others: they refuse too
    pins = Pins()
    install_errors(app)
    for router in (
        probe_router(served, door),
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
    router = APIRouter(dependencies=[asking(served.principals)])
    card = {"object": "model", "created": int(time.time()), "owned_by": "stepwell", "max_model_len": served.max_context}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model's names and `max_model_len`."""
        return {"object": "list", "data": [{"id": name, **card} for name in served.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One name of the model."""
        return {"id": served.called(name), **card}

    return router


def _metrics_router(served: Served) -> APIRouter:
    router = APIRouter(dependencies=[] if served.open_metrics else [watching(served.principals)])

    @router.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        """All series, in Prometheus' text form."""
        return Response(await asyncio.to_thread(served.metrics.page), media_type=CONTENT_TYPE_LATEST)

    return router
