"""The door of the server, before any route: notes when a request arrived, refuses those that may not come in, says whose it is.

A door that closes lets the requests that are inside finish, and refuses others. It also refuses requests while MOST_INSIDE are
inside, but for probes, for which more connections are reserved. Requests for other names are refused, and bodies that are too
large. Errors that go out are counted and logged. Each request has an id, the client's `x-request-id` or a new one, which its
response carries. The tenant of a request is found once, and kept with it for the route. Reads no bodies, decides no answers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes
from stepwell.server.access.principals import Principal, Principals
from stepwell.server.errors import AUTHENTICATION, CLIENT_CLOSED, SERVER, ApiError, ErrorResponse

log = logging.getLogger(__name__)

_ARRIVED = "stepwell.arrived_s"
_ALWAYS_OPEN = ("/metrics", "/health", "/ready", "/v1/loads")  # which also tell how the end goes
_PRINCIPAL, _FAILED, _REQUEST_ID = "stepwell.principal", "stepwell.failed", "stepwell.request_id"
_ID_HEADER = b"x-request-id"
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")  # fits into a header and a line of the log
MOST_INSIDE, RESERVED = 1024, 64  # requests at once, and probes in addition
_TOO_LARGE, _TOO_SLOW = "body_too_large", "body_timeout"
IDLE_S, MOST_S = 30.0, 600.0  # that a client which has not sent all of a body may be silent, and that a body may take
_LEFT_S = 1.0  # of silence, after which what is left of a body is not read before an answer that has not asked for it
_LONGEST_PATH = 100  # in a line of the log
_READ_TIMES = 4  # a client that is still sending may miss the answer: so much more than the limit is read, and dropped


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

    def refusal(self, path: str) -> ApiError | None:
        """Why a request may not come in now; None if it may."""
        probes = path in _ALWAYS_OPEN
        if self.closed_at_s is not None and not probes:
            return ApiError(503, "the server is stopping: ask another one, or again later", type=SERVER, code="unavailable")
        if self.num_inside >= MOST_INSIDE + (RESERVED if probes else 0):
            why = f"{self.num_inside} requests are under way, as many as this server takes: ask another one, or again later"
            return ApiError(503, why, type=SERVER, code="overloaded")
        return None


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
        scope[_REQUEST_ID] = _id_of(scope)
        sending = self._noted(scope, send)
        refusal = self._door.refusal(scope["path"])
        if refusal is not None:  # what is left of a body would hold the connection
            await ErrorResponse.of(refusal, close=True)(scope, receive, sending)
            return
        self._door.num_inside += 1
        try:
            await self._app(scope, receive, sending)
        finally:
            self._door.num_inside -= 1
            if _FAILED in scope:
                self._note(scope, scope[_FAILED])

    def _noted(self, scope: Scope, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400 and message["status"] != CLIENT_CLOSED:
                    self._note(scope, message["status"])
                id_header = (_ID_HEADER, scope[_REQUEST_ID].encode())
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        return sending

    def _note(self, scope: Scope, status: int) -> None:
        self._on_error(status)
        if scope["path"] not in _ALWAYS_OPEN:  # probes ask all the time: an error of theirs is an answer
            self._log(scope, status)

    def _log(self, scope: Scope, status: int) -> None:
        """Why is left out: that may quote what the client sent."""
        fields = {**origin_of(scope), "method": scope["method"], "status": status}
        principal = scope.get(_PRINCIPAL)
        if principal is not None and principal.name is not None:
            fields["tenant"] = principal.name
        log.info("error sent", extra={"fields": {**fields, "total_s": round(self._door.now() - scope[_ARRIVED], 4)}})


def arrived_s(request: Request) -> float:
    """When a request came to the door, by the engine's clock."""
    return float(request.scope[_ARRIVED])


def origin_of(scope: Scope) -> dict[str, str]:
    """Where a request comes from and where it goes, for lines of the log."""
    client = scope.get("client")
    origin = {"request_id": str(scope[_REQUEST_ID]), "path": scope["path"][:_LONGEST_PATH]}
    return origin if client is None else {**origin, "client": str(client[0])}


def _id_of(scope: Scope) -> str:
    """The id that the client gave a request, or a new one."""
    given = next((value for name, value in scope["headers"] if name == _ID_HEADER), b"")
    return given.decode() if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def client_of(request: Request) -> str:
    """Whose limits a request counts against: its tenant's, or those of the address it comes from."""
    name = principal_of(request).name
    return name or str((request.scope.get("client") or ("",))[0])


