"""From a feed to a socket: nothing waits for the socket, and lost events leave no listener with a wrong state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event

import pytest

from router_mirror import Mirror
from stepwell import Namespace, Tier
from stepwell.base.prompt import pack, page_keys
from stepwell.server.kv_events import publisher
from stepwell.server.kv_events.blocks import AllBlocksCleared, BlockStored, Message
from stepwell.server.kv_events.publisher import EventPublisher, published_salt
from stepwell.store.memory import MemoryStore
from toys import FULL, HYBRID, PAGE, Rig, text
from waiting import PATIENCE_S, wait_until

PROMPT = text(1, 6 * PAGE + 1)


class Heard:
    """A socket that remembers what was sent, and that can be made to hang or to fail."""

    def __init__(self) -> None:
        self.batches: list[list[Message]] = []
        self.open_to_send = Event()
        self.open_to_send.set()
        self.fails = self.closed = False

    def send(self, batch: Sequence[Message]) -> None:
        assert self.open_to_send.wait(PATIENCE_S)
        if self.fails:
            raise OSError("no such socket")
        self.batches.append(list(batch))

    def answer(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    @property
    def messages(self) -> list[Message]:
        return [message for batch in self.batches for message in batch]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def rig() -> Rig:
    return Rig(FULL, host_pages=64)


@pytest.fixture
def publishing(rig: Rig, heard: Heard) -> Iterator[EventPublisher]:
    made = EventPublisher(rig.cache, heard)
    made.start()
    yield made
    heard.open_to_send.set()
    made.close()
    assert heard.closed


def hit_pages(rig: Rig, heard: Heard, prompt: list[int] = PROMPT) -> int:
    mirror = Mirror(PAGE)
    mirror.hear(heard.messages)
    return mirror.hit_pages(list(page_keys(rig.cache.namespace.digest, pack(prompt), rig.tree.page_bytes)))


def test_the_first_word_is_to_forget_all_then_comes_what_is_cached(rig: Rig, heard: Heard, publishing: EventPublisher) -> None:
    rig.serve(PROMPT)
    publishing.take()
    wait_until(lambda: hit_pages(rig, heard) == 6)
    assert isinstance(heard.messages[0], AllBlocksCleared)


def test_what_happens_later_is_told_as_it_happens(rig: Rig, heard: Heard, publishing: EventPublisher) -> None:
    publishing.take()
    rig.serve(PROMPT)
    publishing.take()
    wait_until(lambda: hit_pages(rig, heard) == 6)
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.evict_all(tier)
    publishing.take()
    wait_until(lambda: hit_pages(rig, heard) == 0)
    assert sum(isinstance(each, AllBlocksCleared) for each in heard.messages) == 1


def test_a_socket_that_hangs_holds_nobody_up_and_nothing_wrong_is_believed(
    rig: Rig, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "MOST_TAKEN", 2)
    made = EventPublisher(rig.cache, heard, most_pages=16)
    made.start()
    heard.open_to_send.clear()
    made.take()
    for number in range(2, 12):  # while it hangs, more happens than the queue and the feed hold
        rig.serve(text(number, 6 * PAGE + 1))
        made.take()
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.evict_all(tier)
    made.take()
    rig.serve(PROMPT)
    heard.open_to_send.set()

    def caught_up() -> bool:
        made.take()
        return hit_pages(rig, heard) == 6

    wait_until(caught_up)
    assert all(hit_pages(rig, heard, text(number, 6 * PAGE)) == 0 for number in range(2, 12))
    assert sum(isinstance(each, AllBlocksCleared) for each in heard.messages) == 2
    assert rig.cache.counters["kv_events_lost_pages"] > 0
    made.close()


def test_a_socket_that_fails_ends_the_publishing_and_nothing_else(rig: Rig, heard: Heard, publishing: EventPublisher) -> None:
    publishing.take()
    wait_until(lambda: heard.batches)
    heard.fails = True
    rig.serve(PROMPT)
    publishing.take()
    wait_until(lambda: heard.closed)
    wait_until(lambda: not publishing._thread.is_alive())
    publishing.take()
    assert not rig.tree.feeds, "it still listens"
    rig.serve(PROMPT)
    publishing.take()


def test_the_last_word_is_to_forget_all(rig: Rig, heard: Heard) -> None:
    made = EventPublisher(rig.cache, heard)
    made.start()
    rig.serve(PROMPT)
    made.take()
    made.close()
    assert isinstance(heard.messages[-1], AllBlocksCleared) and any(isinstance(each, BlockStored) for each in heard.messages)


def test_one_that_was_never_started_closes_its_socket(rig: Rig, heard: Heard) -> None:
    EventPublisher(rig.cache, heard).close()
    assert heard.closed and not heard.batches


def test_much_at_once_goes_out_in_several_batches(
    rig: Rig, heard: Heard, publishing: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "BATCH_BLOCKS", 4)
    for number in range(4):
        rig.serve(text(number, 6 * PAGE + 1))
    publishing.take()
    wait_until(lambda: len(heard.batches) >= 8)


def test_a_detached_store_has_nothing_any_more(heard: Heard) -> None:
    rig = Rig(HYBRID, host_pages=64, store=MemoryStore())
    made = EventPublisher(rig.cache, heard)
    made.start()
    made.take()
    rig.serve(PROMPT)
    rig.settle()
    made.take()

    def in_store() -> set[int]:
        made.take()
        mirror = Mirror(PAGE)
        mirror.hear(heard.messages)
        return mirror.blocks["STORAGE"]

    wait_until(lambda: len(in_store()) == 6)
    rig.cache.store.detach()
    wait_until(lambda: not in_store())
    made.close()


def test_salts_are_told_as_requests_have_them_and_tenants_have_one_that_none_has() -> None:
    plain = Namespace(model="m", layout="l")
    assert published_salt(plain) is None and published_salt(replace(plain, salt="pepper")) == "pepper"
    tenants = [published_salt(replace(plain, tenant=name, salt='["a secret", null]')) for name in ("alice", "bob")]
    assert len(set(tenants)) == 2 and not any(reported is None or "secret" in reported for reported in tenants)
