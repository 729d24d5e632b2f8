"""Frames between two processes: what was sent arrives, and whatever else comes closes the channel with a reason."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.jobs.channel import MOST_BYTES, Channel, ChannelClosed, Message, packed, unpacked


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """One end of a channel, and the socket that is the other."""
    ours, theirs = Channel.pair()
    with theirs:
        yield ours, theirs
    ours.close()


@pytest.fixture
def pair(ends: tuple[Channel, socket.socket]) -> tuple[Channel, Channel]:
    return ends[0], Channel(ends[1])


def head(arrays: object, data: bytes = b"", **more: object) -> bytes:
    text = json.dumps({"kind": "x", "fields": {}, "arrays": arrays, **more}).encode()
    return len(text).to_bytes(4, "little") + text + data


def test_words_values_and_arrays_arrive_as_they_were_sent(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    arrays = [np.arange(5, dtype=np.int32), np.empty(0, np.int64), np.array([0.5, -1.0])]
    one.send(Message(kind="run", fields={"job": 3, "text": "ü", "none": None}, arrays=arrays))
    one.send(Message(kind="ping"))
    first, second = other.receive()
    assert (first.kind, dict(first.fields), second.kind) == ("run", {"job": 3, "text": "ü", "none": None}, "ping")
    assert [each.tolist() for each in first.arrays] == [each.tolist() for each in arrays]
    assert other.receive() == []


def test_more_than_a_socket_holds_waits_and_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    numbers, found = np.arange(2_000_000, dtype=np.int32), []
    one.send(Message(kind="run", arrays=[numbers]))
    assert not one.flush(), "all of it was taken at once, so nothing is tried here"
    while not found:
        found = other.receive()
        one.flush()
    assert np.array_equal(found[0].arrays[0], numbers)


def test_one_that_never_reads_is_given_up_and_holds_nobody(pair: tuple[Channel, Channel]) -> None:
    one, _other = pair
    large = Message(kind="run", arrays=[np.zeros(MOST_BYTES // 16 + 100_000, np.int64)])
    one.send(large)
    with pytest.raises(ChannelClosed, match="it has not read"):
        one.send(large)
    with pytest.raises(ChannelClosed):
        one.send(Message(kind="ping"))


def test_the_end_of_the_other_is_told_after_all_that_it_said(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    other.send(Message(kind="failed"))
    other.close()
    assert [each.kind for each in one.receive()] == ["failed"]
    with pytest.raises(ChannelClosed, match="it has ended"):
        one.receive()
    with pytest.raises(ChannelClosed):
        one.send(Message(kind="ping"))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\0", b"\xff\xff\xff\xff{}", b"\2\0\0\0{}", b"\4\0\0\0null", head([["<i4", 2]], b"1234"),
        head([["<i4", 1]], b"12345"),
        head([["<i4", -1]]), head([["|O", 1]], b"12345678"), head([["<i4", True]], b"1234"), head([["<i4", 1 << 62]]), head({}),
        head([], more=1), b"\xf0\x9f\0\0" + b"[" * 0x9FF0,
    ],
)  # fmt: skip
def test_what_is_no_message_closes_the_channel(body: bytes, ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(ChannelClosed, match="no message"):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.receive()


def test_a_frame_without_end_is_refused_by_its_size_alone(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall((MOST_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ChannelClosed, match="says that a message of"):
        ours.receive()


def test_a_frame_in_pieces_is_waited_for(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    frame = packed(Message(kind="ping", fields={"a": 1}))
    for at in range(len(frame) - 1):
        theirs.sendall(frame[at : at + 1])
        assert ours.receive() == []
    theirs.sendall(frame[-1:])
    assert [each.kind for each in ours.receive()] == ["ping"]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(body: bytes) -> None:
    with suppress(ValueError):
        unpacked(body)


def test_numbers_and_texts_are_looked_at() -> None:
    message = Message(kind="x", fields={"a": -1, "b": True, "c": "1", "d": 1.0})
    for name in ("a", "b", "c", "d", "e"):
        with pytest.raises(ValueError, match="is no number"):
            message.number(name)
    with pytest.raises(ValueError, match="is no text"):
        message.text("a")


def test_waiting_ends_when_something_comes(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(packed(Message(kind="ping")))
    ours.wait(60.0)
    assert len(ours.receive()) == 1
