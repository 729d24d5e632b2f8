"""A cache that a real cluster is attached to while it runs: its host memory is registered, and pages move in and out of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mooncake_cluster import Cluster

from stepwell import CacheConfig, ModelSpec, Prefix, StateSpec, build_cache
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.errors import StoreError
from stepwell.cache.facade import Cache
from stepwell.store.mooncake.client import Client
from stepwell.store.mooncake.lanes import COPY_BYTES, address_of
from waiting import step_until, wait_until

PAGES = 4
PROMPT = list(range(PAGES * 16 + 1))
SPEC = ModelSpec(
    name="large pages",
    page_tokens=16,
    states=(StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=2 * COPY_BYTES // 16, dtype="u8"),),
)
CONFIG = CacheConfig(device_bytes=8 * 2 * COPY_BYTES, host_bytes=8 * 2 * COPY_BYTES)


def serve(cache: Cache) -> int:
    ticket = cache.prefetch(cache.lookup(PROMPT))
    step_until(cache, lambda: ticket.ready)
    with cache.acquire(cache.lookup(PROMPT), ticket=ticket) as lease:
        step_until(cache, lambda: lease.ready)
        if lease.position < len(PROMPT):
            cache.grow(lease, len(PROMPT))
            cache.commit(lease, len(PROMPT))
    step_until(cache, lambda: not cache.stats().pending)
    return lease.sources.store


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where everything that Mooncake moved began."""
    found: list[int] = []
    for verb in ("get", "put"):
        call = getattr(Client, verb)

        def watched(
            client: Client, names: list[str], pointers: list[list[int]], *more: object, call: Callable = call, **named: object
        ) -> object:
            found.extend(at for slices in pointers for at in slices)
            return call(client, names, pointers, *more, **named)

        monkeypatch.setattr(Client, verb, watched)
    return found


def test_a_cluster_attached_at_run_time_moves_pages_in_the_hosts_own_memory(cluster: Cluster, moved: list[int]) -> None:
    cluster.lend("128mb")
    cache, store = build_cache(SPEC, CONFIG, model="zeros"), cluster.open(staging_bytes=str(48 * COPY_BYTES))
    serve(cache)
    cache.store.attach(store, StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0))
    (memory,) = cache.store.host_memory
    with pytest.raises(StoreError, match="registered twice"):
        store.register([memory[4096:8192]])  # how a real client says that it knows the memory
    step_until(cache, lambda: not cache.stats().pending)
    cache.flush()
    assert serve(cache) == PAGES * 16
    start = address_of(memory)
    assert sum(start <= at < start + memory.nbytes for at in moved) == 2 * PAGES, "every page, down and up"
    cache.store.detach()
    wait_until(lambda: cache.step().detached, "the store is detached")
    store.register([memory[4096:8192]])  # it is not registered any more
    store.unregister([memory[4096:8192]])
    cache.close()