def note_error(scope: Scope, status: int) -> None:
    """A stream has ended with an error, when another status was long out."""
    scope[_FAILED] = status


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
            await ErrorResponse.of(error, close=True)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _name(host: str) -> str:
    """Without the port: `[::1]:8000` is ::1."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


class BodyLimit:
    """Refuses bodies that are too large, whether they say so or not, before anybody keeps them in memory, and those that do not
    come: a server has so many connections. An ASGI application.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, idle_s: float = IDLE_S, most_s: float = MOST_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._most_s = most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._idle_s, self._most_s, is_whole=not _has_body(scope))
        if _declared(scope) > self._max_bytes:
            error = ApiError(413, self._message(), code=_TOO_LARGE)
            await ErrorResponse.of(error)(scope, receive, self._answering(body, send, self._idle_s))
        else:
            await self._app(scope, self._counted(body), self._answering(body, send, _LEFT_S))

    def _counted(self, body: _Body) -> Receive:
        taken = 0

        async def take() -> Message:
            nonlocal taken
            message = await body.receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise ApiError(413, self._message(), code=_TOO_LARGE)
            return message

        return take

    def _answering(self, body: _Body, send: Send, silent_s: float) -> Send:
        """An answer that has not asked for the whole body: what comes of that soon is read and dropped, since a client that is
        still sending may miss it, and where more is left no other request can follow on the connection.
        """

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.is_whole:
                await body.drop(self._max_bytes * _READ_TIMES, min(silent_s, self._idle_s))
                if not body.is_whole:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        return sending

    def _message(self) -> str:
        return f"the body is larger than the {format_bytes(self._max_bytes)} this server takes"


class _Body:
    """What a client sends of one body, and whether that was all."""

    def __init__(self, receive: Receive, idle_s: float, most_s: float, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._receive = receive
        self._idle_s = idle_s
        self._most_s = most_s
        self._since_s: float | None = None  # when somebody first asked for it

    async def receive(self) -> Message:
        """The next of it, or once it is whole whatever comes. Raises ApiError where nothing comes in time."""
        return await (self._receive() if self.is_whole else self._in_time(self._idle_s))

    async def drop(self, most_bytes: int, silent_s: float) -> None:
        """Reads on until it is whole, is more than so many bytes, or nothing comes for so long."""
        dropped = 0
        with suppress(ApiError):
            while not self.is_whole and dropped <= most_bytes:
                dropped += len((await self._in_time(silent_s)).get("body", b""))

    async def _in_time(self, silent_s: float) -> Message:
        now_s = asyncio.get_running_loop().time()
        self._since_s = now_s if self._since_s is None else self._since_s
        wait_s = min(silent_s, self._since_s + self._most_s - now_s)
        try:
            message = await asyncio.wait_for(self._receive(), max(wait_s, 0.0))
        except TimeoutError:
            why = f"the body did not come in time: nothing for {silent_s:g} s, or not all of it in {self._most_s:g} s"
            raise ApiError(408, why, code=_TOO_SLOW) from None
        self.is_whole = not message.get("more_body", False)
        return message


def _has_body(scope: Scope) -> bool:
    return _declared(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


def _declared(scope: Scope) -> int:
    sizes = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(sizes[0]) if sizes and sizes[0].isdigit() else 0


# ---- who may call a route -----------------------------------------------------------------------


def asking(principals: Principals) -> Dependency:
    """For routes that change nothing: open, or for holders of a key or the admin token."""

    async def check(request: Request) -> None:
        _resolve(principals, request)

    dependency: Dependency = Depends(check)
    return dependency


def watching(principals: Principals) -> Dependency:
    """For routes that show all principals together: as `asking`, but not for tenants, who would watch each other."""

    async def check(request: Request) -> None:
        if _resolve(principals, request).name is not None:
            raise _wants_admin("this shows all tenants together")

    dependency: Dependency = Depends(check)
    return dependency


def changing(principals: Principals) -> Dependency:
    """For routes that change something: for holders of the admin token alone."""

    async def check(request: Request) -> None:
        principal = principals.of_key(_bearer(request))
        if principal is None or not principal.operates:
            raise _wants_admin("this changes the cache")
        request.scope[_PRINCIPAL] = principal

    dependency: Dependency = Depends(check)
    return dependency


def owning(principals: Principals) -> Dependency:
    """For routes that show what is the asker's own: for tenants, and for the operator, whose is everything."""

    async def check(request: Request) -> None:
        principal = principals.of_key(_bearer(request))
        if principal is None or (principal.name is None and not principal.operates):
            raise _wants_admin("this shows what everybody has pinned")
        request.scope[_PRINCIPAL] = principal

    dependency: Dependency = Depends(check)
    return dependency


def principal_of(request: Request) -> Principal:
    """Whose a request is, on a route with one of the above."""
    principal = request.scope[_PRINCIPAL]
    assert isinstance(principal, Principal), f"{request.url.path} does not check who asks"
    return principal


def _resolve(principals: Principals, request: Request) -> Principal:
    sent = _bearer(request)
    principal = principals.of_key(sent)
    if principal is None:
        what = "the API key that was sent is none of this server's" if sent else "this server wants its API key as a bearer token"
        raise ApiError(401, what, type=AUTHENTICATION, code="invalid_api_key")
    request.scope[_PRINCIPAL] = principal
    return principal


def _wants_admin(why: str) -> ApiError:
    message = f"{why}: give the admin token, printed at the start, as a bearer token"
    return ApiError(401, message, type=AUTHENTICATION, code="invalid_admin_token")


def _bearer(request: Request) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Headers are read as Latin-1, where bytes of other letters look like blanks: only what HTTP calls one is taken off.
    return token.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b""
