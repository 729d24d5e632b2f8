"""A feed of events about cached pages and checkpoints: stored in a tier, or evicted from one. Keys name them.

    cache.listen()  ->  EventFeed       from now on
    feed.take()     ->  events since the last call, oldest first
    feed.close()

For routers, and for engines that publish what is cached here. Without a listener the cost is one check of an empty list. A feed
is bounded: a listener that does not take its events loses the oldest ones, and `lost_pages` counts them. Holds no pages.

Events about device and host are exact: everything stored is reported as evicted once. A store does not report its evictions, so
an eviction is reported when a value is requested from the store and is missing. For this, the latest `MOST_IN_STORE` keys that
were reported as stored there are remembered; when the store is detached, they are reported as evicted. Values in a store under a
namespace that was cleared are useless, and are not reported at all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.prompt import KEY_BYTES, PageKey
from stepwell.tree.keys import end_key
from stepwell.tree.node import Node, Residency

MOST_PAGES = 65_536  # that one feed holds for its listener: about 20 MB of keys and tokens
MOST_IN_STORE = 262_144  # pages and checkpoints that are remembered as reported in a store: about 50 MB


class EventKind(Enum):
    PAGES_STORED = "pages stored"
    PAGES_EVICTED = "pages evicted"
    CHECKPOINT_STORED = "checkpoint stored"
    CHECKPOINT_EVICTED = "checkpoint evicted"


_OF_PAGES = (EventKind.PAGES_STORED, EventKind.PAGES_EVICTED)
_STORED = (EventKind.PAGES_STORED, EventKind.CHECKPOINT_STORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """Neighbouring pages of one path, or the checkpoint on one of them, in one tier."""

    kind: EventKind
    tier: Tier
    keys: tuple[PageKey, ...]  # of each page; for a checkpoint, of the last page before its boundary
    # The following fields are set for pages stored in memory.
    first: int = 0  # the index of the first page on its path
    parent: PageKey | None = None  # the key of the page before the first; the namespace's digest if there is none
    tokens: bytes = b""  # packed (`base/prompt.py`)


class EventFeed:
    """Events for one listener. On the cache's thread."""

    def __init__(self, on_close: Callable[[EventFeed], None], check: Callable[[str], None], *, most_pages: int) -> None:
        """`check` raises WrongThread on any thread but the cache's."""
        self._on_close: Callable[[EventFeed], None] | None = on_close
        self._check = check
        self._most_pages = most_pages
        self._events: deque[CacheEvent] = deque()
        self._num_pages = 0
        self.lost_pages = 0  # pages of events that were dropped because they were not taken in time

    def add(self, event: CacheEvent) -> None:
        self._events.append(event)
        self._num_pages += len(event.keys)
        while self._num_pages > self._most_pages:
            lost = len(self._events.popleft().keys)
            self._num_pages -= lost
            self.lost_pages += lost

    def take(self) -> list[CacheEvent]:
        """Everything since the last call. Raises WrongThread."""
        self._check("EventFeed.take")
        events = list(self._events)
        self._events.clear()
        self._num_pages = 0
        return events

    def close(self) -> None:
        """Ends the feed. Raises WrongThread."""
        self._check("EventFeed.close")
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)


class Feeds:
    """The open feeds of one tree. False if there are none, which callers check before they build events."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._open: list[EventFeed] = []
        self._in_store: OrderedDict[tuple[bool, PageKey], None] = OrderedDict()  # (whether it is a page, key), oldest first

    def __bool__(self) -> bool:
        return bool(self._open)

    def listen(self, check: Callable[[str], None], *, most_pages: int) -> EventFeed:
        """Opens a feed. Raises ConfigError."""
        if most_pages < 1:
            raise ConfigError(f"a feed holds 1 page or more for its listener, got most_pages={most_pages}")
        feed = EventFeed(self._close, check, most_pages=most_pages)
        self._open.append(feed)
        return feed

    def pages_stored(self, node: Node, tier: Tier, which: npt.NDArray[np.bool_]) -> None:
        """Reports pages of a node that became readable in a tier."""
        assert node.parent is not None
        end_key(node, self._page_bytes)  # computes the node's keys, also for the eviction event
        size, tokens = self._page_bytes, node.first + node.rest
        for start, end in _stretches(which):
            parent = _keys(node, start - 1, start)[0] if start else end_key(node.parent, size)
            self._publish(
                CacheEvent(
                    kind=EventKind.PAGES_STORED, tier=tier, keys=_keys(node, start, end), first=node.start + start,
                    parent=parent, tokens=tokens[start * size : end * size],
                )
            )  # fmt: skip

    def pages_evicted(self, node: Node, tier: Tier, which: npt.NDArray[np.bool_]) -> None:
        """Reports readable pages that leave a tier, before they do. Pages without keys were never reported as stored."""
        for start, end in _stretches(which[: len(node.keys) // KEY_BYTES]):
            self._publish(CacheEvent(kind=EventKind.PAGES_EVICTED, tier=tier, keys=_keys(node, start, end)))

    def checkpoint(self, kind: EventKind, node: Node, residency: Residency) -> None:
        """Reports that a checkpoint became, or is no longer, resumable in a tier."""
        at = residency.checkpoint.page - node.start
        if kind is EventKind.CHECKPOINT_STORED:
            end_key(node, self._page_bytes)
        if len(node.keys) >= at * KEY_BYTES:
            self._publish(CacheEvent(kind=kind, tier=residency.tier, keys=_keys(node, at - 1, at)))

    def store(self, kind: EventKind, keys: Iterable[PageKey]) -> None:
        """Reports values that a store has, or turned out not to have."""
        sent = tuple(keys)
        is_pages, is_stored = kind in _OF_PAGES, kind in _STORED
        for key in sent:
            self._in_store.pop((is_pages, key), None)
            if is_stored:
                self._in_store[is_pages, key] = None
        while len(self._in_store) > MOST_IN_STORE:
            self._in_store.popitem(last=False)
        if sent:
            self._publish(CacheEvent(kind=kind, tier=Tier.STORE, keys=sent))

    def store_lacks(self, kind: EventKind, keys: Iterable[PageKey]) -> None:
        """Reports requested values that a store lacks as evicted, if they were reported as stored."""
        self.store(kind, [key for key in keys if (kind in _OF_PAGES, key) in self._in_store])

    def store_detached(self) -> None:
        """The store was detached: reports everything in it as evicted."""
        for kind in (EventKind.CHECKPOINT_EVICTED, EventKind.PAGES_EVICTED):
            self.store(kind, [key for is_pages, key in self._in_store if is_pages == (kind in _OF_PAGES)])

    def _close(self, feed: EventFeed) -> None:
        self._open.remove(feed)
        if not self._open:
            self._in_store.clear()

    def _publish(self, event: CacheEvent) -> None:
        for feed in self._open:
            feed.add(event)


def _keys(node: Node, start: int, end: int) -> tuple[PageKey, ...]:
    return tuple(PageKey(node.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(start, end))


def _stretches(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The `[start, end)` of each run of true elements."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], which, [False])).view(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
