"""Batches of messages over ZeroMQ, in the format of vLLM 0.32's KV events. The only file that imports zmq and msgspec, on use.

    PUB      topic | sequence (8 bytes, from 0) | msgpack [time, [events], rank]           events are maps, tagged by `type`
    ROUTER   request: id | "" | first sequence (8 bytes)
             reply:   id | "" | topic | sequence | batch, for each batch still kept; then sequence -1 without a batch

Every client that can connect can read prompts, as token ids, and salts, so the default address is on loopback. Input on the
second socket is a request of this form, or dropped.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepwell.base.errors import ConfigError
from stepwell.base.extras import install
from stepwell.base.prompt import unpack
from stepwell.server.kv_events.blocks import BlockRemoved, BlockStored, Message

if TYPE_CHECKING:
    import zmq

MOST_BATCHES = 10_000  # kept for replay, and queued for a slow listener
MOST_KEPT_BYTES = 256 << 20
MOST_ASKED = 16  # replay requests answered before new batches are sent
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_MOST_REQUEST_BYTES = 1024
_LINGER_MS = 200  # for sending the last batches
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.*-]+):([0-9]{1,5}|\*)|ipc://.+")
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAddresses:
    """The addresses for publishing and, optionally, for replay. Raises ConfigError."""

    publish: str
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for address in filter(None, (self.publish, self.replay)):
            if not _ADDRESS.fullmatch(address):
                raise ConfigError(f"KV events need an address such as tcp://127.0.0.1:5557, got {address!r:.200}")

    @property
    def beyond_this_machine(self) -> list[str]:
        """The addresses that other machines may reach."""
        return [each for each in (self.publish, self.replay) if each is not None and not each.startswith(_LOOPBACK)]


class ZmqEvents:
    """An `EventSocket`, bound on construction."""

    def __init__(self, addresses: EventAddresses) -> None:
        """Raises ConfigError if an address cannot be bound, or a package is missing."""
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(f"KV events need {error.name}, which is not installed: {install('events')}") from None
        self._zmq = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = addresses.topic.encode()
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque()  # sequence and batch, oldest first
        self._kept_bytes = 0
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publish = self._bind(zmq.PUB, addresses.publish)
            if addresses.replay is not None:
                self._replay = self._bind(zmq.ROUTER, addresses.replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, MOST_BATCHES + 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)  # of input
        socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot publish KV events at {address}: {error}; choose another address") from None
        return socket

    @property
    def address(self) -> str:
        """The publishing address with its actual port."""
        return _endpoint(self._publish, self._zmq)

    @property
    def replay_address(self) -> str | None:
        return None if self._replay is None else _endpoint(self._replay, self._zmq)

    def send(self, batch: Sequence[Message]) -> None:
        sequence = self._next.to_bytes(_SEQUENCE_BYTES, "big")
        payload = self._encode([time.time(), [_map(each) for each in batch], 0])
        self._next += 1
        if self._replay is not None:
            self._keep(sequence, payload)
        self._publish.send_multipart((self._topic, sequence, payload))  # a PUB socket drops messages for a slow listener

    def _keep(self, sequence: bytes, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > MOST_BATCHES or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def answer(self) -> None:
        if self._replay is None:
            return
        for _ in range(MOST_ASKED):
            if not self._replay.poll(0):
                return
            frames = self._replay.recv_multipart()
            if len(frames) == 3 and not frames[1] and len(frames[2]) == _SEQUENCE_BYTES:
                self._send_kept(frames[0], first=int.from_bytes(frames[2], "big"))

    def _send_kept(self, who: bytes, *, first: int) -> None:
        """A ROUTER drops messages for a client that is gone or does not read."""
        assert self._replay is not None
        for sequence, payload in self._kept:
            if int.from_bytes(sequence, "big") >= first:
                self._replay.send_multipart((who, b"", self._topic, sequence, payload))
        self._replay.send_multipart((who, b"", self._topic, _END, b""))

    def close(self) -> None:
        self._context.destroy(linger=_LINGER_MS)


def _endpoint(socket: zmq.Socket[bytes], zmq_module: Any) -> str:
    name = socket.getsockopt(zmq_module.LAST_ENDPOINT)
    assert isinstance(name, bytes), f"not a text address: {name!r}"
    return name.rstrip(b"\0").decode()


def _map(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(message).__name__}
    if isinstance(message, BlockStored):
        fields |= {
            "block_hashes": message.hashes, "parent_block_hash": message.parent,
            "token_ids": unpack(message.tokens).tolist(), "block_size": message.block_tokens,
            "lora_id": None, "medium": message.medium, "lora_name": None,
        }  # fmt: skip
        if message.salt is not None:
            fields["cache_salt"] = message.salt
    elif isinstance(message, BlockRemoved):
        fields |= {"block_hashes": message.hashes, "medium": message.medium}
    return fields
