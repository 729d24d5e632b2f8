"""What a prefill server offers another server of a prompt: pages and the last checkpoint, held on the host while they are read.

All states of one restore point or nothing: the reader can resume there. A hand-out is a pin (`tiers/lifetime.py`) whose pages are
all on the host, and the tasks that would store them, so that they get the keys and stamps that a store would have. Nothing is
copied. It ends like any pin, when it is released or expires.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stepwell.base.ids import Kind, Tier
from stepwell.base.prompt import Namespace
from stepwell.base.tasks import PutCheckpoint, PutPages
from stepwell.memory.arena import READY
from stepwell.store.peer.listing import Listing, SmallValue, Value
from stepwell.store_tier.backup import checkpoint_task
from stepwell.tiers.lifetime import Pin
from stepwell.tiers.state import CacheState
from stepwell.transfer.store_worker import StoreWorker
from stepwell.tree.keys import path_keys
from stepwell.tree.match import Match, ids_of
from stepwell.tree.node import ABSENT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandOut:
    """Host pages of one prompt, for another server to read."""

    namespace: Namespace
    tokens: int  # the length of the prompt that can be resumed with them
    pages: PutPages
    checkpoint: PutCheckpoint | None  # None if the boundary needs none
    pin: Pin

    def since(self, tokens: int) -> HandOut:
        """The hand-out without the pages before this many tokens, which the reader has already. The pin still holds them."""
        first = tokens * len(self.pages.keys) // self.tokens
        assert first * self.tokens == tokens * len(self.pages.keys) and first < len(self.pages.keys), f"{tokens} of {self.tokens}"
        if not first:
            return self
        pages = PutPages(parent=self.pages.keys[first - 1], first=first, keys=self.pages.keys[first:], ids=self.pages.ids[first:])
        return replace(self, pages=pages)


def is_on_host(state: CacheState, match: Match) -> bool:
    """Whether the host has everything that a match would resume with."""
    if Tier.HOST not in state.tree.arenas or not match.restore_tokens:
        return False
    ids = ids_of(match.path, Tier.HOST, match.restore_tokens // state.spec.page_tokens)
    ready = (ids != ABSENT) & (state.arena(Tier.HOST).state[Kind.PREFIX][ids] == READY)
    return bool(ready.all()) and (match.checkpoint is None or match.checkpoint.ready_in(Tier.HOST) is not None)


def hand_out(state: CacheState, match: Match, pin: Pin) -> HandOut:
    """The content held by the pin of a match, as store tasks. The host must have all of it."""
    upto = match.restore_tokens // state.spec.page_tokens
    keys = path_keys(match.namespace.digest, match.path, match.packed, known=upto, upto=upto, page_bytes=state.tree.page_bytes)
    (ids,) = (ids for tier, ids in pin.pages if tier is Tier.HOST)
    assert len(ids) == upto == len(keys), f"{len(ids)} pages and {len(keys)} keys of {upto}"
    checkpoint = None
    if pin.residency is not None:
        node = pin.residency.checkpoint.node
        assert node is not None and pin.residency.tier is Tier.HOST, "the checkpoint of a match is in the tree"
        checkpoint = checkpoint_task(state, node, pin.residency)
    return HandOut(
        namespace=match.namespace,
        tokens=match.restore_tokens,
        pages=PutPages(parent=None, first=0, keys=keys, ids=ids),
        checkpoint=checkpoint,
        pin=pin,
    )


def listing_of(out: HandOut, worker: StoreWorker, block: memoryview, *, address: int, session: str) -> Listing:
    """The hand-out value by value, with the stamps that `worker` makes. Reads all of it: use a thread of its own.

    `block` is the host's memory, which begins at `address` for readers that use `session`.
    """
    start = _address(block)
    tasks: list[PutPages | PutCheckpoint] = [out.pages] if out.checkpoint is None else [out.pages, out.checkpoint]
    sealed = [worker.seal(out.namespace, task) for task in tasks]
    values = [
        Value(write.key, write.stamp, address + _address(write.data) - start if write.data.nbytes else 0, len(write.data))
        for each in sealed
        for write in each.writes
    ]
    manifests = [each.manifest for each in sealed if each.manifest is not None]
    small = [SmallValue(manifest.key, manifest.stamp, bytes(manifest.data)) for manifest in manifests]
    return Listing(space=worker.space(out.namespace).digest, session=session, values=values, small=small)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])
