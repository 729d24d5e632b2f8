"""Refuses bodies that are too large, whether they say so or not, before anybody keeps them in memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.base.units import format_bytes
from stepwell.engine.server.errors import ApiError, ErrorResponse

_READ_TIMES = 4  # a client that is still sending may miss the answer: so much more than the limit is read, and dropped


class BodyLimit:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared(scope) > self._max_bytes:
            await self._drop(receive)
            error = ApiError(413, self._message(), code="body_too_large")
            await ErrorResponse(error.body(), status_code=413, headers={"Connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def take() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise HTTPException(413, self._message())
            return message

        return take

    async def _drop(self, receive: Receive) -> None:
        dropped = 0
        while dropped <= self._max_bytes * _READ_TIMES:
            message = await receive()
            dropped += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return

    def _message(self) -> str:
        return f"the body is larger than the {format_bytes(self._max_bytes)} this server takes"


def _declared(scope: Scope) -> int:
    sizes = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(sizes[0]) if sizes and sizes[0].isdigit() else 0
