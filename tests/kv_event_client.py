"""A client of KV events that knows nothing of Stepwell: the structs are written after vLLM 0.32's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from waiting import PATIENCE_S, wait_until


class Stored(msgspec.Struct, tag="BlockStored", kw_only=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    cache_salt: str | None = None  # that Dynamo reads


class Removed(msgspec.Struct, tag="BlockRemoved", kw_only=True):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", kw_only=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(Batch)
_MS = int(PATIENCE_S * 1000)


class Listener:
    """A SUB socket. Nothing is heard before it is connected, which a publisher does not wait for."""

    def __init__(self, address: str) -> None:
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.subscribe(b"")
        self._socket.connect(address)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def connect(self, send: Callable[[], None]) -> None:
        """Has something sent until some of it is heard, and hears all of that."""

        def heard() -> bool:
            send()
            return bool(self._socket.poll(50))

        wait_until(heard)
        while self._socket.poll(50):
            self._socket.recv_multipart()

    def next_frames(self) -> tuple[bytes, bytes, bytes]:
        assert self._socket.poll(_MS), "nothing was published"
        topic, sequence, payload = self._socket.recv_multipart()
        return topic, sequence, payload

    def next(self) -> tuple[bytes, int, Batch]:
        topic, sequence, payload = self.next_frames()
        assert len(sequence) == 8
        return topic, int.from_bytes(sequence, "big"), _decoder.decode(payload)

    def waiting(self) -> Iterator[tuple[bytes, int, Batch]]:
        """What has arrived by now."""
        while self._socket.poll(0):
            yield self.next()


def ask_again(address: str, first: int, meanwhile: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Batch]]:
    """Batches from `first` on, as a publisher still has them."""
    context: Any = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:

            def answered() -> bool:
                meanwhile()
                return bool(socket.poll(0))

            wait_until(answered)
            empty, _topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert payload == b""
                return
            yield int.from_bytes(sequence, "big"), _decoder.decode(payload)
    finally:
        context.destroy(linger=0)
