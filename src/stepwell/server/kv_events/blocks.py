"""Translates a cache's feed into messages for routers: which blocks are cached, so that a prompt with those blocks can be resumed
here.

    pages        0 ... 1 ... 2 ... 3 ... 4 ... 5 ... 6
    in memory    x     x     x     x     x     x     x
    checkpoint               o           o
    published    x     x     x     x     x                  5 and 6 lead to no restore point: published when a checkpoint comes

A page is published while its whole path can be read, in any tier, and there is a restore point on it or below it. Models that
need only prefix pages have a restore point on every page, or every page of a period. When a checkpoint is evicted, the pages
behind the previous restore point are published as removed although they are still cached; another checkpoint publishes them
again.

Messages cannot express one case: a prompt that leaves a published path between two restore points has the blocks up to there, but
resumes at the earlier restore point. A router may then overestimate the hit by less than the distance of two restore points.

Pure: events in, messages out. Keeps the tokens of pages, because a page may be published long after it was stored. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

from stepwell.base.ids import Tier
from stepwell.base.prompt import TOKEN_BYTES, PageKey
from stepwell.base.spec import ModelSpec
from stepwell.tree.feed import MOST_IN_STORE, CacheEvent, EventKind

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORE: "STORAGE"}
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A chain of blocks that lead to a restore point."""

    hashes: tuple[int, ...]
    parent: int | None  # the hash of the block before them; None at the beginning of a prompt
    tokens: bytes  # of all of them, packed (`base/prompt.py`)
    block_tokens: int
    medium: str
    salt: str | None  # of requests that can use these blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    hashes: tuple[int, ...]
    medium: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Invalidates everything published before."""


Message: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def block_hash(key: PageKey) -> int:
    """The low 64 bits of a page's key, as vLLM shortens its own."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


MOST_BLOCKS = 1024  # in one message
_BITS = {tier: 1 << tier for tier in MEDIA}
_STORED = (EventKind.PAGES_STORED, EventKind.CHECKPOINT_STORED)
_OF_PAGES = (EventKind.PAGES_STORED, EventKind.PAGES_EVICTED)
_number = attrgetter("number")


class _Page:
    """A page that is cached, or has a cached descendant. `tiers` and `published` are bit sets of tiers."""

    __slots__ = ("children", "key", "live", "num_live", "number", "parent", "published", "salt", "tiers", "tokens", "visible")

    def __init__(self, key: PageKey, number: int) -> None:
        self.key, self.number = key, number
        self.parent: _Page | None = None  # also while unknown
        self.children: dict[PageKey, _Page] = {}
        self.tokens = b""
        self.salt: str | None = None  # of first pages and visible pages
        self.tiers = self.published = 0
        self.num_live = 0  # live children
        self.live = False  # cached, with a restore point on it or below it
        self.visible = False  # live with its whole path


