"""`/v1/models` and `/health`: what is served, and whether it is."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from stepwell.server.access import asking
from stepwell.server.errors import SERVER, ApiError
from stepwell.server.served import Served


def models_router(served: Served) -> APIRouter:
    router = APIRouter(dependencies=[asking(served.principals)])
    card = {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "stepwell",
        "max_model_len": served.max_context,
    }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        must_be_served(served, name)
        return card

    return router


def health_router(served: Served) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, Any]:
        if not served.loop.alive:
            raise ApiError(503, "the engine has stopped", type=SERVER, code="unavailable")
        return {"status": "ok", "model": served.name}

    return router


def must_be_served(served: Served, name: str) -> None:
    if name != served.name:
        raise ApiError(
            404, f"there is no model {name!r:.200} here; this server has {served.name!r}", param="model", code="model_not_found"
        )
