"""Listens to a cache: what was reported as stored and not as evicted is what can be read in memory, page by page."""

from __future__ import annotations

import numpy as np

from stepwell import Cache, EventKind, Kind, Tier
from stepwell.base.prompt import page_keys
from stepwell.memory.arena import READY
from stepwell.tree.keys import keys_within
from stepwell.tree.node import ABSENT

STORED = (EventKind.PAGES_STORED, EventKind.CHECKPOINT_STORED)
PAGES = (EventKind.PAGES_STORED, EventKind.PAGES_EVICTED)


class FeedWatch:
    """What a listener knows, compared with what is true."""

    def __init__(self, cache: Cache) -> None:
        self._tree = cache._state.tree
        self.feed = cache.listen()
        self.known: set[tuple[Tier, bool, bytes]] = set()  # tier, whether pages or a checkpoint, key
        self.num_stored = self.num_evicted = 0

    def check(self) -> None:
        for event in self.feed.take():
            if event.kind is EventKind.PAGES_STORED and event.tier is not Tier.STORE:
                assert event.parent is not None
                expected = tuple(page_keys(event.parent, event.tokens, self._tree.page_bytes))
                assert event.keys == expected, f"keys of other tokens: {event}"
            if event.tier is not Tier.STORE:
                self._hear(event.kind in STORED, {(event.tier, event.kind in PAGES, key) for key in event.keys})
        assert not self.feed.lost_pages
        assert self.known == self._there(), "a listener knows something else than what is cached"

    def _hear(self, stored: bool, things: set[tuple[Tier, bool, bytes]]) -> None:
        assert not (things & self.known if stored else things - self.known), f"reported twice, or never there: {things}"
        self.known = self.known | things if stored else self.known - things
        self.num_stored += len(things) * stored
        self.num_evicted += len(things) * (not stored)

    def _there(self) -> set[tuple[Tier, bool, bytes]]:
        found = set()
        for node in self._tree.nodes():
            keys = keys_within(node, node.start, node.end, self._tree.page_bytes) if node.parent is not None else []
            for tier in self._tree.tiers:
                run = node.runs[tier]
                if run is not None:
                    state = self._tree.arenas[tier].state[Kind.PREFIX]
                    found |= {(tier, True, keys[at]) for at in np.flatnonzero(run.ids != ABSENT) if state[run.ids[at]] == READY}
                for page, checkpoint in (node.checkpoints or {}).items():
                    if checkpoint.ready_in(tier) is not None:
                        found.add((tier, False, keys[page - node.start - 1]))
        return found
