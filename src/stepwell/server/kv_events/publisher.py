"""Carries a cache's events to a socket: taken on the engine's thread, translated and sent on one of its own.

    engine's thread    feed --take--> queue (bounded)
    this thread                       queue --translate--> batches --> socket

The engine never waits. While the queue is full, events stay with the feed, which is bounded as well and loses the oldest. Then
everything starts over: listeners are told to forget all blocks, and what is cached by then is told anew. What goes wrong on this
thread ends the publishing, and the server goes on. The last word, then and when the server stops, is to forget all blocks.
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
from stepwell.server.kv_events.blocks import BlockTranslator
from stepwell.server.kv_events.messages import AllBlocksCleared, Message
from stepwell.tree.feed import MOST_PAGES, CacheEvent, EventFeed

log = logging.getLogger(__name__)

MOST_TAKEN = 256  # what the queue holds, each what one pass of the engine changed
BATCH_BLOCKS = 4096  # after which a batch goes out, and another begins
POLL_S = 0.05  # between looks at whether somebody asks for old batches


class EventSocket(Protocol):
    """Where batches go. One thread at a time."""

    def send(self, batch: Sequence[Message]) -> None:
        """Sends to whoever listens. Never waits for them."""
        ...

    def answer(self) -> None:
        """Sends old batches to those who have asked for some. Does not wait."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    events: list[CacheEvent]
    salts: dict[PageKey, str | None]
    from_start: bool  # they are all there is: what was told before is not to be counted on


class EventPublisher:
    """One cache's. `take` belongs to the engine's thread; `start` and `close` to whoever owns the server."""

    def __init__(self, cache: Cache, socket: EventSocket, *, most_pages: int = MOST_PAGES) -> None:
        self._cache = cache
        self._socket = socket
        self._most_pages = most_pages  # that wait with the feed
        self._translator = BlockTranslator(cache.spec)
        self._feed: EventFeed | None = None
        self._lost_pages = 0  # by the feed, as far as listeners were told
        self._queue: Queue[_Taken] = Queue(MOST_TAKEN)
        self._ending = Event()
        self._thread = Thread(target=self._run, name="stepwell-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends what was taken, and a last word, and closes the socket. After the engine has stopped."""
        self._ending.set()
        if self._thread.ident is None:
            self._socket.close()
        else:
            self._thread.join()

    def take(self) -> None:
        """Passes on what happened since the last call. Never waits; on the engine's thread, after each step."""
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
        self._queue.put_nowait(_Taken(events=events, salts=salts, from_start=from_start))  # nobody else puts, and it had room

    def _stop_listening(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _salt(self, digest: PageKey) -> str | None:
        namespace = self._cache.namespace_of(digest)
        return digest.hex() if namespace is None else salt_told(namespace)

    # ---- on its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._ending.is_set() and self._queue.empty()):
                self._send_next()
                self._socket.answer()
        except Exception:  # the worker boundary: what routers are told is no reason to stop serving
            log.exception("KV events have failed: no more are published until the server is started again")
        try:
            self._socket.send([AllBlocksCleared()])
        except Exception:
            log.exception("listeners could not be told to forget what they were told")
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


def salt_told(namespace: Namespace) -> str | None:
    """The salt that a router sees in requests of a namespace.

    Tenants are told apart by their keys, which it does not know. Theirs is a salt that no request has, so that nobody is believed
    to have what another tenant's blocks hold.
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
