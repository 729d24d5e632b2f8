"""The cache's feed as vLLM's own KV events: blocks stored and removed, by group and medium (CPU for host memory, STORAGE for the
store).

Blocks have vLLM's hashes, so that a router recognizes a block in two media. Pages are published as blocks of the groups with full
attention, a checkpoint as the last block before its boundary of the groups with windows or state. After a reset of the cache, or
if the feed dropped events, an event clears all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from stepwell.base.errors import BadTokens
from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import unpack
from stepwell.connectors.vllm.groups import Group
from stepwell.connectors.vllm.requests import PageName, PageNames, Path
from stepwell.connectors.vllm.scheduler_side import TrackedRequest
from stepwell.tree.feed import CacheEvent, EventFeed, EventKind

MEDIA = {Tier.HOST: MEDIUM_CPU, Tier.STORE: MEDIUM_STORAGE}
OF_PAGES = (EventKind.PAGES_STORED, EventKind.PAGES_EVICTED)
STORED = (EventKind.PAGES_STORED, EventKind.CHECKPOINT_STORED)


class BlockEvents:
    """Translates one cache's feed. One thread, the scheduler's."""

    def __init__(self, feed: EventFeed, groups: tuple[Group, ...], specs: list[Any], names: PageNames) -> None:
        """`specs` are vLLM's, one per group."""
        self._feed = feed
        self._groups = groups
        self._specs = specs
        self._names = names
        self._paths: dict[str, Path] = {}  # by open request
        self._lost_pages = 0  # the feed's losses that were handled
        self._was_reset = False

    def arrived(self, request: Any, seen: TrackedRequest | None) -> None:
        """A request is new, or continues under another namespace."""
        self.finished(request)
        if seen is None or seen.namespace is None:
            return
        lora = request.lora_request
        self._paths[request.request_id] = Path(
            namespace=seen.namespace.digest,
            tokens=seen.tokens,
            lora_id=lora.lora_int_id if lora is not None else None,
            lora_name=lora.lora_name if lora is not None else None,
        )
        self.grown(request)

    def grown(self, request: Any) -> None:
        """The request may have more tokens. A request with tokens that cannot be cached is published no further."""
        path = self._paths.get(request.request_id)
        try:
            if path is not None:
                self._names.note(path, request.all_token_ids, request.block_hashes)
        except BadTokens:
            self.finished(request)

    def finished(self, request: Any) -> None:
        path = self._paths.pop(request.request_id, None)
        if path is not None:
            self._names.release(path)

    def reset(self) -> None:
        """Everything published as stored is gone, in all tiers."""
        self._feed.take()
        self._was_reset = True

    def take(self) -> Iterator[KVCacheEvent]:
        """The events since the last call, as vLLM's."""
        events = self._feed.take()
        if self._was_reset or self._feed.lost_pages > self._lost_pages:  # the oldest events were dropped
            self._was_reset, self._lost_pages = False, self._feed.lost_pages
            self._names.clear_held()
            yield AllBlocksCleared()
        for event in events:
            groups = [group for group in self._groups if (group.kind is Kind.PREFIX) == (event.kind in OF_PAGES)]
            message = self._stored if event.kind in STORED else self._removed
            for names in self._stretches(event):
                yield from (message(event, group, names) for group in groups)

    def close(self) -> None:
        self._feed.close()

    def _stretches(self, event: CacheEvent) -> list[list[PageName]]:
        """The known pages of an event as chains; an unknown page ends a chain."""
        look_up = self._names.get
        if event.tier is Tier.HOST and event.kind in OF_PAGES:
            look_up = self._names.stored if event.kind is EventKind.PAGES_STORED else self._names.evicted
        stretches: list[list[PageName]] = []
        for name in filter(None, map(look_up, event.keys)):
            if stretches and stretches[-1][-1].hashes[-1] == name.parent:
                stretches[-1].append(name)
            else:
                stretches.append([name])
        return stretches

    def _stored(self, event: CacheEvent, group: Group, names: list[PageName]) -> BlockStored:
        hashes, tokens = self._hashes(group, names), b"".join(name.tokens for name in names)
        parent = names[0].parent
        if event.kind not in OF_PAGES:
            (name,) = names
            skipped = len(hashes) - 1
            parent = hashes[-2] if skipped else parent
            hashes = hashes[-1:]
            tokens = name.tokens[len(name.tokens) * skipped // (skipped + 1) :]
        spec = self._specs[group.number]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes],
            parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
            token_ids=unpack(tokens).tolist(), block_size=group.block_tokens, medium=MEDIA[event.tier],
            lora_id=names[0].lora_id, lora_name=names[0].lora_name, group_idx=group.number,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        )  # fmt: skip

    def _removed(self, event: CacheEvent, group: Group, names: list[PageName]) -> BlockRemoved:
        hashes = self._hashes(group, names)
        if event.kind not in OF_PAGES:
            hashes = hashes[-1:]
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes], medium=MEDIA[event.tier], group_idx=group.number
        )

    def _hashes(self, group: Group, names: list[PageName]) -> list[Any]:
        """The hashes of a group's blocks: a block has the hash of its last hash block."""
        step = group.block_tokens // self._names.hash_tokens
        return [each for name in names for each in name.hashes[step - 1 :: step]]
