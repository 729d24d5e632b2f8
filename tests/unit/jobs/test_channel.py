"""Frames between two processes: what was sent arrives, and whatever else comes closes the channel with a reason."""

from __future__ import annotations

import socket
import struct
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


def frame(
    data: bytes = b"", *, kind: bytes = b"x", fields: bytes = b"", arrays: tuple[tuple[int, int], ...] = (), num_numbers: int = 0,
    num_arrays: int | None = None, fields_size: int | None = None,
) -> bytes:  # fmt: skip
    """One behind its size, with counts that maybe say something else than is there."""
    size, count = len(fields) if fields_size is None else fields_size, len(arrays) if num_arrays is None else num_arrays
    described = b"".join(struct.pack("<BI", code, length) for code, length in arrays)
    return struct.pack("<8sIIB", kind, size, count, num_numbers) + described + fields + data


def test_words_values_and_arrays_arrive_as_they_were_sent(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    arrays = [np.arange(5, dtype=np.int32), np.empty(0, np.int64), np.array([0.5, -1.0])]
    one.send(Message(kind="run", numbers=(7, -(2**63)), fields={"job": 3, "text": "ü", "none": None}, arrays=arrays))
    one.send(Message(kind="ping"))
    first, second = other.receive()
    assert (first.kind, dict(first.fields), second.kind) == ("run", {"job": 3, "text": "ü", "none": None}, "ping")
    assert (first.numbers, second.numbers, second.fields, second.arrays) == ((7, -(2**63)), (), {}, [])
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
        b"", b"\0", frame()[:-1], frame(b"1"), frame(fields=b"{}")[:-1], frame(fields=b"null"), frame(fields=b"{"),
        frame(fields=b"\xff\xff"), frame(fields_size=2**32 - 1), frame(num_numbers=1), frame(b"1234567", num_numbers=1),
        frame(num_arrays=2**32 - 1), frame(kind=b"\xff"), frame(b"1234", arrays=((ord("i"), 2),)),
        frame(b"12345", arrays=((ord("i"), 1),)), frame(arrays=((ord("q"), 2**32 - 1),)),
        frame(b"12345678", arrays=((ord("O"), 1),)), frame(arrays=((0, 0),)), frame(fields=b"[" * 0x9FF0),
    ],
)  # fmt: skip
def test_what_is_no_message_closes_the_channel(body: bytes, ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(ChannelClosed, match="an invalid message"):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.receive()


def test_a_frame_without_end_is_refused_by_its_size_alone(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall((MOST_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ChannelClosed, match="announced a message of"):
        ours.receive()


def test_a_frame_in_pieces_is_waited_for(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    sent = packed(Message(kind="ping", fields={"a": 1}))
    for at in range(len(sent) - 1):
        theirs.sendall(sent[at : at + 1])
        assert ours.receive() == []
    theirs.sendall(sent[-1:])
    assert [each.kind for each in ours.receive()] == ["ping"]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(body: bytes) -> None:
    with suppress(ValueError):
        unpacked(body)


@pytest.mark.parametrize("numbers", [(), (1,), (1, 2, 3), (1, -1)])
def test_numbers_are_as_many_as_are_meant_and_not_negative(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not 2 numbers"):
        Message(kind="x", numbers=numbers).counts(2)


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
