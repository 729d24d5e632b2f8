"""A router's picture of a cache, built from messages alone, compared with what the cache itself would resume from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from stepwell import Cache, Kind, Namespace, Tier
from stepwell.base.prompt import PageKey, pack, page_keys
from stepwell.memory.arena import READY
from stepwell.server.kv_events.blocks import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockTranslator,
    Message,
    block_hash,
)
from stepwell.tree.keys import keys_within
from stepwell.tree.node import ABSENT

IN_MEMORY = (MEDIA[Tier.DEVICE], MEDIA[Tier.HOST])


class Mirror:
    """Blocks by medium, as a router keeps them. Complains of messages that a router could make nothing of."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.blocks: dict[str, set[int]] = {medium: set() for medium in MEDIA.values()}
        self.salts: dict[int, str | None] = {}

    def hear(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if isinstance(message, AllBlocksCleared):
                for each in self.blocks.values():
                    each.clear()
            elif isinstance(message, BlockRemoved):
                assert set(message.hashes) <= self.blocks[message.medium], f"removed what was never stored: {message}"
                self.blocks[message.medium] -= set(message.hashes)
            else:
                self._hear_stored(message)

    def _hear_stored(self, message: BlockStored) -> None:
        assert message.block_tokens == self._page_tokens
        assert len(message.tokens) == len(message.hashes) * self._page_tokens * 4, f"other tokens than blocks: {message}"
        assert not self.blocks[message.medium] & set(message.hashes), f"stored twice: {message}"
        known = set().union(*self.blocks.values())
        assert message.parent is None or message.parent in known, f"stored before its parent: {message}"
        self.blocks[message.medium] |= set(message.hashes)
        self.salts |= dict.fromkeys(message.hashes, message.salt)

    def hit_pages(self, keys: Sequence[PageKey], media: Iterable[str] = IN_MEMORY) -> int:
        """How many blocks of a prompt a router believes to be there."""
        found = set().union(*(self.blocks[medium] for medium in media))
        return next((at for at, key in enumerate(keys) if block_hash(key) not in found), len(keys))


class MirrorWatch:
    """Listens to a cache as a server does, and compares."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._tree = cache._state.tree
        self.translator = BlockTranslator(cache.spec)
        self.mirror = Mirror(cache.spec.page_tokens)
        self.feed = cache.listen()
        self.num_told = self.num_believed = 0
        self._hear(self.translator.start_over(cache.cached_now(), {}))

    def _hear(self, messages: list[Message]) -> None:
        self.num_told += len(messages)
        self.mirror.hear(messages)

    def lose(self) -> None:
        """As when a feed has lost events."""
        self.feed.take()
        self._hear(self.translator.start_over(self.cache.cached_now(), {}))

    def hear(self) -> None:
        self._hear(self.translator.translate(self.feed.take(), {}))

    def check(self) -> None:
        """The messages describe the paths to restore points in the tiers that hold them, and nothing of what is gone is kept."""
        self.hear()
        expected = self._expected()
        for tier in (Tier.DEVICE, Tier.HOST):
            assert self.mirror.blocks[MEDIA[tier]] == expected[tier], f"a router believes something else of the {tier.label}"
        self.num_believed += sum(map(len, expected.values()))

    def check_prompt(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """A router that walks a prompt's blocks finds what a lookup finds.

        It finds more only where some pages are no restore points, and the prompt leaves a path that was reported.
        """
        spec, packed = self.cache.spec, pack(tokens)
        match = self.cache.lookup(tokens, namespace=namespace)
        size = spec.page_tokens * 4
        keys = list(page_keys(namespace.digest, packed[: spec.usable(len(tokens)) // spec.page_tokens * size], size))
        believed, found = self.mirror.hit_pages(keys), match.restore_tokens // spec.page_tokens
        assert believed >= found, f"a router believes in {believed} pages of {match}"
        assert believed == found or spec.free_step != spec.page_tokens, f"a router believes in {believed} pages of {match}"
        if believed > found:
            beyond = self._children_told(keys[believed - 1], namespace)
            assert beyond - {block_hash(key) for key in keys}, f"a router believes in {believed} pages of {match}, for nothing"

    def _children_told(self, key: PageKey, namespace: Namespace) -> set[int]:
        reported = set().union(*(self.mirror.blocks[medium] for medium in IN_MEMORY))
        children = set()
        for node in self._tree.nodes():
            if node.parent is not None and node.root.first == namespace.digest:
                path = keys_within(node, 0, node.end, self._tree.page_bytes)
                children |= {block_hash(after) for before, after in pairwise(path) if before == key}
        return children & reported

    def _expected(self) -> dict[Tier, set[int]]:
        """By brute force: every page on the way to a restore point that a lookup of that very path finds."""
        spec, tree = self.cache.spec, self._tree
        expected: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        for node in tree.nodes():
            if node.parent is None:
                continue
            above, path = node.parent, [node]
            while above.parent is not None:
                path.insert(0, above)
                above = above.parent
            tokens = np.frombuffer(b"".join(each.first + each.rest for each in path), "<i4").tolist() + [7] * spec.boundary_step
            match = self.cache.lookup(tokens, namespace=self.cache.namespace_of(PageKey(above.first)))
            for each in path:
                keys = keys_within(each, each.start, each.end, tree.page_bytes)
                for run in filter(None, each.runs):
                    state = tree.arenas[run.tier].state[Kind.PREFIX]
                    expected[run.tier] |= {
                        block_hash(keys[at])
                        for at in np.flatnonzero(run.ids != ABSENT)
                        if state[run.ids[at]] == READY and each.start + at < match.restore_tokens // spec.page_tokens
                    }
        return expected
