"""Who may call a route. Finds whose a request is, once, and leaves it with the request for the route to ask."""

from __future__ import annotations

from fastapi import Depends, Request
from fastapi.params import Depends as Dependency

from stepwell.server.errors import AUTHENTICATION, ApiError
from stepwell.server.principals import Principal, Principals

_PRINCIPAL = "stepwell.principal"


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
    principal = principals.of_key(_bearer(request))
    if principal is None:
        raise ApiError(401, "this server wants its API key as a bearer token", type=AUTHENTICATION, code="invalid_api_key")
    request.scope[_PRINCIPAL] = principal
    return principal


def _wants_admin(why: str) -> ApiError:
    message = f"{why}: give the admin token, printed at the start, as a bearer token"
    return ApiError(401, message, type=AUTHENTICATION, code="invalid_admin_token")


def _bearer(request: Request) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Headers are read as Latin-1, where bytes of other letters look like blanks: only what HTTP calls one is taken off.
    return token.strip(" \t").encode("latin-1") if scheme.lower() == "bearer" else b""
