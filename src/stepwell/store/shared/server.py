"""The owner's side: serves other processes from the log that this process has open. Decides nothing about values.

One thread for each connection, one request at a time. Input may be wrong in any way, and a client may stop or die at any moment:
this costs that connection, and nothing else. Values are copied to private memory, where their sender cannot change them, and
verified there before they are written, because the log writes values of several callers together, and after a crash treats
values that do not verify as torn.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from stepwell.base.errors import StoreError
from stepwell.store.api import Read, ReadOutcome, Write, WriteOutcome
from stepwell.store.keyed_seal import verify_without_key
from stepwell.store.log.disk.files import up_to_block
from stepwell.store.log.store import LogStore
from stepwell.store.seal import Verdict
from stepwell.store.shared import wire
from stepwell.store.shared.connection import Connection, Frame, Gone, identity, listen, remove
from stepwell.store.shared.memory import Scratch, map_memory
from stepwell.store.shared.settings import Settings, pack_settings
from stepwell.store.shared.wire import Kind, Malformed, Writing

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 512
MEMORY_BYTES = 32 << 20  # of one connection, unless a value needs more
CLOSE_S = 5.0  # for requests being answered when the owner closes
_ACCEPT_PAUSE_S = 0.1  # when there are no descriptors left


class Served(NamedTuple):
    """An open log and its settings."""

    store: LogStore
    settings: Settings


class Server:
    """Answers from its construction until `close`: first that the log is being recovered, and afterwards from the log.

    The log remains the caller's.
    """

    def __init__(self, directory: Path) -> None:
        """Only for the holder of the directory's lock. Raises OSError."""
        self._directory = directory
        self._served: Served | None = None
        self._scratch = Scratch()
        self._lock = Lock()
        self._peers: dict[Peer, Thread] = {}
        self._closed = False
        self._listening = listen(directory)
        self._socket_file = identity(directory)
        self._accepting = Thread(target=self._accept, name="shared-log", daemon=True)
        self._accepting.start()

    @property
    def settings(self) -> Settings:
        assert self._served is not None, "nothing is served yet"
        return self._served.settings

    def serve(self, store: LogStore) -> None:
        """From now on, requests are answered from this log."""
        self._served = Served(store, _settings_of(store))

    def close(self) -> None:
        """Accepts no more requests, and returns when those accepted are answered or timed out.

        A client without an answer finds the connection closed, and calls the next owner. Call this before the log is closed:
        the caller holds the lock, so the socket is removed from the directory that was listened in; a directory that replaced
        it keeps its own.
        """
        self._closed = True
        if self._served is not None and identity(self._directory) == self._socket_file:  # else it may belong to another process
            with suppress(OSError):
                remove(self._directory)
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        with self._lock:
            peers = dict(self._peers)
        for peer in peers:
            peer.connection.stop_hearing()
        _join(peers.values())
        for peer, thread in peers.items():
            if thread.is_alive():
                peer.connection.hang_up()
        _join(peers.values())  # a thread still running waits for the disk: closing the log reports that

    def leave_in_child(self) -> None:
        """For a fork, where these belong to the parent. Takes no lock."""
        self._listening.close()
        for peer in list(self._peers):
            peer.connection.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("%s: a process could not connect: %s", self._directory, error)
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                self._take(Connection(accepted))
            except Exception as error:  # thread boundary: a client must not end it
                log.warning("%s: refused a connection: %s", self._directory, error)
                accepted.close()

    def _take(self, connection: Connection) -> None:
        peer = Peer(connection, lambda: self._served, self._scratch)
        thread = Thread(target=self._serve, args=[peer], name=f"shared-log-{connection.process}", daemon=True)
        with self._lock:
            full = len(self._peers) >= MAX_CONNECTIONS
            if not full:
                self._peers[peer] = thread
        if full:
            return peer.refuse(f"{self._directory} is shared over {MAX_CONNECTIONS} connections already")
        try:
            thread.start()
        except BaseException:  # no more threads
            with self._lock:
                del self._peers[peer]
            raise

    def _serve(self, peer: Peer) -> None:
        try:
            while not self._closed:
                peer.answer_one()
        except Gone:
            pass
        except Malformed as error:
            log.warning("%s: process %d was disconnected: %s", self._directory, peer.connection.process, error)
        finally:
            with self._lock:
                self._peers.pop(peer, None)
            peer.close()


def _settings_of(store: LogStore) -> Settings:
    stat, largest = store.stat(), store.traits.max_value_bytes
    assert largest is not None, "a log has a largest value"
    quotas = {tenant.tenant: tenant.quota_bytes for tenant in stat.tenants}
    return Settings(budget_bytes=stat.budget_bytes, segment_bytes=stat.segment_bytes, max_value_bytes=largest, quotas=quotas)


def _join(threads: Iterable[Thread]) -> None:
    until_s = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))


