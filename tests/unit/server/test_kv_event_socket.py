"""vLLM's wire format, read by a client of its own: frames, sequence numbers, old batches for those who missed some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import msgspec
import zmq

from kv_event_client import Batch, Listener, Stored, ask_again
from stepwell.base.errors import ConfigError
from stepwell.base.prompt import pack
from stepwell.server.kv_events import zmq_socket
from stepwell.server.kv_events.blocks import AllBlocksCleared, BlockRemoved, BlockStored
from stepwell.server.kv_events.zmq_socket import EventAddresses, ZmqEvents
from waiting import wait_until

ANY_PORT = "tcp://127.0.0.1:*"
STORED = BlockStored(hashes=(2**64 - 1, 5), parent=None, tokens=pack([1, 2, 3, 4]), block_tokens=2, medium="GPU", salt="pepper")
REMOVED = BlockRemoved(hashes=(5,), medium="CPU")


@pytest.fixture
def events() -> Iterator[ZmqEvents]:
    made = ZmqEvents(EventAddresses(publish=ANY_PORT, replay=ANY_PORT, topic="kv@pod@model"))
    yield made
    made.close()


@pytest.fixture
def listener(events: ZmqEvents) -> Iterator[Listener]:
    with Listener(events.address) as made:
        made.connect(lambda: events.send([AllBlocksCleared()]))
        yield made


def replayed(events: ZmqEvents, first: int) -> list[int]:
    assert events.replay_address is not None
    return [sequence for sequence, _ in ask_again(events.replay_address, first, meanwhile=events.answer)]


def test_a_batch_is_read_as_vllm_writes_it(events: ZmqEvents, listener: Listener) -> None:
    events.send([STORED, REMOVED, AllBlocksCleared()])
    topic, _, batch = listener.next()
    stored, removed, cleared = batch.events
    assert topic == b"kv@pod@model" and batch.data_parallel_rank == 0 and batch.ts > 1e9
    assert isinstance(stored, Stored) and stored.block_hashes == [2**64 - 1, 5] and stored.parent_block_hash is None
    assert stored.token_ids == [1, 2, 3, 4] and (stored.block_size, stored.medium, stored.cache_salt) == (2, "GPU", "pepper")
    assert (stored.lora_id, stored.lora_name) == (None, None)
    assert (removed.block_hashes, removed.medium) == ([5], "CPU") and type(cleared).__name__ == "Cleared"


def test_fields_are_those_of_vllm_and_a_salt_is_left_out_where_there_is_none(events: ZmqEvents, listener: Listener) -> None:
    events.send([STORED, BlockStored(hashes=(1,), parent=5, tokens=pack([1, 2]), block_tokens=2, medium="STORAGE", salt=None)])
    _, _, payload = listener.next_frames()
    with_salt, without = msgspec.msgpack.decode(payload)[1]
    fields = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert with_salt.keys() == fields | {"cache_salt"} and without.keys() == fields


def test_sequence_numbers_count_up_by_one(events: ZmqEvents, listener: Listener) -> None:
    for _ in range(5):
        events.send([REMOVED])
    numbers = [listener.next()[1] for _ in range(5)]
    assert numbers == list(range(numbers[0], numbers[0] + 5))


def test_old_batches_are_sent_again_to_whoever_asks(events: ZmqEvents) -> None:
    for _ in range(5):
        events.send([STORED])
    assert events.replay_address is not None
    answered = list(ask_again(events.replay_address, 2, meanwhile=events.answer))
    assert [sequence for sequence, _ in answered] == [2, 3, 4]
    assert all(isinstance(batch, Batch) and isinstance(batch.events[0], Stored) for _, batch in answered)
    assert replayed(events, 0) == [0, 1, 2, 3, 4] and replayed(events, 5) == replayed(events, 2**64 - 1) == []


def test_the_latest_batches_are_kept(events: ZmqEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_socket, "MOST_BATCHES", 3)
    for _ in range(5):
        events.send([STORED])
    assert replayed(events, 0) == [2, 3, 4]
    monkeypatch.setattr(zmq_socket, "MOST_KEPT_BYTES", 1)
    events.send([STORED])
    assert replayed(events, 0) == [5]


def test_ten_thousand_batches_come_whole(events: ZmqEvents) -> None:
    for _ in range(zmq_socket.MOST_BATCHES + 1):
        events.send([REMOVED])
    assert replayed(events, 0) == list(range(1, zmq_socket.MOST_BATCHES + 1))


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b""], [b"x", b"\0" * 8], [b"", b"\0" * 7], [b"", b"\0" * 8, b""], [b"", b"\0" * 900]]
)
def test_questions_that_are_none_are_dropped(events: ZmqEvents, frames: list[bytes]) -> None:
    events.send([STORED])
    context: Any = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(events.replay_address)
        stranger.send_multipart(frames)
        wait_until(lambda: events._replay is not None and events._replay.poll(0))
        events.answer()
        assert events._replay is not None and not events._replay.poll(0)
        assert replayed(events, 0) == [0] and not stranger.poll(0), "others are answered, and this one is not"
    context.destroy(linger=0)


@pytest.mark.parametrize("address", ["5557", "http://127.0.0.1:5557", "tcp://", "tcp://127.0.0.1", "inproc://x", "tcp://a b:1"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="KV events need an address such as"):
        EventAddresses(publish=address)


def test_an_address_that_is_taken_is_refused_and_nothing_is_left_open(events: ZmqEvents) -> None:
    with pytest.raises(ConfigError, match="choose another address"):
        ZmqEvents(EventAddresses(publish=ANY_PORT, replay=events.address))


def test_addresses_beyond_this_machine_are_named() -> None:
    local = EventAddresses(publish="tcp://127.0.0.1:1", replay="ipc:///tmp/x")
    assert not local.beyond_this_machine
    assert EventAddresses(publish="tcp://*:1", replay="tcp://[::1]:2").beyond_this_machine == ["tcp://*:1"]
