"""SGLang's pages as verified values: which exist, which prefix lengths every pool can restore, reading and writing.

The pages of a prompt form a chain of values; a page of another pool is the child of the KV page it belongs to. Stores therefore
evict a prompt from its end, and what is left can be used. The legal lengths are those at which every pool has what it needs:

kv      x x x x x x . x      all pages of the prefix               legal: 1 to 6
swa     . . x x . x x .      those of the last `window`, here 2    legal: 4, 7
mamba   . . . x . x . .      the last one                          legal: 4, 6; so 4 for all three

Knows no class of SGLang's. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stepwell.base.prompt import Namespace
from stepwell.base.tasks import ItemStatus
from stepwell.connectors.sglang.host_pool import ANCHOR, HostPool
from stepwell.connectors.sglang.settings import Ranks
from stepwell.store.api import NO_PARENT, Space
from stepwell.verified.runs import ReadRuns, WriteRuns
from stepwell.verified.store import VerifiedStore


class Want(NamedTuple):
    """The pages of a prefix that a pool needs: all, or the last `window`."""

    pool: str
    window: int | None


class Found(NamedTuple):
    """The available part of a prompt."""

    pages: dict[str, int]  # longest legal length of each pool alone; absent for none
    restorable: list[int]  # prefix lengths, in pages, that are legal for all pools


def restorable(there: Mapping[str, Sequence[bool]], wants: Sequence[Want]) -> Found:
    """The lengths that are legal for all pools at once, which is not the minimum over the pools."""
    pages: dict[str, int] = {}
    lengths: list[int] | None = None
    for want in wants:
        here = there[want.pool]
        good = range(1, leading(here) + 1) if want.window is None else ends_of_windows(here, want.window)
        if good:
            pages[want.pool] = max(good)
        allowed = set(good)
        lengths = list(good) if lengths is None else [length for length in lengths if length in allowed]
    return Found(pages=pages, restorable=lengths or [])


def leading(there: Sequence[bool]) -> int:
    """The number of leading pages without a gap."""
    return list(there).index(False) if False in there else len(there)


def ends_of_windows(there: Sequence[bool], window: int) -> list[int]:
    """Prefix lengths whose last `window` pages, or all of a shorter prefix, exist."""
    ends, run = [], 0
    for length, here in enumerate(there, 1):
        run = run + 1 if here else 0
        if run >= min(window, length):
            ends.append(length)
    return ends


def window_of(transfer: Any) -> int | None:
    """The number of last pages SGLang needs of a pool; None for all. A trailing pool's keys only matter by their number."""
    return None if transfer.hit_policy == "all_pages" else max(1, len(transfer.keys or ()))


def needed(want: Want, length: int) -> range:
    """The pages that a pool needs for a prefix of this length."""
    return range(0 if want.window is None else max(0, length - want.window), length)


class Pages:
    """All pools of one rank over one store."""

    def __init__(self, store: VerifiedStore, ranks: Ranks, *, model: str, identity: str | None, version: str) -> None:
        self._store, self._ranks, self._model, self._identity, self._version = store, ranks, model, identity, version
        self._pools: dict[str, HostPool] = {}
        self._space: Space | None = None

    def learn(self, name: str, pool: Any) -> HostPool:
        """Registers a pool, or replaces one of the same name. Raises ConfigError for a pool whose pages cannot be located."""
        known = self._pools[name] = HostPool(name, pool, self._ranks, self._version)
        if name == ANCHOR:
            self._space = self._space_of(known)
        return known

    def pool(self, name: str) -> HostPool:
        return self._pools[name]

    @property
    def space(self) -> Space:
        assert self._space is not None, "SGLang must register its anchor pool first"
        return self._space

    def leading(self, pool: str, keys: Sequence[str]) -> int:
        """The number of leading pages without a gap."""
        return leading(self._there(self._pools[pool], keys))

    def find(self, keys: Sequence[str], wants: Sequence[Want]) -> Found:
        """The lengths that are legal for all pools at once, which is not the minimum over the pools."""
        length = self.leading(ANCHOR, keys)
        there = {want.pool: self.there(want.pool, keys[:length]) for want in wants}
        return restorable({**there, ANCHOR: [True] * length}, [Want(ANCHOR, None), *wants])

    def there(self, pool: str, keys: Sequence[str]) -> list[bool]:
        """Which pages are stored."""
        return self._there(self._pools[pool], keys)

    def read(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Fills the pages that verify; returns which did."""
        known = self._pools[pool]
        if not known.has_bytes:
            return [True] * len(keys)
        if host_indices is None or len(host_indices) != len(keys) * known.page_size:
            return [False] * len(keys)
        names = [name for key in keys for name in known.keys(key)]
        reads = [ReadRuns(name, runs) for name, runs in zip(names, known.runs(host_indices), strict=True)]
        return self._by_page(known, self._store.read(self.space, reads))

    def write(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None, before: Sequence[str]) -> list[bool]:
        """Stores pages that follow the pages `before`; returns which are stored now."""
        known = self._pools[pool]
        if not known.has_bytes:
            return [True] * len(keys)
        if host_indices is None or len(host_indices) != len(keys) * known.page_size:
            return [False] * len(keys)
        runs, each, writes = known.runs(host_indices), known.values_per_page, []
        for at, key in enumerate(keys):
            parent, depth = self._parent_of(known, keys, at, before)
            for part, name in enumerate(known.keys(key)):
                writes.append(WriteRuns(name, runs[at * each + part], parent, depth + part))
                parent = name
        return self._by_page(known, self._store.write(self.space, writes))

    def clear(self) -> int:
        """Deletes everything stored in this model's space. Raises StoreError if the store cannot."""
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

    def _parent_of(self, pool: HostPool, keys: Sequence[str], at: int, before: Sequence[str]) -> tuple[bytes, int]:
        """The parent of a page, and the number of its ancestors."""
        anchor, page = self._pools[ANCHOR], len(before) + at
        if pool is not anchor and anchor.has_bytes:
            return anchor.last_key(keys[at]), (page + 1) * anchor.values_per_page
        previous = keys[at - 1] if at else before[-1] if before else None
        return (NO_PARENT if previous is None else pool.last_key(previous)), page * pool.values_per_page

    def _by_page(self, pool: HostPool, statuses: Sequence[ItemStatus]) -> list[bool]:
        each, good = pool.values_per_page, [status is ItemStatus.OK for status in statuses]
        return good if each == 1 else [all(good[at : at + each]) for at in range(0, len(good), each)]
