"""Everything that can go wrong, in the form OpenAI's clients expect: a status, and `{"error": {message, type, param, code}}`.

Says what to do about a user's mistake. Says nothing about our own but that it was one; the log has the rest.
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
CLIENT_CLOSED = 499  # the client left before its answer: nobody reads it
_SHOWN = 4  # of the ways in which one field is wrong
_LONGEST_PATH = 200
_LONGEST = 2000  # characters of a message: what was wrong may be quoted in it
_RETRY_S = 5  # after which a client may try again what was refused because the server is full or stops


class ApiError(Exception):
    """A request that gets an error for an answer."""

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
        """`close`: the connection ends with it."""
        headers = error.headers() | ({"Connection": "close"} if close else {})
        return ErrorResponse(error.body(), status_code=error.status, headers=headers)

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()  # in ASCII: what is quoted may not be text that can be encoded


def api_error(error: StepwellError) -> ApiError:
    """Whose fault an error of the engine's is: the request's (400), the store's (502), or that we are stopping or full (503)."""
    if isinstance(error, ConfigError | BadTokens | LeaseError):
        return ApiError(400, str(error))
    if isinstance(error, StoreError):
        return ApiError(502, str(error), type=SERVER, code="store_error")
    return ApiError(503, str(error), type=SERVER, code="no_room" if isinstance(error, NoRoom) else "unavailable")


def install_errors(app: FastAPI) -> None:
    """Answers every exception of a route."""

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
        return Response(status_code=CLIENT_CLOSED)  # in the middle of its body

    @app.exception_handler(Exception)
    async def bugs(request: Request, error: Exception) -> ErrorResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        made = ApiError(500, "the server made a mistake; its log says more", type=SERVER, code="internal_error")
        return ErrorResponse.of(made, close=True)  # as it will be


def _of_route(request: Request, error: HTTPException) -> ApiError:
    asked = f"{request.method} {request.url.path[:_LONGEST_PATH]}"
    if error.status_code == 404:
        return ApiError(404, f"there is no route {asked} here; those of OpenAI's API begin with /v1", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"{asked} is not allowed: this route takes another method", code="method_not_allowed")
    return ApiError(error.status_code, str(error.detail))


def of_problems(problems: Sequence[Any]) -> ApiError:
    """What pydantic found wrong, as the first field that is, with all that is wrong with it."""
    param = _param(problems[0]["loc"])
    messages = list(dict.fromkeys(each["msg"] for each in problems if _param(each["loc"]) == param))
    if param is None:
        return ApiError(400, f"the body must be a JSON object sent as application/json: {'; '.join(messages[:_SHOWN])}")
    return ApiError(400, f"{param}: {'; or: '.join(messages[:_SHOWN])}", param=param)


def _param(place: tuple[Any, ...]) -> str | None:
    return str(place[0]) if place else None
