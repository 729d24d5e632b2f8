"""SGLang's pages as verified values: what exists, which prefix lengths every pool can restore, reading and writing.

The pages of a prompt are a chain of values, each the parent of the next; a page of another pool stands on the KV page it
belongs to. So stores evict a prompt from its end, and what is left can be used. Knows no class of SGLang's. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stepwell.base.prompt import Namespace
from stepwell.base.tasks import ItemStatus
from stepwell.connectors.sglang.host_pool import ANCHOR, HostPool
from stepwell.connectors.sglang.prefix_lengths import Found, Want, leading, restorable
from stepwell.connectors.sglang.ranks import Ranks
from stepwell.store.api import NO_PARENT, Space
from stepwell.verified.runs import ReadRuns, WriteRuns
from stepwell.verified.store import VerifiedStore


class Pages:
    """All pools of one rank over one store."""

    def __init__(self, store: VerifiedStore, ranks: Ranks, *, model: str, identity: str | None, version: str) -> None:
        self._store, self._ranks, self._model, self._identity, self._version = store, ranks, model, identity, version
        self._pools: dict[str, HostPool] = {}
        self._space: Space | None = None

    def learn(self, name: str, pool: Any) -> HostPool:
        """Takes note of a pool, or of a newer one of the same name. Raises ConfigError for one whose pages cannot be found."""
        known = self._pools[name] = HostPool(name, pool, self._ranks, self._version)
        if name == ANCHOR:
            self._space = self._space_of(known)
        return known

    def pool(self, name: str) -> HostPool:
        return self._pools[name]

    @property
    def space(self) -> Space:
        assert self._space is not None, "SGLang registers its anchor pool before it asks for anything"
        return self._space

    def leading(self, pool: str, keys: Sequence[str]) -> int:
        """How many pages are there without a gap."""
        return leading(self._there(self._pools[pool], keys))

    def find(self, keys: Sequence[str], wants: Sequence[Want]) -> Found:
        """The lengths that are legal for all pools at once: never a minimum of what each of them would allow."""
        length = self.leading(ANCHOR, keys)
        there = {want.pool: self.there(want.pool, keys[:length]) for want in wants}
        return restorable({**there, ANCHOR: [True] * length}, [Want(ANCHOR, None), *wants])

    def there(self, pool: str, keys: Sequence[str]) -> list[bool]:
        """Which pages are stored."""
        return self._there(self._pools[pool], keys)

    def read(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Fills the pages that verify; which of them did."""
        known = self._pools[pool]
        if not known.has_bytes:
            return [True] * len(keys)
        if host_indices is None or len(host_indices) != len(keys) * known.page_size:
            return [False] * len(keys)
        names = [name for key in keys for name in known.keys(key)]
        reads = [ReadRuns(name, runs) for name, runs in zip(names, known.runs(host_indices), strict=True)]
        return self._by_page(known, self._store.read(self.space, reads))

    def write(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None, before: Sequence[str]) -> list[bool]:
        """Keeps pages that come after the pages `before`; which of them are there now."""
        known = self._pools[pool]
        if not known.has_bytes:
            return [True] * len(keys)
        if host_indices is None or len(host_indices) != len(keys) * known.page_size:
            return [False] * len(keys)
        runs, each, writes = known.runs(host_indices), known.values_per_page, []
        for at, key in enumerate(keys):
            parent, depth = self._stands_on(known, keys, at, before)
            for part, name in enumerate(known.keys(key)):
                writes.append(WriteRuns(name, runs[at * each + part], parent, depth + part))
                parent = name
        return self._by_page(known, self._store.write(self.space, writes))

    def clear(self) -> int:
        """Forgets everything stored in this model's space. Raises StoreError where the store cannot."""
        return self._store.clear(self.space)

    def stats(self) -> Mapping[str, int]:
        return self._store.stats()

    # ---- inside -----------------------------------------------------------------------------------

    def _space_of(self, anchor: HostPool) -> Space:
        facts = f"hicache-1 {anchor.facts}"
        namespace = Namespace(model=self._model, layout=facts, shard=anchor.shard, adapter=self._identity)
        return self._store.space(namespace.digest, label=f"{self._model} [sglang, {anchor.shard}]")

    def _there(self, pool: HostPool, keys: Sequence[str]) -> list[bool]:
        if not pool.has_bytes:
            return [True] * len(keys)
        names = [name for key in keys for name in pool.keys(key)]
        found, each = self._store.contains(self.space, names), pool.values_per_page
        return found if each == 1 else [all(found[at : at + each]) for at in range(0, len(found), each)]

    def _stands_on(self, pool: HostPool, keys: Sequence[str], at: int, before: Sequence[str]) -> tuple[bytes, int]:
        """The parent of a page, and how many values are below it."""
        anchor, page = self._pools[ANCHOR], len(before) + at
        if pool is not anchor and anchor.has_bytes:
            return anchor.last_key(keys[at]), (page + 1) * anchor.values_per_page
        previous = keys[at - 1] if at else before[-1] if before else None
        return (NO_PARENT if previous is None else pool.last_key(previous)), page * pool.values_per_page

    def _by_page(self, pool: HostPool, statuses: Sequence[ItemStatus]) -> list[bool]:
        each, good = pool.values_per_page, [status is ItemStatus.OK for status in statuses]
        return good if each == 1 else [all(good[at : at + each]) for at in range(0, len(good), each)]
