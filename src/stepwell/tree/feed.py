"""What becomes of cached pages and checkpoints, as a feed: stored in a tier, evicted from one, under the keys that name them.

    cache.listen()  ->  EventFeed       from now on
    feed.take()     ->  events since the last call, oldest first
    feed.close()

For routers and engines that tell others what is cached here. While nobody listens it costs one look at an empty list. A feed
is bounded: who does not take loses the oldest events, and `lost_pages` says how many. Decides nothing, and holds no page.

Device and host are told of exactly: what was stored is evicted once. A store evicts without telling, so that its evictions are
told when somebody asks it for the value and does not get it. For that the latest keys are remembered that were told as stored
there, `MOST_IN_STORE` of them. When a store is detached, these are told as evicted. What a store has of a namespace that was
cleared is of no use, and is told of neither way.
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

MOST_PAGES = 65_536  # that one feed holds for its listener: some 20 MB of keys and tokens
MOST_IN_STORE = 262_144  # pages and checkpoints that are remembered as told of in a store: some 50 MB


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
    keys: tuple[PageKey, ...]  # of each page; of a checkpoint, that of the last page before its boundary
    first: int = 0  # the number of the first of them on its path. This and what follows: of pages stored in memory
    parent: PageKey | None = None  # the key of the page before them: the namespace's digest where there is none
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
        self.lost_pages = 0  # that were told of and not taken in time

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
        """Hears nothing more. Raises WrongThread."""
        self._check("EventFeed.close")
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)


class Feeds:
    """Everybody who listens to one tree. False while nobody does: what tells asks that first."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._open: list[EventFeed] = []
        self._in_store: OrderedDict[tuple[bool, PageKey], None] = OrderedDict()  # whether pages or a checkpoint, oldest first

    def __bool__(self) -> bool:
        return bool(self._open)

    def listen(self, check: Callable[[str], None], *, most_pages: int) -> EventFeed:
        """Raises ConfigError."""
        if most_pages < 1:
            raise ConfigError(f"a feed holds 1 page or more for its listener, got most_pages={most_pages}")
        feed = EventFeed(self._close, check, most_pages=most_pages)
        self._open.append(feed)
        return feed

    def pages_stored(self, node: Node, tier: Tier, which: npt.NDArray[np.bool_]) -> None:
        """Pages of a node that can be read in a tier from now on."""
        assert node.parent is not None
        end_key(node, self._page_bytes)  # so that the node has its keys, now and when they leave
        size, tokens = self._page_bytes, node.first + node.rest
        for start, end in _stretches(which):
            parent = _keys(node, start - 1, start)[0] if start else end_key(node.parent, size)
            self._tell(
                CacheEvent(
                    kind=EventKind.PAGES_STORED, tier=tier, keys=_keys(node, start, end), first=node.start + start,
                    parent=parent, tokens=tokens[start * size : end * size],
                )
            )  # fmt: skip

    def pages_evicted(self, node: Node, tier: Tier, which: npt.NDArray[np.bool_]) -> None:
        """Pages that could be read, and leave a tier. Called before they do. Those without keys were never told of."""
        for start, end in _stretches(which[: len(node.keys) // KEY_BYTES]):
            self._tell(CacheEvent(kind=EventKind.PAGES_EVICTED, tier=tier, keys=_keys(node, start, end)))

    def checkpoint(self, kind: EventKind, node: Node, residency: Residency) -> None:
        """A checkpoint that can be resumed from in a tier from now on, or can no longer."""
        at = residency.checkpoint.page - node.start
        if kind is EventKind.CHECKPOINT_STORED:
            end_key(node, self._page_bytes)
        if len(node.keys) >= at * KEY_BYTES:
            self._tell(CacheEvent(kind=kind, tier=residency.tier, keys=_keys(node, at - 1, at)))

    def store(self, kind: EventKind, keys: Iterable[PageKey]) -> None:
        """What a store says it has, or turns out not to have."""
        told = tuple(keys)
        is_pages, is_stored = kind in _OF_PAGES, kind in _STORED
        for key in told:
            self._in_store.pop((is_pages, key), None)
            if is_stored:
                self._in_store[is_pages, key] = None
        while len(self._in_store) > MOST_IN_STORE:
            self._in_store.popitem(last=False)
        if told:
            self._tell(CacheEvent(kind=kind, tier=Tier.STORE, keys=told))

    def store_lacks(self, kind: EventKind, keys: Iterable[PageKey]) -> None:
        """What a store was asked for and has not: an eviction if it was told as stored, and nothing new otherwise."""
        self.store(kind, [key for key in keys if (kind in _OF_PAGES, key) in self._in_store])

    def store_left(self) -> None:
        """No store is attached any more: what it was told to have can not be had from it."""
        for kind in (EventKind.CHECKPOINT_EVICTED, EventKind.PAGES_EVICTED):
            self.store(kind, [key for is_pages, key in self._in_store if is_pages == (kind in _OF_PAGES)])

    def _close(self, feed: EventFeed) -> None:
        self._open.remove(feed)
        if not self._open:
            self._in_store.clear()

    def _tell(self, event: CacheEvent) -> None:
        for feed in self._open:
            feed.add(event)


def _keys(node: Node, start: int, end: int) -> tuple[PageKey, ...]:
    return tuple(PageKey(node.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(start, end))


def _stretches(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where neighbours are true: `[start, end)` of each run of them."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], which, [False])).view(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
