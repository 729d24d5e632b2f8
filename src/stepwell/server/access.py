"""Who may do what: a key for asking, where one is set, and a token for changing anything. Compared in constant time."""

from __future__ import annotations

import hmac

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency

from stepwell.server.errors import AUTHENTICATION, ApiError
from stepwell.server.served import Secrets


def asking(secrets: Secrets) -> Dependency:
    """For routes that change nothing: open, or for holders of the key or the token."""

    async def check(request: Request) -> None:
        if secrets.api_key is None:
            return
        given = _bearer(request)
        by_key, by_token = _same(given, secrets.api_key), _same(given, secrets.admin_token)
        if not (by_key or by_token):
            raise ApiError(401, "this server wants its API key as a bearer token", type=AUTHENTICATION, code="invalid_api_key")

    dependency: Dependency = Depends(check)
    return dependency


def changing(secrets: Secrets) -> Dependency:
    """For routes that change something: for holders of the admin token alone."""

    async def check(request: Request) -> None:
        if not _same(_bearer(request), secrets.admin_token):
            message = "this changes the cache: give the admin token, printed at the start, as a bearer token"
            raise ApiError(401, message, type=AUTHENTICATION, code="invalid_admin_token")

    dependency: Dependency = Depends(check)
    return dependency


def _bearer(request: Request) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # headers are read as Latin-1


def _same(given: bytes, wanted: str) -> bool:
    return hmac.compare_digest(given, wanted.encode())
