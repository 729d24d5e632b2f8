"""The door of the server, before anything else: notes when a request arrived, refuses those for other names, counts errors that
go out, and closes in the end.

A door that closes lets those who are inside finish, and tells others to ask elsewhere. Reads no bodies, decides no answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.base.clock import Clock
from stepwell.server.errors import CLIENT_CLOSED, SERVER, ApiError, ErrorResponse

_ARRIVED = "stepwell.arrived_s"
_ALWAYS_OPEN = ("/metrics",)  # which also tell how the end goes


class Door:
    """Who is inside, and whether it is open. For the event loop's thread; `close` may be called from any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_inside = 0
        self.closed_at_s: float | None = None

    def close(self) -> None:
        if self.closed_at_s is None:
            self.closed_at_s = self._clock.now()

    def closed_for_s(self) -> float:
        """Seconds since it was closed; 0 while it is open."""
        return 0.0 if self.closed_at_s is None else self._clock.now() - self.closed_at_s

    def now(self) -> float:
        return self._clock.now()


class Doorway:
    """An ASGI application around all others."""

    def __init__(self, app: ASGIApp, door: Door, on_error: Callable[[int], None]) -> None:
        """`on_error` is told the status of each error that is sent, whoever sends it."""
        self._app = app
        self._door = door
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_ARRIVED] = self._door.now()
        sending = self._counted(send)
        if self._door.closed_at_s is not None and scope["path"] not in _ALWAYS_OPEN:
            error = ApiError(503, "the server is stopping: ask another one, or again later", type=SERVER, code="unavailable")
            await ErrorResponse(error.body(), status_code=503, headers={"Connection": "close"})(scope, receive, sending)
            return
        self._door.num_inside += 1
        try:
            await self._app(scope, receive, sending)
        finally:
            self._door.num_inside -= 1

    def _counted(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and message["status"] != CLIENT_CLOSED:
                self._on_error(message["status"])
            await send(message)

        return sending


def arrived_s(request: Request) -> float:
    """When a request came to the door, by the engine's clock."""
    return float(request.scope[_ARRIVED])


class HostCheck:
    """Refuses requests that were sent to another name than this server's. No names: every host will do.

    A page in a browser can point a name of its own at 127.0.0.1 and then read what is served there, as if it came from that
    page. The Host header tells: it still has the page's name. Only servers for one machine check it; others have names they do
    not know.
    """

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
