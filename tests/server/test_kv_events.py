"""A real server publishes what it caches, and a client that knows only vLLM's format keeps a right picture of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count

import httpx
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kv_event_client import Batch, Cleared, Listener, Removed, Stored, ask_again
from server.serving import NAME, PAGE, Running, running
from stepwell.server.access.tenants import Principal, Tenant
from stepwell.server.kv_events.zmq_socket import EventAddresses, ZmqEvents
from waiting import PATIENCE_S, wait_until

ANY_PORT = "tcp://127.0.0.1:*"
PROMPT = "A well with steps leads down to the water, whatever its height may be this year. "


class Picture:
    """What a client knows: blocks by medium, and the tokens of each."""

    def __init__(self) -> None:
        self.media: dict[str | None, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str | None] = {}
        self.last = -1

    def hear(self, sequence: int, batch: Batch) -> None:
        assert sequence == self.last + 1, f"{sequence} after {self.last}"
        self.last = sequence
        for event in batch.events:
            if isinstance(event, Cleared):
                for each in self.media.values():
                    each.clear()
            elif isinstance(event, Removed):
                self.media[event.medium] -= set(event.block_hashes)
            else:
                self._hear_stored(event)

    def _hear_stored(self, event: Stored) -> None:
        before = [] if event.parent_block_hash is None else self.tokens[event.parent_block_hash]
        assert event.block_size == PAGE
        for at, block in enumerate(event.block_hashes, start=1):
            self.tokens[block] = before + event.token_ids[: at * PAGE]
            self.salts[block] = event.cache_salt
        self.media[event.medium] |= set(event.block_hashes)

    def hit_tokens(self, tokens: list[int], medium: str = "GPU", salt: str | None = None) -> int:
        """As a router that hashes tokens and salts by itself: the longest prefix among blocks."""
        found = [self.tokens[block] for block in self.media[medium] if self.salts[block] == salt]
        return max((len(each) for each in found if tokens[: len(each)] == each), default=0)


@pytest.fixture(scope="module")
def events() -> ZmqEvents:
    return ZmqEvents(EventAddresses(publish=ANY_PORT, replay=ANY_PORT))


@pytest.fixture(scope="module")
def served(events: ZmqEvents) -> Iterator[Running]:
    with running(serving={"events": events}) as made:
        yield made


@pytest.fixture
def picture(served: Running, events: ZmqEvents) -> Picture:
    """A picture of everything that was reported so far."""
    return caught_up(events, Picture())


def say(http: httpx.Client, prompt: str, **more: object) -> int:
    """Cached tokens of a prompt."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    return int(http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def say_something_new(http: httpx.Client, number: int) -> None:
    say(http, f"{number}. {PROMPT}")


def caught_up(events: ZmqEvents, picture: Picture) -> Picture:
    assert events.replay_address is not None
    for sequence, batch in ask_again(events.replay_address, picture.last + 1):
        picture.hear(sequence, batch)
    return picture


def tokens_of(served: Running, prompt: str) -> list[int]:
    return served.server.served.encode(prompt, param="prompt")


def test_a_listener_believes_in_what_the_next_request_resumes_from(
    served: Running, http: httpx.Client, events: ZmqEvents, picture: Picture
) -> None:
    prompt = "Believed. " + PROMPT
    tokens = tokens_of(served, prompt)
    assert say(http, prompt) == 0
    wait_until(lambda: caught_up(events, picture).hit_tokens(tokens) > 0)
    wait_until(lambda: caught_up(events, picture).hit_tokens(tokens, "CPU") > 0)
    assert say(http, prompt) == picture.hit_tokens(tokens) == picture.hit_tokens(tokens, "CPU")


def test_salts_are_told_apart(served: Running, http: httpx.Client, events: ZmqEvents, picture: Picture) -> None:
    prompt = "Salted. " + PROMPT
    tokens = tokens_of(served, prompt)
    say(http, prompt, cache_salt="pepper")
    wait_until(lambda: caught_up(events, picture).hit_tokens(tokens, salt="pepper") > 0)
    assert picture.hit_tokens(tokens) == 0


def test_what_is_flushed_is_told_as_removed(
    served: Running, http: httpx.Client, admin: httpx.Client, events: ZmqEvents, picture: Picture
) -> None:
    prompt = "Flushed. " + PROMPT
    say(http, prompt)
    tokens = tokens_of(served, prompt)
    wait_until(lambda: caught_up(events, picture).hit_tokens(tokens, "CPU") > 0)
    served.audit()
    assert admin.post("/cache/flush", json={}).is_success
    wait_until(lambda: not any(caught_up(events, picture).media.values()))


def test_a_listener_hears_all_of_it_in_order_and_the_end() -> None:
    made = ZmqEvents(EventAddresses(publish=ANY_PORT, topic="kv@me@tiny"))
    with Listener(made.address) as listener:
        with running(serving={"events": made}) as served, httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http:
            numbers = count()
            listener.connect(lambda: say_something_new(http, next(numbers)))
            say(http, "Heard. " + PROMPT)
            topic, first, batch = listener.next()
            assert topic == b"kv@me@tiny" and any(isinstance(each, Stored) for each in batch.events)
        heard = [(first, batch)]
        while not isinstance(heard[-1][1].events[-1], Cleared):
            heard.append(listener.next()[1:])
    assert [sequence for sequence, _ in heard] == list(range(first, first + len(heard)))


def test_tenants_are_never_believed_to_have_each_others_blocks() -> None:
    made = ZmqEvents(EventAddresses(publish=ANY_PORT, replay=ANY_PORT))
    tenants = [
        Tenant(principal=Principal(name=name, salt=f"{name}'s secret"), key_sha256=hashlib.sha256(name.encode()).digest())
        for name in ("alice", "bob")
    ]
    with running(tenants=tenants, serving={"events": made}) as served:
        for name in ("alice", "bob"):
            headers = {"Authorization": f"Bearer {name}"}
            with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers=headers) as http:
                say(http, PROMPT)
        picture = Picture()
        wait_until(lambda: len(set(caught_up(made, picture).salts.values())) == 2)
        assert None not in picture.salts.values() and not any("secret" in str(each) for each in picture.salts.values())
