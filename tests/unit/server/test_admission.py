"""Bearer tokens, as the bytes that clients sent; bodies that do not come."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI, Request
from starlette.types import Message, Scope

from stepwell.server.access.admission import BodyLimit, _bearer
from stepwell.server.errors import install_errors
from waiting import PATIENCE_S


@pytest.mark.parametrize("key", ["a plain key", "ein Schlüssel", "voilà", "Å"])  # the last two end in what Latin-1 calls blank
def test_a_key_is_taken_as_its_bytes(key: str) -> None:
    for given in (b"Bearer " + key.encode(), b"bearer \t " + key.encode() + b" \t"):
        assert _bearer(Request({"type": "http", "headers": [(b"authorization", given)]})) == key.encode()


def _app(idle_s: float, most_s: float = PATIENCE_S) -> FastAPI:
    app = FastAPI()
    app.add_middleware(BodyLimit, max_bytes=100, idle_s=idle_s, most_s=most_s)
    install_errors(app)

    @app.post("/")
    async def echo(request: Request) -> dict[str, int]:
        return {"size": len(await request.body())}

    @app.post("/early")
    async def early() -> dict[str, str]:
        return {"the body": "was not asked for"}

    @app.post("/long")
    async def long(request: Request) -> dict[str, int]:
        size = len(await request.body())
        with suppress(asyncio.TimeoutError):  # as an answer that takes longer than a body may
            await asyncio.wait_for(request.receive(), 4 * idle_s)
        return {"size": size}

    return app


def _post(app: FastAPI, *pieces: bytes, path: str = "/", every_s: float = 0.0, ends: bool = False) -> list[Message]:
    """What is sent to a client that sends these pieces and then, unless it `ends`, nothing more."""
    sent: list[Message] = []
    left = [*pieces]

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        await asyncio.sleep(every_s)
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left) or not ends}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"transfer-encoding", b"chunked")]
    scope: Scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), PATIENCE_S))
    return sent


def _closes(start: Message) -> bool:
    return (b"connection", b"close") in start["headers"]


def test_a_body_that_does_not_come_is_given_up() -> None:
    start, body = _post(_app(0.05), b"some of it")
    assert start["status"] == 408 and _closes(start)
    assert json.loads(body["body"])["error"]["code"] == "body_timeout"


def test_a_body_that_comes_for_ever_is_given_up() -> None:
    start, _ = _post(_app(PATIENCE_S, most_s=0.2), *[b"."] * 90, every_s=0.01)
    assert start["status"] == 408 and _closes(start)


def test_a_body_that_is_too_large_and_does_not_come_is_answered_too() -> None:
    start, _ = _post(_app(0.05), b"some of it" * 11)
    assert start["status"] == 413 and _closes(start)


def test_an_answer_that_asks_for_no_body_leaves_none_on_the_connection() -> None:
    start, _ = _post(_app(0.05), b"some of it", path="/early")
    assert start["status"] == 200 and _closes(start), "the rest of the body would hold the connection"
    start, _ = _post(_app(PATIENCE_S), b"some of it", b"and the rest", path="/early", ends=True)
    assert start["status"] == 200 and not _closes(start)
    start, _ = _post(_app(PATIENCE_S), b"all of it", ends=True)
    assert start["status"] == 200 and not _closes(start)


def test_only_silence_before_the_end_of_a_body_counts() -> None:
    start, body = _post(_app(0.05), b"12345", b"67890", path="/long", ends=True)
    assert start["status"] == 200 and json.loads(body["body"]) == {"size": 10}
