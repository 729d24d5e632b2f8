"""From the bytes of a request to a checked body, without holding anybody up.

Small bodies are read at once. Large ones are read on a thread, in Python: the parser in C would hold the interpreter, and with it
every stream, for seconds (13 s for 32 MB of short lists). What no request could use is refused while it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.base.units import format_bytes
from stepwell.server.errors import ApiError, ErrorResponse, of_problems
from stepwell.server.served import LARGE_BYTES, Served

MAX_NESTED = 100_000  # lists and objects in one body
_READ_TIMES = 4  # a client that is still sending may miss the answer: so much more than the limit is read, and dropped
B = TypeVar("B", bound=BaseModel)


async def read_body(served: Served, request: Request, kind: type[B]) -> tuple[B, int]:
    """The body, and how many bytes it had. Raises ApiError."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(400, "the body must be a JSON object sent as application/json")
    raw = await request.body()
    if len(raw) <= LARGE_BYTES:
        return _checked(kind, raw, json.loads), len(raw)
    bounded = _Bounded(most_values=served.max_values, most_nested=MAX_NESTED)
    return await served.aside(len(raw), lambda: _checked(kind, raw, bounded.decode)), len(raw)


def _checked(kind: type[B], raw: bytes, parse: Callable[[str], Any]) -> B:
    try:
        values = parse(raw.decode())
    except RecursionError:
        raise ApiError(400, "the body is not JSON: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise of_problems(error.errors(include_url=False, include_input=False)) from None


class _Bounded(json.JSONDecoder):
    """The standard library's parser as it is in Python, which lets other threads go on; strings are still read in C.

    Raises ApiError for more numbers and strings, or lists and objects, than it was told of.
    """

    def __init__(self, *, most_values: int, most_nested: int) -> None:
        super().__init__()
        values, nested = _Count(most_values, "numbers and strings"), _Count(most_nested, "lists and objects")
        self.parse_int = values.before(int)
        self.parse_float = values.before(float)
        self.parse_string = values.before(decoder.scanstring)  # type: ignore[attr-defined]
        self.parse_array = nested.before(decoder.JSONArray)  # type: ignore[attr-defined]
        self.parse_object = nested.before(decoder.JSONObject)  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


class _Count:
    def __init__(self, most: int, what: str) -> None:
        self._left = self._most = most
        self._what = what

    def before(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise ApiError(
                    400, f"the body holds more than {self._most} {self._what}, which no prompt here has", code="body_too_large"
                )
            return parse(*args)

        return counted


class BodyLimit:
    """Refuses bodies that are too large, whether they say so or not, before anybody keeps them in memory. An ASGI application."""

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
