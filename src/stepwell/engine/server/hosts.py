"""Refuses requests that were sent to another name than this server's.

A page in a browser can point a name of its own at 127.0.0.1 and then read what is served there, as if it came from that page.
The Host header tells: it still has the page's name. Only servers for one machine check it; others have names they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell.engine.server.errors import ApiError, ErrorResponse


class HostCheck:
    """An ASGI application around another. No names: every host will do."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names and _name(Headers(scope=scope).get("host", "")) not in self._names:
            error = ApiError(421, "this server does not go by that name; start it with --allow-host NAME", code="unknown_host")
            await ErrorResponse(error.body(), status_code=error.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _name(host: str) -> str:
    """Without the port: `[::1]:8000` is ::1."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()
