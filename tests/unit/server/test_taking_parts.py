"""Parts of a prompt sent to a decode server: invalid ones are refused, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI

from stepwell.base.errors import BadTokens
from stepwell.server.errors import install_errors
from stepwell.server.peer_routes import MAX_NAME, MOST_FETCHES, ahead_router
from stepwell.server.served import Served

TOKEN = "a-token-of-some-length"
OFFER = {"remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": "x" * 32}
GOOD = {**OFFER, "tokens": [1, 2, 3], "salt": "s", "tenant": None, "priority": 2, "ttl_s": 60.0}


class Ticket:
    ready = True
    closed = False

    def close(self) -> None:
        self.closed = True


class Decode:
    """A decode server without an engine: a cache that remembers what it was asked to bring up, and offers that all are there."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.tickets: list[Ticket] = []
        self.taken: list[str] = []
        self.ended: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        served = SimpleNamespace(
            loop=self, max_context=100, must_fit=lambda *args, **more: Served.must_fit(served, *args, **more)
        )
        served._too_long = lambda *args: Served._too_long(served, *args)  # type: ignore[arg-type]
        self.app = FastAPI()
        install_errors(self.app)
        self.app.include_router(ahead_router(self, served))  # type: ignore[arg-type]
        self.cache = self

    # of peers

    def is_peer(self, token: bytes) -> bool:
        return token == TOKEN.encode()

    async def take(self, params: dict[str, Any]) -> str:
        self.taken.append(params["remote_request_id"])
        await self.may_go_on.wait()
        return str(params["remote_request_id"])

    def done(self, number: str) -> None:
        self.ended.append(number)

    # of the engine's loop, and its cache

    def call(self, work: Callable[[Any], Any]) -> Future[Any]:
        made: Future[Any] = Future()
        try:
            made.set_result(work(self))
        except BadTokens as error:
            made.set_exception(error)
        return made

    def namespace_for(self, **names: str | None) -> dict[str, str | None]:
        return names

    def lookup(self, tokens: list[int], *, namespace: dict[str, str | None]) -> Any:
        if max(tokens) > 50:
            raise BadTokens("no such token")
        return SimpleNamespace(restore_tokens=len(tokens) - 1, namespace=namespace)

    def prefetch(self, match: Any, **more: Any) -> Ticket:
        self.asked.append({**match.namespace, **more})
        self.tickets.append(Ticket())
        return self.tickets[-1]


def asked(work: Callable[[Decode, httpx.AsyncClient], Awaitable[None]]) -> Decode:
    async def run() -> Decode:
        decode = Decode()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        transport = httpx.ASGITransport(app=decode.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://decode", headers=headers) as client:
            await work(decode, client)
        return decode

    return asyncio.run(run())


def test_a_part_is_kept_as_its_request_would_be() -> None:
    async def work(decode: Decode, client: httpx.AsyncClient) -> None:
        assert (await client.post("/handover/ahead", json=GOOD)).json() == {"tokens": 2}

    decode = asked(work)
    assert decode.asked == [{"salt": "s", "tenant": None, "priority": 2, "ttl_s": 60.0, "awaited": False}]
    assert decode.ended == decode.taken == ["x" * 32] and all(each.closed for each in decode.tickets)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": []}, {"tokens": "abc"}, {"tokens": [1.5]}, {"tokens": [True]}, {"tokens": [1] * 100}, {"tokens": None},
        {"salt": 3}, {"salt": "\ud800"}, {"salt": "x" * (MAX_NAME + 1)}, {"tenant": "\ud800"}, {"tenant": ["a"]},
        {"priority": -1}, {"priority": 10**6}, {"ttl_s": 0.0}, {"ttl_s": -1.0}, {"ttl_s": "soon"},
    ],
    ids=lambda wrong: f"{wrong!r:.30}",
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anybody_is_asked(wrong: dict[str, Any]) -> None:
    async def work(decode: Decode, client: httpx.AsyncClient) -> None:
        whole = json.dumps({**GOOD, **wrong}).encode()
        for raw in (
            whole,
            b"[",
            b"\xff",
            b"[" * 100_000,
            b'{"tokens": [1], "salt": null, "tenant": null, "priority": 0, "ttl_s": Infinity}',
        ):
            reported = await client.post("/handover/ahead", content=raw, headers={"Content-Type": "application/json"})
            assert reported.status_code == 400
        other = {"Authorization": "Bearer another"}
        assert (await client.post("/handover/ahead", json=GOOD, headers=other)).status_code == 401

    assert not asked(work).taken


def test_an_offer_is_given_back_where_its_tokens_are_none() -> None:
    async def work(decode: Decode, client: httpx.AsyncClient) -> None:
        assert (await client.post("/handover/ahead", json={**GOOD, "tokens": [1, 51]})).status_code == 400

    assert asked(work).ended == ["x" * 32]


@pytest.mark.parametrize("names", ["alike", "apart"])
def test_only_a_few_parts_are_fetched_at_a_time_whatever_they_are_called(names: str) -> None:
    async def work(decode: Decode, client: httpx.AsyncClient) -> None:
        decode.may_go_on.clear()
        bodies = [{**GOOD, "remote_request_id": "x" * (32 if names == "alike" else 32 + at)} for at in range(MOST_FETCHES)]
        first = [asyncio.ensure_future(client.post("/handover/ahead", json=body)) for body in bodies]
        while len(decode.taken) < MOST_FETCHES:
            await asyncio.sleep(0.001)
        assert (await client.post("/handover/ahead", json=GOOD)).status_code == 503
        decode.may_go_on.set()
        assert [each.status_code for each in await asyncio.gather(*first)] == [200] * MOST_FETCHES
        assert (await client.post("/handover/ahead", json=GOOD)).status_code == 200

    decode = asked(work)
    assert len(decode.taken) == MOST_FETCHES + 1 and sorted(decode.ended) == sorted(decode.taken)