class Peer:
    """Another process at the end of one connection, and the memory that it passed."""

    def __init__(self, connection: Connection, served: Callable[[], Served | None], scratch: Scratch) -> None:
        self.connection = connection
        self._served, self._scratch = served, scratch
        self._memory = memoryview(b"")
        self._answers: Mapping[Kind, Callable[[LogStore, bytes], bytes]] = {
            Kind.CONTAINS: self._contains,
            Kind.READ: self._read,
            Kind.WRITE: self._write,
            Kind.DELETE: self._delete,
            Kind.CLEAR: self._clear,
            Kind.RELEVEL: self._relevel,
        }

    def refuse(self, why: str) -> None:
        with suppress(Gone):
            self.connection.send(Kind.ERROR, wire.pack_text(why))
        self.close()

    def close(self) -> None:
        self._memory = memoryview(b"")  # unmapped here, even if other references remain
        self.connection.close()

    def answer_one(self) -> None:
        """Raises Gone, or Malformed after the error was sent to the client."""
        try:
            kind, body = self._answer(self.connection.receive())
        except Gone:
            raise
        except Malformed as error:
            self.connection.send(Kind.ERROR, wire.pack_text(f"this cannot be answered: {error}"))
            raise
        except StoreError as error:
            kind, body = Kind.ERROR, wire.pack_text(str(error))
        except Exception as error:  # of any kind: the client receives it
            log.exception("a request of process %d failed", self.connection.process)
            kind, body = Kind.ERROR, wire.pack_text(f"{type(error).__name__}: {error}")
        self.connection.send(kind, body)

    def _answer(self, frame: Frame) -> tuple[Kind, bytes]:
        served = self._served()
        if served is None:
            if frame.fd is not None:
                os.close(frame.fd)
            return Kind.RECOVERING, b""
        if frame.kind is Kind.HELLO:
            return Kind.SETTINGS, pack_settings(served.settings)
        if frame.kind is Kind.MEMORY:
            self._map(frame, max(MEMORY_BYTES, up_to_block(served.settings.max_value_bytes)))
            return Kind.DONE, b""
        answer = self._answers.get(frame.kind)
        if answer is None:
            raise Malformed(f"{frame.kind.name} is not a request")
        return Kind.DONE, answer(served.store, frame.body)

    def _map(self, frame: Frame, most_bytes: int) -> None:
        if frame.fd is None:
            raise Malformed("memory without its descriptor")
        try:
            self._memory = map_memory(frame.fd, wire.parse_number(frame.body), most_bytes)
        finally:
            os.close(frame.fd)

    def _contains(self, store: LogStore, body: bytes) -> bytes:
        asked = wire.parse_keys(body)
        return wire.pack_found(store.contains(asked.space, asked.keys))

    def _read(self, store: LogStore, body: bytes) -> bytes:
        asked, memory = wire.parse_reading(body, len(self._memory)), self._memory
        places = zip(asked.keys, asked.places.offsets, asked.places.sizes, strict=True)
        reads = [Read(key, memory[offset : offset + size]) for key, offset, size in places]
        results = store.read_into(asked.space, reads, cancelled=self.connection.is_gone)
        if any(result.outcome is ReadOutcome.CANCELLED for result in results):
            raise Gone("the client no longer waits, or this process closes the log")
        return wire.pack_results(results)

    def _write(self, store: LogStore, body: bytes) -> bytes:
        asked = wire.parse_writing(body, len(self._memory))
        with self._scratch.copy(self._memory, asked.places) as values:
            return wire.pack_outcomes(self._write_intact(store, asked, values))

    def _write_intact(self, store: LogStore, asked: Writing, values: Sequence[memoryview]) -> list[WriteOutcome]:
        writes = list(map(Write, asked.keys, values, asked.stamps, asked.parents, asked.depths, repeat(b""), asked.levels))
        intact = [verify_without_key(asked.space, each.key, each.data, each.stamp) is Verdict.INTACT for each in writes]
        self._must_be_there()
        good = [write for write, fits in zip(writes, intact, strict=True) if fits]
        outcomes = iter(store.write_from(asked.space, good))
        return [next(outcomes) if fits else WriteOutcome.FAILED for fits in intact]

    def _delete(self, store: LogStore, body: bytes) -> bytes:
        asked = wire.parse_keys(body)
        self._must_be_there()
        return wire.pack_number(store.delete(asked.space, asked.keys))

    def _relevel(self, store: LogStore, body: bytes) -> bytes:
        asked = wire.parse_relevelling(body)
        return wire.pack_number(store.relevel(asked.space, asked.keys, asked.level))

    def _clear(self, store: LogStore, body: bytes) -> bytes:
        digest = wire.parse_digest(body)
        self._must_be_there()
        return wire.pack_number(store.clear(digest))

    def _must_be_there(self) -> None:
        """A client that stopped waiting may have done other things since: its request must not be carried out now."""
        if self.connection.is_gone():
            raise Gone("the client no longer waits")
