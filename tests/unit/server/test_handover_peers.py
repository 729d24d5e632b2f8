"""Requests of a decode server to prefill servers: to each separately, and only to those it was given."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, NoReturn

import pytest

pytest.importorskip("fastapi")

from stepwell.server.handover import Peers
from stepwell.store.api import Space
from stepwell.store.peer.lane import SharedHost
from stepwell.store.peer.listing import Listing, Value
from stepwell.store.peer.store import PeerStore
from waiting import PATIENCE_S

TOKEN = "a-token-of-some-length"
NUMBER = "n" * 32
LISTING = Listing(space=bytes(32), session="127.0.0.1:1", values=[Value(b"k" * 32, bytes(64), 4096, 100)])
ELSEWHERE = replace(LISTING, session="192.0.2.1:1")  # memory of an unknown machine


class PrefillServer:
    """Gives prepared answers, and records the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        self.ended = Event()
        self.answer: tuple[int, bytes] = (200, LISTING.pack())
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mine.asked.append((self.command, self.path, self.headers["Authorization"]))
                status, body = mine.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if self.command == "DELETE":
                    mine.ended.set()

            do_DELETE = do_GET

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = ("127.0.0.1", int(self.server.server_address[1]))
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def prefill() -> Iterator[PrefillServer]:
    made = PrefillServer()
    yield made
    made.close()


def no_lane() -> NoReturn:
    raise AssertionError("nothing is read here")


def store() -> PeerStore:
    return PeerStore(SharedHost(), no_lane)


def named(address: tuple[str, int], number: str = NUMBER) -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_host": address[0], "remote_port": address[1], "remote_request_id": number}


def has_offer(peers: Peers) -> bool:
    return peers.store.contains(Space(digest=bytes(32)), [b"k" * 32]) == [True]


def test_an_offer_is_taken_and_ended(prefill: PrefillServer) -> None:
    peers = Peers(store(), [prefill.address], TOKEN)

    async def life() -> None:
        number = await peers.take(named(prefill.address))
        assert number == NUMBER and has_offer(peers)
        assert await peers.take(named(prefill.address)) is None, "the same again: the first one has it"
        peers.done(number)
        peers.done(number)
        assert not has_offer(peers)

    asyncio.run(life())
    assert prefill.ended.wait(PATIENCE_S)
    assert prefill.asked == [(verb, f"/handover/{NUMBER}", f"Bearer {TOKEN}") for verb in ("GET", "DELETE")]
    peers.close()


def test_a_server_that_does_not_answer_holds_up_no_other(prefill: PrefillServer) -> None:
    with socket.socket() as stopped:  # takes connections, as the kernel does for a process that is stopped
        stopped.bind(("127.0.0.1", 0))
        stopped.listen(64)
        silent = ("127.0.0.1", int(stopped.getsockname()[1]))
        peers = Peers(store(), [silent, prefill.address], TOKEN, ask_s=2.0)

        async def both() -> None:
            waiting = [asyncio.ensure_future(peers.take(named(silent, f"{at:032d}"))) for at in range(12)]
            await asyncio.sleep(0)
            assert await peers.take(named(prefill.address)) == NUMBER
            assert not any(each.done() for each in waiting), "the others are still waited for"
            assert await asyncio.gather(*waiting) == [None] * 12

        asyncio.run(both())
        peers.close()


@pytest.mark.parametrize(
    "answer",
    [
        (404, b""),
        (500, LISTING.pack()),
        (200, b""),
        (200, LISTING.pack()[:-1]),
        (200, b"{}"),
        (302, LISTING.pack()),
        (200, ELSEWHERE.pack()),
    ],
)
def test_what_is_no_listing_is_not_taken(prefill: PrefillServer, answer: tuple[int, bytes]) -> None:
    prefill.answer = answer
    peers = Peers(store(), [prefill.address], TOKEN)
    assert asyncio.run(peers.take(named(prefill.address))) is None
    assert not has_offer(peers) and not peers.store.num_offers
    peers.close()


def test_a_server_that_was_not_named_at_the_start_is_not_asked(prefill: PrefillServer) -> None:
    peers = Peers(store(), [("127.0.0.1", 1)], TOKEN)
    assert asyncio.run(peers.take(named(prefill.address))) is None
    assert not prefill.asked
    peers.close()


def test_other_requests_are_left_alone(prefill: PrefillServer) -> None:
    peers = Peers(store(), [prefill.address], TOKEN)
    for params in (
        None,
        {},
        {"do_remote_prefill": False},
        {"do_remote_decode": True},
        {**named(prefill.address), "do_remote_prefill": 1},
    ):
        assert asyncio.run(peers.take(params)) is None
    assert not prefill.asked
    peers.close()
