"""Errors in the form OpenAI's clients expect: a status and `{"error": {message, type, param, code}}`.

A message about a client's mistake says what to do. A message about a fault of the server says only that there was one; the log
has the details.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stepwell.base.errors import BadTokens, ConfigError, LeaseError, NoRoom, StepwellError, StoreError

log = logging.getLogger(__name__)

INVALID, AUTHENTICATION, SERVER = "invalid_request_error", "authentication_error", "server_error"
CLIENT_CLOSED = 499  # the client disconnected before its response
_SHOWN = 4  # messages about one field
_LONGEST_PATH = 200
_LONGEST = 2000  # characters of a message, which may quote the request
_RETRY_S = 5  # when a client may retry after the server was full or stopping


class ApiError(Exception):
    """Ends a request with an error response."""

    def __init__(
        self, status: int, message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code = status, type, param, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self)[:_LONGEST], "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(_RETRY_S)} if self.status == 503 else {}


class ErrorResponse(JSONResponse):
    @staticmethod
    def of(error: ApiError, *, close: bool = False) -> ErrorResponse:
        """With `close`, the connection is closed after the response."""
        headers = error.headers() | ({"Connection": "close"} if close else {})
        return ErrorResponse(error.body(), status_code=error.status, headers=headers)

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()  # ASCII: quoted input may contain lone surrogates


def api_error(error: StepwellError) -> ApiError:
    """The response to an engine's error: 400 for the request's fault, 502 for the store's, 503 if the server stops or is full."""
    if isinstance(error, ConfigError | BadTokens | LeaseError):
        return ApiError(400, str(error))
    if isinstance(error, StoreError):
        return ApiError(502, str(error), type=SERVER, code="store_error")
    return ApiError(503, str(error), type=SERVER, code="no_room" if isinstance(error, NoRoom) else "unavailable")


def install_errors(app: FastAPI) -> None:
    """Turns every exception of a route into an error response."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> ErrorResponse:
        return ErrorResponse.of(error)

    @app.exception_handler(StepwellError)
    async def engines(request: Request, error: StepwellError) -> ErrorResponse:
        return ErrorResponse.of(api_error(error))

    @app.exception_handler(RequestValidationError)
    async def parameters(request: Request, error: RequestValidationError) -> ErrorResponse:
        return ErrorResponse.of(of_problems([{**each, "loc": each["loc"][1:]} for each in error.errors()]))

    @app.exception_handler(HTTPException)
    async def routes(request: Request, error: HTTPException) -> ErrorResponse:
        made = _of_route(request, error)
        return ErrorResponse(made.body(), status_code=made.status, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)  # while it was sending the body

    @app.exception_handler(Exception)
    async def bugs(request: Request, error: Exception) -> ErrorResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        made = ApiError(500, "internal error; see the server's log", type=SERVER, code="internal_error")
        return ErrorResponse.of(made, close=True)  # Starlette closes it anyway


def _of_route(request: Request, error: HTTPException) -> ApiError:
    asked = f"{request.method} {request.url.path[:_LONGEST_PATH]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no route {asked} here; those of OpenAI's API begin with /v1", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"{asked} is not allowed: this route takes another method", code="method_not_allowed")
    return ApiError(error.status_code, str(error.detail))


def of_problems(problems: Sequence[Any]) -> ApiError:
    """The first field that pydantic rejected, with all messages about it."""
    param = _param(problems[0]["loc"])
    messages = list(dict.fromkeys(each["msg"] for each in problems if _param(each["loc"]) == param))
    if param is None:
        return ApiError(400, f"the body must be a JSON object sent as application/json: {'; '.join(messages[:_SHOWN])}")
    return ApiError(400, f"{param}: {'; or: '.join(messages[:_SHOWN])}", param=param)


def _param(place: tuple[Any, ...]) -> str | None:
    return str(place[0]) if place else None
