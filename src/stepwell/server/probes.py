"""What routers and orchestrators ask of a server before they send it requests: does it live, is it ready, how busy is it.

    /health     the process answers and the engine's thread runs. No reason to restart it
    /ready      requests may be sent. Not while it stops, though it lives until the last answer has ended, nor without ranks
    /v1/loads   requests, memory and speed, as SGLang names them
    /get_server_info, /model_info    what the server was started with, and what its model can do
    /version    which Stepwell it is. smg takes whoever answers it for vLLM, whatever the answer says, so it can be hidden

`/server_info` stays unknown here on purpose: smg takes a server that answers it for SGLang, and then asks it for things that only
SGLang has. No route waits for a pass.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from stepwell import __version__
from stepwell.server.access.door import Door, asking, watching
from stepwell.server.errors import SERVER, ApiError
from stepwell.server.monitoring.load import MAX_COUNT, Load
from stepwell.server.served import Served

_PROBED_BY = ["GET", "HEAD"]  # some load balancers want no body


def probe_router(served: Served, door: Door) -> APIRouter:
    router = APIRouter()
    keyed = [asking(served.principals)]

    @router.api_route("/health", methods=_PROBED_BY)
    async def health() -> dict[str, Any]:
        """Whether the process answers and the engine's thread runs."""
        _must_live(served)
        return {"status": "ok", "model": served.name}

    @router.api_route("/ready", methods=_PROBED_BY)
    async def ready() -> dict[str, Any]:
        """Whether requests may be sent."""
        _must_live(served)
        if door.closed_at_s is not None:
            raise ApiError(503, "the server is stopping: ask another one, or again later", type=SERVER, code="unavailable")
        if (lost := served.loop.lost) is not None:
            raise ApiError(503, f"{lost}: ask another one, or again later", type=SERVER, code="unavailable")
        return {"status": "ready", "model": served.name}

    @router.get("/v1/loads", dependencies=[] if served.open_metrics else [watching(served.principals)])
    async def loads() -> dict[str, Any]:
        """Requests, memory and speed, in SGLang's form, for routers."""
        _must_live(served)
        load = served.load.read(arriving=served.loop.num_arriving)
        at = datetime.now(UTC).isoformat()
        return {"timestamp": at, "dp_rank_count": 1, "loads": [_rank(load)]}

    @router.get("/get_server_info", dependencies=keyed)
    async def server_info() -> dict[str, Any]:
        """Version, context length and the most requests at once."""
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
            """This program's version; not with `--hide-version`."""
            return {"version": __version__}

    @router.get("/model_info", dependencies=keyed)
    async def model_info() -> dict[str, Any]:
        """What the model can do."""
        return {"is_generation": True, "has_image_understanding": False, "has_audio_understanding": False}

    return router


def _must_live(served: Served) -> None:
    """Raises ApiError."""
    if not served.loop.alive or served.loop.gone:
        raise ApiError(503, "the engine has stopped", type=SERVER, code="unavailable")


def _rank(load: Load) -> dict[str, Any]:
    """There is one rank: the server is one engine, whatever it runs on."""
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
