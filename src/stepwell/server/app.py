"""Puts the server together: routes, errors, limits. Starts nothing."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from stepwell.server.access import watching
from stepwell.server.cache_routes import order_router, question_router
from stepwell.server.chat import chat_router
from stepwell.server.completions import completions_router
from stepwell.server.door import Door, Doorway, HostCheck
from stepwell.server.errors import install_errors
from stepwell.server.models import health_router, models_router
from stepwell.server.pins import Pins
from stepwell.server.reading import BodyLimit
from stepwell.server.served import Served
from stepwell.server.stores import Stores


def build_app(served: Served, stores: Stores, door: Door) -> FastAPI:
    """The application. Whoever runs it starts the engine's loop before, and stops it after."""
    app = FastAPI(title="stepwell", openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=served.max_body_bytes)
    app.add_middleware(HostCheck, names=served.hosts)
    app.add_middleware(Doorway, door=door, on_error=served.metrics.refused)  # around the others: they refuse too
    pins = Pins()
    install_errors(app)
    for router in (
        health_router(served),
        models_router(served),
        completions_router(served),
        chat_router(served),
        question_router(served, stores, pins),
        order_router(served, stores, pins),
        _metrics_router(served),
    ):
        app.include_router(router)
    return app


def _metrics_router(served: Served) -> APIRouter:
    router = APIRouter(dependencies=[] if served.open_metrics else [watching(served.principals)])

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(served.metrics.page), media_type=CONTENT_TYPE_LATEST)

    return router
