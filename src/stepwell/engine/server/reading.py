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

from stepwell.engine.server.errors import ApiError, of_problems
from stepwell.engine.server.served import LARGE_BYTES, Served

MAX_NESTED = 100_000  # lists and objects in one body
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
