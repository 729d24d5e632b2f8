"""Admission of requests, before any route: arrival time, limits, request id, and the principal of each request.

`Admission` refuses requests while the server stops, and while MOST_INSIDE are open; RESERVED more places are for probes. Further
middleware refuses unknown Host names and bodies that are too large or too slow. Errors are counted and logged. Each response has
the client's `x-request-id`, or a new one. The dependencies at the end find a request's principal once, and keep it for the route.
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
from stepwell.server.access.tenants import Principal, Principals
from stepwell.server.errors import AUTHENTICATION, CLIENT_CLOSED, SERVER, ApiError, ErrorResponse

log = logging.getLogger(__name__)

_ARRIVED = "stepwell.arrived_s"
_ALWAYS_OPEN = ("/metrics", "/health", "/ready", "/v1/loads")  # also while the server stops
_PRINCIPAL, _FAILED, _REQUEST_ID = "stepwell.principal", "stepwell.failed", "stepwell.request_id"
_ID_HEADER = b"x-request-id"
_PLAIN_ID = re.compile(rb"[!-~]{1,128}")  # safe in a header and in the log
MOST_INSIDE, RESERVED = 1024, 64  # open requests, and additional probes
_TOO_LARGE, _TOO_SLOW = "body_too_large", "body_timeout"
IDLE_S, MOST_S = 30.0, 600.0  # longest silence within a body, and longest time for a whole body
_LEFT_S = 1.0  # before an early response, the rest of the body is read until this long a silence
_LONGEST_PATH = 100  # characters in the log
_READ_TIMES = 4  # a client that is still sending may miss the response: up to this multiple of the limit is read and dropped


class Admission:
    """Counts open requests. Belongs to the event loop's thread; `close` may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_inside = 0
        self.closed_at_s: float | None = None

    def close(self) -> None:
        if self.closed_at_s is None:
            self.closed_at_s = self._clock.now()

    def closed_for_s(self) -> float:
        """Seconds since `close`; 0 before."""
        return 0.0 if self.closed_at_s is None else self._clock.now() - self.closed_at_s

    def now(self) -> float:
        return self._clock.now()

    def refusal(self, path: str) -> ApiError | None:
        """The error for a request that is refused now; None if it is admitted."""
        probes = path in _ALWAYS_OPEN
        if self.closed_at_s is not None and not probes:
            return ApiError(503, "the server is stopping: retry later or on another server", type=SERVER, code="unavailable")
        if self.num_inside >= MOST_INSIDE + (RESERVED if probes else 0):
            why = f"{self.num_inside} requests are open, the most this server takes: retry later or on another server"
            return ApiError(503, why, type=SERVER, code="overloaded")
        return None


class AdmissionMiddleware:
    """The outermost ASGI middleware."""

    def __init__(self, app: ASGIApp, admission: Admission, on_error: Callable[[int], None]) -> None:
        """`on_error` is called with the status of each error response."""
        self._app = app
        self._admission = admission
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_ARRIVED] = self._admission.now()
        scope[_REQUEST_ID] = _id_of(scope)
        sending = self._noted(scope, send)
        refusal = self._admission.refusal(scope["path"])
        if refusal is not None:  # an unread body would block the connection
            await ErrorResponse.of(refusal, close=True)(scope, receive, sending)
            return
        self._admission.num_inside += 1
        try:
            await self._app(scope, receive, sending)
        finally:
            self._admission.num_inside -= 1
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
        if scope["path"] not in _ALWAYS_OPEN:  # probes are frequent, and an error is their normal answer
            self._log(scope, status)

    def _log(self, scope: Scope, status: int) -> None:
        """Leaves out the message, which may quote the request."""
        fields = {**origin_of(scope), "method": scope["method"], "status": status}
        principal = scope.get(_PRINCIPAL)
        if principal is not None and principal.name is not None:
            fields["tenant"] = principal.name
        log.info("error sent", extra={"fields": {**fields, "total_s": round(self._admission.now() - scope[_ARRIVED], 4)}})


def arrived_s(request: Request) -> float:
    """When a request arrived, by the engine's clock."""
    return float(request.scope[_ARRIVED])


def origin_of(scope: Scope) -> dict[str, str]:
    """Request id, path and client address, for the log."""
    client = scope.get("client")
    origin = {"request_id": str(scope[_REQUEST_ID]), "path": scope["path"][:_LONGEST_PATH]}
    return origin if client is None else {**origin, "client": str(client[0])}


def _id_of(scope: Scope) -> str:
    """The client's request id, or a new one."""
    given = next((value for name, value in scope["headers"] if name == _ID_HEADER), b"")
    return given.decode() if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def client_of(request: Request) -> str:
    """The name under which a client is rate-limited: its tenant, or its address."""
    name = principal_of(request).name
    return name or str((request.scope.get("client") or ("",))[0])


