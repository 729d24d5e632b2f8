"""To which server a prefill server sends parts of a prompt, from where on, and when it stops. The other server is a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from stepwell.engine.requests.request import GenerateRequest
from stepwell.server import ahead
from stepwell.server.ahead import MOST_FOLLOWED, MOST_PARTS, PartSender

TOKEN = "a-token-of-some-length"
ASK = GenerateRequest(tokens=list(range(100)), salt="mine", tenant="acme", priority=3, ttl_s=60.0)
ALL = object()  # it has every part


class DecodeServer:
    """Gives prepared answers in order, and records what it received."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.answers: list[tuple[int, object]] = []
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                mine.received.append(body)
                mine.tokens.append(self.headers["Authorization"])
                status, said = mine.answers.pop(0)
                out = json.dumps({"tokens": len(body["tokens"]) - 1} if said is ALL else said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = ("127.0.0.1", int(self.server.server_address[1]))
        Thread(target=self.server.serve_forever, daemon=True).start()


class OfferedParts:
    """Offers that keep what was offered from where on, and what has ended."""

    def __init__(self) -> None:
        self.offered: list[tuple[int, int]] = []
        self.ended: list[str] = []

    async def offer_part(self, loop: object, out: Any, *, since_tokens: int) -> dict[str, Any]:
        self.offered.append((since_tokens, out.tokens))
        return {"remote_request_id": f"number-{out.tokens}", "remote_host": "127.0.0.1", "remote_port": 1}

    async def end(self, loop: object, number: str) -> bool:
        self.ended.append(number)
        return True


class Loop:
    """Calls at once, and has no engine."""

    def call(self, work: Callable[[Any], Any]) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(work(None))
        return made


@pytest.fixture
def decode() -> Iterator[DecodeServer]:
    made = DecodeServer()
    yield made
    made.server.shutdown()
    made.server.server_close()


def follow(monkeypatch: pytest.MonkeyPatch, decode: DecodeServer, parts: list[int]) -> tuple[OfferedParts, PartSender]:
    """Follows a prompt that comes so far, one part after the other, and then is computed."""
    offers, left = OfferedParts(), list(parts)
    made = PartSender(offers, [decode.address], TOKEN, look_s=0.0)  # type: ignore[arg-type]

    async def run() -> None:
        ended = asyncio.Event()

        def part(engine: object) -> object:
            if not left:
                ended.set()
                return None
            return SimpleNamespace(tokens=left.pop(0))

        monkeypatch.setattr(ahead, "PromptParts", lambda ask, part_tokens: SimpleNamespace(part=part))
        await made.follow(Loop(), ASK, decode.address, ended)  # type: ignore[arg-type]

    asyncio.run(run())
    made.close()
    return offers, made


def test_every_part_begins_where_the_one_before_ended(monkeypatch: pytest.MonkeyPatch, decode: DecodeServer) -> None:
    decode.answers = [(200, ALL), (200, ALL)]
    offers, _ = follow(monkeypatch, decode, [20, 50])
    assert offers.offered == [(0, 20), (20, 50)] and offers.ended == ["number-20", "number-50"]
    assert [each["tokens"] for each in decode.received] == [ASK.tokens[:21], ASK.tokens[:51]], "one more than can be resumed with"
    kept = [tuple(each[name] for name in ("salt", "tenant", "priority", "ttl_s")) for each in decode.received]
    assert kept == [("mine", "acme", 3, 60.0)] * 2, "as long as their request may keep them, and no longer"
    assert decode.tokens == [f"Bearer {TOKEN}"] * 2


@pytest.mark.parametrize("answer", [(503, {}), (200, {"tokens": 8})])
def test_what_was_not_taken_is_in_the_next_part(
    monkeypatch: pytest.MonkeyPatch, decode: DecodeServer, answer: tuple[int, object]
) -> None:
    decode.answers = [(200, ALL), answer, (200, ALL)]
    offers, _ = follow(monkeypatch, decode, [20, 50, 70])
    assert offers.offered == [(0, 20), (20, 50), (20, 70)]


def test_a_server_without_room_is_not_told_again_and_again(monkeypatch: pytest.MonkeyPatch, decode: DecodeServer) -> None:
    decode.answers = [(503, {}), (200, {"tokens": 0})]
    offers, _ = follow(monkeypatch, decode, [20, 50, 70])
    assert offers.offered == [(0, 20), (0, 50)] and offers.ended == ["number-20", "number-50"]


@pytest.mark.parametrize("answer", [(401, {}), (500, {}), (200, []), (200, {"tokens": "20"})])
def test_a_server_that_fails_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch, decode: DecodeServer, answer: tuple[int, object]
) -> None:
    decode.answers = [answer]
    offers, made = follow(monkeypatch, decode, [20, 50])
    assert offers.offered == [(0, 20)] and offers.ended == ["number-20"], "the offer was released"
    asyncio.run(made.follow(Loop(), ASK, decode.address, asyncio.Event()))  # type: ignore[arg-type]
    assert len(offers.offered) == 1


def test_only_servers_that_were_named_at_the_start_are_told() -> None:
    async def begun(addresses: list[tuple[str, int]], **params: Any) -> bool:
        made = PartSender(OfferedParts(), addresses, TOKEN, part_tokens=10)  # type: ignore[arg-type]
        ended = made.begin(Loop(), ASK, params)  # type: ignore[arg-type]
        for task in list(made._following):
            task.cancel()
        made.close()
        return ended is not None

    one, two = [("a", 1)], [("a", 1), ("b", 2)]
    assert asyncio.run(begun(one)), "there is no other who could answer"
    assert not asyncio.run(begun(two))
    assert asyncio.run(begun(two, remote_host="b", remote_port=2))
    assert asyncio.run(begun(two, remote_host="b", remote_port="2"))
    for elsewhere in ({"remote_host": "c", "remote_port": 1}, {"remote_host": "a", "remote_port": 2}, {"remote_host": ["a"]}):
        assert not asyncio.run(begun(one, **elsewhere))


def test_short_prompts_and_more_than_a_few_at_a_time_are_not_followed() -> None:
    async def run() -> None:
        made = PartSender(OfferedParts(), [("a", 1)], TOKEN, part_tokens=100)  # type: ignore[arg-type]
        assert made.begin(Loop(), ASK, None) is None  # type: ignore[arg-type]
        made = PartSender(OfferedParts(), [("a", 1)], TOKEN, part_tokens=10)  # type: ignore[arg-type]
        begun = [made.begin(Loop(), ASK, None) for _ in range(MOST_FOLLOWED + 1)]  # type: ignore[arg-type]
        assert [each is not None for each in begun] == [True] * MOST_FOLLOWED + [False]
        for task in list(made._following):
            task.cancel()
        made.close()

    asyncio.run(run())


def test_parts_of_long_prompts_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of parts grows with the prompt."""
    sizes: list[int] = []
    ended = asyncio.Event()
    ended.set()
    monkeypatch.setattr(ahead, "PromptParts", lambda ask, part_tokens: sizes.append(part_tokens))
    made = PartSender(OfferedParts(), [("a", 1)], TOKEN, part_tokens=10)  # type: ignore[arg-type]
    for tokens in (100, 100 * MOST_PARTS):
        asyncio.run(made.follow(Loop(), GenerateRequest(tokens=[1] * tokens), ("a", 1), ended))  # type: ignore[arg-type]
    made.close()
    assert sizes == [10, 100]
