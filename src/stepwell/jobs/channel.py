"""Small messages between two processes of one machine, over a pair of connected sockets. No pickle; nothing here waits for long.

    frame    | size: 4 | kind: 8 | size of fields: 4 | arrays: 4 | numbers: 1 | head, and how many there are
             | a number: 8 | ... | an array's kind and length: 1 + 4 | ... | fields: JSON | array | ...

Frequent messages have numbers and arrays alone: names and JSON are for the others. Input is checked before it is used: a frame
that is too long, or malformed, closes the channel. So does the end of the other process. Output that cannot be sent at once is
buffered here, up to a limit: a peer that does not read blocks no sender.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct, pack, unpack_from
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BYTES = 64 << 20  # of a frame, and of the output buffer
MOST_NUMBERS = 255  # in addition to arrays
_HEAD, _SIZED, _ARRAY = Struct("<8sIIB"), Struct("<I8sIIB"), Struct("<BI")
_CODES = {"<i4": ord("i"), "<i8": ord("q"), "<f8": ord("d")}
_ITEMS = {code: (kind, int(kind[-1])) for kind, code in _CODES.items()}  # and their bytes
_NOTHING = {kind: np.empty(0, kind) for kind in _CODES}  # an empty array has no buffer to parse
_READ_BYTES = 1 << 18
_json = json.JSONEncoder(separators=(",", ":")).encode

Array = npt.NDArray[Any]


class ChannelClosed(Exception):
    """Nothing can be sent or received any more; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """One message: a word of up to eight letters, whole numbers in an order that depends on it, plain values by name, and arrays
    of numbers.
    """

    kind: str
    numbers: Sequence[int] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[Array] = ()

    def number(self, name: str) -> int:
        """A whole number, not negative. Raises ValueError if there is none."""
        value = self.fields.get(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{self.kind}: {name} is no number: {value!r:.80}")
        return value

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ValueError(f"{self.kind}: {name} is no text: {value!r:.80}")
        return value

    def counts(self, many: int) -> Sequence[int]:
        """Its numbers: exactly `many`, none of them negative. Raises ValueError otherwise."""
        if len(self.numbers) != many or min(self.numbers) < 0:
            raise ValueError(f"{self.kind}: {list(self.numbers)!r:.80} are not {many} numbers")
        return self.numbers


def packed(message: Message) -> bytes:
    """A message as a frame. Raises ValueError if it would be too long."""
    arrays = [np.ascontiguousarray(each) for each in message.arrays]
    kinds = [each.dtype.str for each in arrays]
    assert _CODES.keys() >= set(kinds), f"arrays of these numbers are not sent: {kinds}"
    kind, numbers = message.kind.encode("ascii"), message.numbers
    assert len(kind) <= 8 and len(numbers) <= MOST_NUMBERS, f"{kind!r} with {len(numbers)} numbers"
    fields = _json(message.fields).encode() if message.fields else b""
    size = _HEAD.size + 8 * len(numbers) + _ARRAY.size * len(arrays) + len(fields) + sum([each.nbytes for each in arrays])
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes is longer than {MOST_BYTES}")
    described = [_ARRAY.pack(_CODES[what], each.size) for what, each in zip(kinds, arrays, strict=True)]
    head = _SIZED.pack(size, kind, len(fields), len(arrays), len(numbers))
    return b"".join([head, pack(f"<{len(numbers)}q", *numbers), *described, fields, *[each.tobytes() for each in arrays]])


def unpacked(body: bytes) -> Message:
    """Parses a frame without its size field. Raises ValueError for anything that is not one."""
    if len(body) < _HEAD.size:
        raise ValueError("a frame shorter than its head")
    kind, size, num_arrays, num_numbers = _HEAD.unpack_from(body)
    described = _HEAD.size + 8 * num_numbers
    start = described + _ARRAY.size * num_arrays
    if start + size > len(body):
        raise ValueError("a frame shorter than its head")
    return Message(
        kind=kind.rstrip(b"\0").decode("ascii"),
        numbers=unpack_from(f"<{num_numbers}q", body, _HEAD.size),
        fields=_fields(body[start : start + size]) if size else {},
        arrays=_arrays(body, described, start, start + size),
    )


def _fields(text: bytes) -> Mapping[str, Any]:
    fields = json.loads(text.decode())  # errors in it are ValueErrors too, except for endless nesting
    if not isinstance(fields, dict):
        raise ValueError("a frame whose fields have no names")
    return fields


def _arrays(body: bytes, described: int, end: int, start: int) -> list[Array]:
    """Parses the arrays described in `body[described:end]`; their data begins at `start`."""
    arrays: list[Array] = []
    for at in range(described, end, _ARRAY.size):
        code, count = _ARRAY.unpack_from(body, at)
        if code not in _ITEMS:
            raise ValueError(f"a frame with an array of {code}")
        kind, item_bytes = _ITEMS[code]
        if start + count * item_bytes > len(body):
            raise ValueError("a frame shorter than its arrays")
        arrays.append(np.frombuffer(body, kind, count, start) if count else _NOTHING[kind])
        start += count * item_bytes
    if start != len(body):
        raise ValueError("a frame longer than its arrays")
    return arrays


class Channel:
    """One end. Several threads may call `send`; everything else is for one thread."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._in = bytearray()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._out = bytearray()
        self._sending = Lock()
        self.closed: str | None = None  # why, once it is closed
        self._polled = select.poll()  # for input; to create one costs as much as a long message
        self._polled.register(connected, select.POLLIN)
        self.heard_s = monotonic()  # when anything was received last

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """One end for this process, and a socket to pass to the other."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wanted(self) -> int:
        """The events to poll for: input, and space for buffered output."""
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    @property
    def hung_up(self) -> bool:
        """Whether the other end is closed, as it is when its process ends; earlier input may still be there."""
        if self._socket.fileno() < 0:
            return True
        polled = select.poll()
        polled.register(self._socket, 0)
        return any(events & select.POLLHUP for _, events in polled.poll(0))

    def send(self, message: Message) -> None:
        """Sends a message, now or as soon as the other end reads. Raises ChannelClosed."""
        self.send_packed(packed(message))

    def send_packed(self, frame: bytes) -> None:
        """Like `send`, for a message that is packed already."""
        with self._sending:
            self._must_be_open()
            if len(self._out) + len(frame) > MOST_BYTES:
                self._close(f"it has not read {len(self._out)} bytes")
            sent = 0 if self._out else self._sent(frame)
            if sent < len(frame):
                self._out += frame[sent:]
                self._flush()

    def flush(self) -> bool:
        """Sends buffered output, as far as the other end takes it; returns whether none is left. Raises ChannelClosed.

        Input that the other end sent before it closed can still be received.
        """
        with self._sending:
            self._must_be_open()
            return self._flush()

    def receive(self) -> list[Message]:
        """Everything received, without waiting. Raises ChannelClosed once all input before the end was returned."""
        messages: list[Message] = []
        if self.closed is None:
            self._read()
        while len(self._in) >= 4:
            size = int.from_bytes(self._in[:4], "little")
            if size > MOST_BYTES:
                self._in.clear()
                self.closed = f"it announced a message of {size} bytes"
                break
            if len(self._in) < 4 + size:
                break
            body = bytes(self._in[4 : 4 + size])
            del self._in[: 4 + size]
            try:
                messages.append(unpacked(body))
            except (ValueError, RecursionError) as error:
                self._in.clear()
                self.closed = f"it sent an invalid message: {error}"
        if not messages:
            self._must_be_open()
        return messages

    def wait(self, timeout_s: float) -> None:
        """Waits until there is input, or buffered output can be sent, for at most this time."""
        if self.closed is None:
            self._polled.modify(self._socket, self.wanted)
            self._polled.poll(max(timeout_s, 0) * 1000)

    def close(self) -> None:
        self.closed = self.closed or "it was closed"
        self._socket.close()

    def _flush(self) -> bool:
        while self._out:
            sent = self._sent(bytes(self._out[:_READ_BYTES]))
            if not sent:
                return False
            del self._out[:sent]
        return True

    def _sent(self, data: bytes) -> int:
        """How much of it the other end takes now."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._out.clear()
            raise ChannelClosed(f"it is gone ({error.strerror})") from None

    def _read(self) -> None:
        try:
            while len(self._in) < MOST_BYTES + 4:
                size = self._socket.recv_into(self._buffer)
                if not size:
                    self.closed = "it has ended"
                    return
                self._in += self._buffer[:size]
                self.heard_s = monotonic()
                if size < _READ_BYTES:
                    return  # that was all; the next poll reports later input
        except BlockingIOError:
            pass
        except OSError as error:
            self.closed = f"it is gone ({error.strerror})"

    def _must_be_open(self) -> None:
        if self.closed is not None:
            raise ChannelClosed(self.closed)

    def _close(self, why: str) -> None:
        self.closed = why
        raise ChannelClosed(why)
