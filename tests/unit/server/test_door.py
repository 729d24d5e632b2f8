"""Bearer tokens, as the bytes that clients sent; bodies that do not come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("fastapi")

import httpx
from fastapi import FastAPI, Request
from starlette.types import Message, Scope

from stepwell.server.access.door import BodyLimit, _bearer
from stepwell.server.errors import install_errors
from waiting import PATIENCE_S


@pytest.mark.parametrize("key", ["a plain key", "ein Schlüssel", "voilà", "Å"])  # the last two end in what Latin-1 calls blank
def test_a_key_is_taken_as_its_bytes(key: str) -> None:
    for given in (b"Bearer " + key.encode(), b"bearer \t " + key.encode() + b" \t"):
        assert _bearer(Request({"type": "http", "headers": [(b"authorization", given)]})) == key.encode()


def _echo(idle_s: float) -> FastAPI:
    app = FastAPI()
    app.add_middleware(BodyLimit, max_bytes=100, idle_s=idle_s)
    install_errors(app)

    @app.post("/")
    async def echo(request: Request) -> dict[str, int]:
        return {"size": len(await request.body())}

    return app


def _post(app: FastAPI, pieces: list[bytes], *, ends: bool, headers: tuple[tuple[bytes, bytes], ...] = ()) -> list[Message]:
    """What is sent to a client that sends these pieces and then, unless it `ends`, nothing more."""
    sent: list[Message] = []

    async def receive() -> Message:
        if pieces:
            body = pieces.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(pieces) or not ends}
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": list(headers)}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), PATIENCE_S))
    return sent


def test_a_body_that_does_not_come_is_given_up() -> None:
    start, body = _post(_echo(0.05), [b"some of it"], ends=False)
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "body_timeout"


def test_a_body_that_is_too_large_and_does_not_come_is_answered_too() -> None:
    start, _ = _post(_echo(0.05), [b"some of it"], ends=False, headers=((b"content-length", b"1000"),))
    assert start["status"] == 413


def test_only_silence_counts_and_only_before_the_end_of_the_body() -> None:
    async def slow() -> AsyncIterator[bytes]:
        for _ in range(4):
            await asyncio.sleep(0.15)
            yield b"12345"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=_echo(0.5))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.post("/", content=slow())

    assert _post(_echo(0.05), [b"whole"], ends=True)[0]["status"] == 200
    assert asyncio.run(ask()).json() == {"size": 20}