def note_error(scope: Scope, status: int) -> None:
    """Notes that a stream ended with an error after its status was sent."""
    scope[_FAILED] = status


class HostCheck:
    """Refuses requests whose Host header names another server. Without names, every host is accepted.

    This stops DNS rebinding: a web page can point its own name at 127.0.0.1 and read what is served there, but the Host header
    still has the page's name. Only servers on loopback addresses check it; others have names they do not know.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names and _name(Headers(scope=scope).get("host", "")) not in self._names:
            error = ApiError(421, "this server is not known by that name; start it with --allow-host NAME", code="unknown_host")
            await ErrorResponse.of(error, close=True)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _name(host: str) -> str:
    """The host without its port: `[::1]:8000` gives `::1`."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


class BodyLimit:
    """ASGI middleware that refuses bodies that are too large, declared or not, before they fill memory, and bodies that do not
    arrive in time.
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
        """Sends a response before the whole body was read. A client that is still sending may miss it, so the rest of the body is
        read and dropped if it arrives soon; otherwise the connection is closed.
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
    """One request body as it arrives."""

    def __init__(self, receive: Receive, idle_s: float, most_s: float, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._receive = receive
        self._idle_s = idle_s
        self._most_s = most_s
        self._since_s: float | None = None  # of the first read

    async def receive(self) -> Message:
        """The next message. Raises ApiError if no part of the body arrives in time."""
        return await (self._receive() if self.is_whole else self._in_time(self._idle_s))

    async def drop(self, most_bytes: int, silent_s: float) -> None:
        """Reads to the end, for `most_bytes` at most, or until `silent_s` of silence."""
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
            why = f"the body did not arrive in time: silent for {silent_s:g} s, or incomplete after {self._most_s:g} s"
            raise ApiError(408, why, code=_TOO_SLOW) from None
        self.is_whole = not message.get("more_body", False)
        return message


def _has_body(scope: Scope) -> bool:
    return _declared(scope) > 0 or any(name == b"transfer-encoding" for name, _ in scope["headers"])


def _declared(scope: Scope) -> int:
    sizes = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(sizes[0]) if sizes and sizes[0].isdigit() else 0


# ---- who may call a route -----------------------------------------------------------------------


def require_key(principals: Principals) -> Dependency:
    """For routes that change nothing: open, or requiring a key or the admin token."""

    async def check(request: Request) -> None:
        _resolve(principals, request)

    dependency: Dependency = Depends(check)
    return dependency


def require_overview(principals: Principals) -> Dependency:
    """For routes that show all principals together: like `require_key`, but refused to tenants."""

    async def check(request: Request) -> None:
        if _resolve(principals, request).name is not None:
            raise _admin_required("this shows all tenants together")

    dependency: Dependency = Depends(check)
    return dependency


def require_admin(principals: Principals) -> Dependency:
    """For routes that change something: requires the admin token."""

    async def check(request: Request) -> None:
        principal = principals.of_key(_bearer(request))
        if principal is None or not principal.operates:
            raise _admin_required("this changes the cache")
        request.scope[_PRINCIPAL] = principal

    dependency: Dependency = Depends(check)
    return dependency


def require_owner(principals: Principals) -> Dependency:
    """For routes that show the caller's own state: for tenants, and for the operator, who sees everything."""

    async def check(request: Request) -> None:
        principal = principals.of_key(_bearer(request))
        if principal is None or (principal.name is None and not principal.operates):
            raise _admin_required("this shows the pins of all clients")
        request.scope[_PRINCIPAL] = principal

    dependency: Dependency = Depends(check)
    return dependency


def principal_of(request: Request) -> Principal:
    """The principal of a request, on a route with one of the dependencies above."""
    principal = request.scope[_PRINCIPAL]
    assert isinstance(principal, Principal), f"{request.url.path} has no access check"
    return principal


def _resolve(principals: Principals, request: Request) -> Principal:
    sent = _bearer(request)
    principal = principals.of_key(sent)
    if principal is None:
        what = "the API key is not valid here" if sent else "this server requires an API key as a bearer token"
        raise ApiError(401, what, type=AUTHENTICATION, code="invalid_api_key")
    request.scope[_PRINCIPAL] = principal
    return principal


def _admin_required(why: str) -> ApiError:
    message = f"{why}: send the admin token, printed at start-up, as a bearer token"
    return ApiError(401, message, type=AUTHENTICATION, code="invalid_admin_token")


def _bearer(request: Request) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Headers are decoded as Latin-1, in which other bytes look like blanks: strip only HTTP's own.
    return token.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b""