class BlockTranslator:
    """Follows one cache. `salts` maps the digest of a namespace to the salt of its requests."""

    def __init__(self, spec: ModelSpec) -> None:
        self._page_tokens, self._free_step = spec.page_tokens, spec.free_step
        self._pages: dict[PageKey, _Page] = {}
        self._checkpoints: dict[PageKey, int] = {}  # by the key of the last page before them: the tiers they are in
        self._in_store: OrderedDict[tuple[bool, PageKey], None] = OrderedDict()  # what the feed remembers, or less
        self._touched: dict[PageKey, _Page] = {}  # since messages were last made

    def translate(self, events: Iterable[CacheEvent], salts: Mapping[PageKey, str | None]) -> list[Message]:
        """The combined effect of the events since the last call: removals first, then new blocks, parents before children."""
        for event in events:
            if event.tier is Tier.STORE:
                self._store_changed(event)
            elif event.kind is EventKind.PAGES_STORED:
                self._pages_stored(event, salts)
            else:
                for key in event.keys:
                    self._change(key, event.tier, pages=event.kind in _OF_PAGES, stored=event.kind in _STORED)
        messages = self._messages()
        self._drop_unused_pages()
        return messages

    def start_over(self, events: Iterable[CacheEvent], salts: Mapping[PageKey, str | None]) -> list[Message]:
        """Clears everything, and continues with what is cached now. Pages that are only in a store are not published again."""
        for each in (self._pages, self._checkpoints, self._in_store, self._touched):
            each.clear()
        return [AllBlocksCleared(), *self.translate(events, salts)]

    @property
    def num_pages(self) -> int:
        """Pages it keeps."""
        return len(self._pages)

    # ---- events of the feed ----------------------------------------------------------------------

    def _pages_stored(self, event: CacheEvent, salts: Mapping[PageKey, str | None]) -> None:
        assert event.parent is not None, f"pages stored in memory have a parent: {event}"
        size = self._page_tokens * TOKEN_BYTES
        parent = self._page(event.parent, event.first - 1) if event.first else None
        for at, key in enumerate(event.keys):
            page = self._page(key, event.first + at)
            if parent is not None and page.parent is None:
                page.parent = parent
                parent.children[key] = page
            elif parent is None:
                page.salt = salts.get(event.parent, event.parent.hex())  # an unknown namespace: a salt that no request has
            page.tokens = event.tokens[at * size : (at + 1) * size]
            page.tiers |= _BITS[event.tier] | (_BITS[Tier.STORE] if (True, key) in self._in_store else 0)
            self._refresh(page)
            parent = page

    def _store_changed(self, event: CacheEvent) -> None:
        """Remembers the most recent pages stored in a store, as the feed does."""
        pages, stored = event.kind in _OF_PAGES, event.kind in _STORED
        for key in event.keys:
            self._in_store.pop((pages, key), None)
            if stored:
                self._in_store[pages, key] = None
            self._change(key, Tier.STORE, pages=pages, stored=stored)
        while len(self._in_store) > MOST_IN_STORE:
            (pages, key), _ = self._in_store.popitem(last=False)
            self._change(key, Tier.STORE, pages=pages, stored=False)

    def _change(self, key: PageKey, tier: Tier, *, pages: bool, stored: bool) -> None:
        page, bit = self._pages.get(key), _BITS[tier]
        if pages and page is not None and page.tokens:
            page.tiers = page.tiers | bit if stored else page.tiers & ~bit
        elif not pages:
            tiers = self._checkpoints.pop(key, 0)
            tiers = tiers | bit if stored else tiers & ~bit
            if tiers:
                self._checkpoints[key] = tiers
        if page is not None:
            self._refresh(page)

    # ---- what follows -----------------------------------------------------------------------------

    def _page(self, key: PageKey, number: int) -> _Page:
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _Page(key, number)
        return page

    def _refresh(self, page: _Page | None) -> None:
        """Updates a changed page and those of its ancestors that are affected."""
        while page is not None:
            self._touched[page.key] = page
            live = page.tiers != 0 and (page.num_live > 0 or self._restores(page))
            if live == page.live:
                return
            page.live = live
            if page.parent is not None:
                page.parent.num_live += 1 if live else -1
            page = page.parent

    def _restores(self, page: _Page) -> bool:
        """Whether there is a restore point at the end of this page."""
        boundary = (page.number + 1) * self._page_tokens
        return page.key in self._checkpoints or (self._free_step is not None and boundary % self._free_step == 0)

    def _messages(self) -> list[Message]:
        changed = self._touched | self._spread()
        gone: dict[Tier, list[_Page]] = {tier: [] for tier in MEDIA}
        new: dict[Tier, list[_Page]] = {tier: [] for tier in MEDIA}
        for page in sorted(changed.values(), key=_number):
            wanted = page.tiers if page.visible else 0
            for tier, bit in _BITS.items():
                if page.published & ~wanted & bit:
                    gone[tier].append(page)
                elif wanted & ~page.published & bit:
                    new[tier].append(page)
            page.published = wanted
        removed = (_removed(tier, pages[::-1]) for tier, pages in gone.items())
        return [*chain.from_iterable(removed), *self._stored(new)]

    def _spread(self) -> dict[PageKey, _Page]:
        """Finds the pages whose visibility changed, from the changed pages downwards."""
        flipped: dict[PageKey, _Page] = {}
        for changed in sorted(self._touched.values(), key=_number):
            stack = [changed]
            while stack:
                page = stack.pop()
                parent = page.parent
                visible = page.live and (page.number == 0 or (parent is not None and parent.visible))
                if visible == page.visible:
                    continue
                page.visible = visible
                if visible and parent is not None:
                    page.salt = parent.salt
                flipped[page.key] = page
                stack += page.children.values()
        return flipped

    def _stored(self, new: Mapping[Tier, list[_Page]]) -> Iterable[Message]:
        chains = [(tier, pages) for tier, found in new.items() for pages in _chains(found)]
        for tier, pages in sorted(chains, key=lambda each: each[1][0].number):  # a parent may be in another tier
            first = pages[0]
            yield BlockStored(
                hashes=tuple(block_hash(page.key) for page in pages),
                parent=block_hash(first.parent.key) if first.parent is not None else None,
                tokens=b"".join(page.tokens for page in pages),
                block_tokens=self._page_tokens,
                medium=MEDIA[tier],
                salt=first.salt,
            )

    def _drop_unused_pages(self) -> None:
        """Drops pages that are in no tier and have no children."""
        for touched in sorted(self._touched.values(), key=_number, reverse=True):
            page: _Page | None = touched
            while page is not None and not page.tiers and not page.children and self._pages.pop(page.key, None) is not None:
                if page.parent is not None:
                    page.parent.children.pop(page.key, None)
                page = page.parent
        self._touched.clear()


def _chains(pages: Iterable[_Page]) -> list[list[_Page]]:
    """Splits pages, sorted parents first, into runs in which each page is the child of the one before."""
    chains: list[list[_Page]] = []
    by_end: dict[PageKey, list[_Page]] = {}
    for page in pages:
        run = by_end.pop(page.parent.key, None) if page.parent is not None else None
        if run is None or len(run) == MOST_BLOCKS:
            run = []
            chains.append(run)
        run.append(page)
        by_end[page.key] = run
    return chains


def _removed(tier: Tier, pages: list[_Page]) -> Iterable[Message]:
    for start in range(0, len(pages), MOST_BLOCKS):
        hashes = tuple(block_hash(page.key) for page in pages[start : start + MOST_BLOCKS])
        yield BlockRemoved(hashes=hashes, medium=MEDIA[tier])
