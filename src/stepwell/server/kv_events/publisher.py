"""Publishes a cache's events: takes them on the engine's thread, translates and sends them on a thread of its own.

    engine's thread    feed --take--> queue (bounded)
    this thread                       queue --translate--> batches --> socket

The engine never waits. While the queue is full, events stay in the feed, which is bounded as well and drops the oldest. Then the
publisher starts over: it publishes a message that clears all blocks, and then everything that is cached. An error on this thread
ends publishing, not the server. The last message, after an error or at shutdown, clears all blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import Protocol

from stepwell.base.prompt import Namespace, PageKey
from stepwell.cache.facade import Cache
from stepwell.server.kv_events.blocks import AllBlocksCleared, BlockTranslator, Message
from stepwell.tree.feed import MOST_PAGES, CacheEvent, EventFeed

log = logging.getLogger(__name__)

MOST_TAKEN = 256  # queue entries, each with the changes of one pass
BATCH_BLOCKS = 4096  # per batch
POLL_S = 0.05  # between checks for replay requests


class EventSocket(Protocol):
    """Where batches go. One thread at a time."""

    def send(self, batch: Sequence[Message]) -> None:
        """Sends to all listeners. Never waits for them."""
        ...

    def answer(self) -> None:
        """Answers replay requests. Does not wait."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    events: list[CacheEvent]
    salts: dict[PageKey, str | None]
    from_start: bool  # everything that is cached: clear what was published before


class EventPublisher:
    """Publishes one cache's events. `take` belongs to the engine's thread, `start` and `close` to the server's owner."""

    def __init__(self, cache: Cache, socket: EventSocket, *, most_pages: int = MOST_PAGES) -> None:
        self._cache = cache
        self._socket = socket
        self._most_pages = most_pages  # limit of the feed
        self._translator = BlockTranslator(cache.spec)
        self._feed: EventFeed | None = None
        self._lost_pages = 0  # the feed's losses that were handled
        self._queue: Queue[_Taken] = Queue(MOST_TAKEN)
        self._ending = Event()
        self._thread = Thread(target=self._run, name="stepwell-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends what was taken and the last message, and closes the socket. Call it after the engine has stopped."""
        self._ending.set()
        if self._thread.ident is None:
            self._socket.close()
        else:
            self._thread.join()

    def take(self) -> None:
        """Queues the events since the last call. Never waits. On the engine's thread, after each step."""
        if self._queue.full():
            return
        if not self._thread.is_alive():
            self._stop_listening()
            return
        from_start = self._feed is None
        if self._feed is None:
            self._feed = self._cache.listen(most_pages=self._most_pages)
        events = self._feed.take()
        lost = self._feed.lost_pages - self._lost_pages
        if lost:
            self._lost_pages += lost
            self._cache.counters.add("kv_events_lost_pages", lost)
        if from_start or lost:
            events, from_start = self._cache.cached_now(), True
        if not events and not from_start:
            return
        salts = {each.parent: self._salt(each.parent) for each in events if each.parent is not None and not each.first}
        self._queue.put_nowait(
            _Taken(events=events, salts=salts, from_start=from_start)
        )  # the only producer, and the queue was not full

    def _stop_listening(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _salt(self, digest: PageKey) -> str | None:
        namespace = self._cache.namespace_of(digest)
        return digest.hex() if namespace is None else published_salt(namespace)

    # ---- on its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._ending.is_set() and self._queue.empty()):
                self._send_next()
                self._socket.answer()
        except Exception:  # the worker boundary: serving continues without events
            log.exception("publishing KV events failed: no more are published until the server is restarted")
        try:
            self._socket.send([AllBlocksCleared()])
        except Exception:
            log.exception("could not send the message that clears all blocks")
        finally:
            self._socket.close()

    def _send_next(self) -> None:
        try:
            taken = self._queue.get(timeout=POLL_S)
        except Empty:
            return
        translate = self._translator.start_over if taken.from_start else self._translator.translate
        for batch in _batches(translate(taken.events, taken.salts)):
            self._socket.send(batch)


def published_salt(namespace: Namespace) -> str | None:
    """The salt that a router sees in requests of a namespace.

    A router does not know the keys that identify tenants. A tenant's blocks get a salt that no request has, so that the router
    does not match them with requests of another tenant.
    """
    return namespace.salt if namespace.tenant is None else namespace.digest.hex()


def _batches(messages: Sequence[Message]) -> Iterator[list[Message]]:
    batch: list[Message] = []
    blocks = 0
    for message in messages:
        batch.append(message)
        blocks += len(message.hashes) if not isinstance(message, AllBlocksCleared) else 0
        if blocks >= BATCH_BLOCKS:
            yield batch
            batch, blocks = [], 0
    if batch:
        yield batch
