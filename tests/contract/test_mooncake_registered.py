"""A cache over the Mooncake adapter: the host tier's memory is registered from attach to detach, for every caller and every
kind of memory, and pages move without a copy. Over a stand-in; over a real master it is in `tests/mooncake`.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
import torch
from mooncake_stand_in import StandIn, join

from stepwell import (
    CacheConfig,
    ConfigError,
    ItemStatus,
    ModelSpec,
    Prefix,
    ReadRuns,
    StateSpec,
    Tier,
    VerifiedStore,
    WriteRuns,
    build_cache,
)
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.errors import StoreError
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.cache.facade import Cache
from stepwell.store.mooncake.lanes import COPY_BYTES, address_of
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.store.wrappers import Wrapper
from stepwell.store_tier.link import LinkState
from stepwell.transfer.copy_engine import NumpyCopyEngine
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory
from waiting import step_until, wait_until

STAGING_BYTES = 48 * COPY_BYTES
PAGES = 4
PROMPT = list(range(PAGES * 16 + 1))
SPEC = ModelSpec(
    name="large pages",
    page_tokens=16,
    states=(StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=2 * COPY_BYTES // 16, dtype="u8"),),
)
CONFIG = CacheConfig(device_bytes=8 * 2 * COPY_BYTES, host_bytes=8 * 2 * COPY_BYTES)
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)


@pytest.fixture
def raw() -> StandIn:
    return StandIn()


@pytest.fixture
def store(raw: StandIn) -> Iterator[MooncakeStore]:
    store = MooncakeStore(join(raw), staging_bytes=STAGING_BYTES)
    yield store
    store.close()  # the stand-in minds memory that is left registered


def serve(cache: Cache) -> int:
    """Serves the prompt and lets everything go down; says how many tokens came from the store."""
    ticket = cache.prefetch(cache.lookup(PROMPT))
    step_until(cache, lambda: ticket.ready)
    with cache.acquire(cache.lookup(PROMPT), ticket=ticket) as lease:
        step_until(cache, lambda: lease.ready)
        if lease.position < len(PROMPT):
            cache.grow(lease, len(PROMPT))
            cache.commit(lease, len(PROMPT))
    step_until(cache, lambda: not cache.stats().pending)
    return lease.sources.store


def knows(raw: StandIn, cache: Cache) -> bool:
    """Whether all of the host's memory is registered."""
    assert cache.store.host_memory
    return all(raw.registered.get(address_of(each)) == each.nbytes for each in cache.store.host_memory)


def detach(cache: Cache) -> None:
    cache.store.detach()
    wait_until(lambda: cache.step().detached, "the store is detached")


def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A machine with CUDA, as far as host memory goes: what is asked for as pinned is plain, and listed here."""
    zeros, made = torch.zeros, []

    def stand_in(*size: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        made.extend([zeros(*size, **options)] if pin_memory else [])  # type: ignore[call-overload]
        return made[-1] if pin_memory else zeros(*size, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", stand_in)
    return made


def cache_over(kind: str, monkeypatch: pytest.MonkeyPatch) -> Cache:
    layouts = layouts_for(SPEC, CONFIG)
    if kind == "plain":
        return build_cache(SPEC, CONFIG, model="zeros")
    if kind == "two ranks":
        ranks = [numpy_memories(SPEC, layouts) for _ in range(2)]
        copy_engine = [NumpyCopyEngine(each) for each in ranks]
        return build_cache(SPEC, CONFIG, copy_engines=copy_engine, model="zeros", host_pages=[each[Tier.HOST] for each in ranks])
    device = TorchMemory(SPEC, layouts[Tier.DEVICE])  # of the CPU here, for a GPU's
    made = pinned(monkeypatch) if kind == "pinned" else []
    host = TorchMemory(SPEC, layouts[Tier.HOST])
    if kind == "pinned":
        assert made[0].data_ptr() == address_of(host.block), "the host's memory must be pinned"
    return build_cache(
        SPEC, CONFIG, copy_engines=[TorchCopyEngine({Tier.DEVICE: device, Tier.HOST: host})], model="zeros", host_pages=[host]
    )


@pytest.mark.parametrize("kind", ["plain", "two ranks", "torch", "pinned"])
def test_pages_of_an_attached_store_move_without_a_copy(
    kind: str, raw: StandIn, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_over(kind, monkeypatch)
    serve(cache)
    cache.store.attach(store, WAIT)  # at run time: what is on the host already goes down
    assert knows(raw, cache)
    step_until(cache, lambda: not cache.stats().pending)
    cache.flush()
    assert serve(cache) == PAGES * 16
    ranks = len(cache.store.host_memory)
    assert raw.slices == [2] * 2 * PAGES * ranks, "stamps through a lane, pages from and to the host's own memory"
    detach(cache)
    assert not any(address_of(each) in raw.registered for each in cache.store.host_memory)
    cache.audit()
    cache.close()


def test_a_closed_cache_has_its_memory_back(raw: StandIn, store: MooncakeStore) -> None:
    cache = build_cache(SPEC, CONFIG, model="zeros")
    cache.store.attach(store, WAIT)
    serve(cache)
    cache.close()
    assert not knows(raw, cache)


def test_memory_that_cannot_be_registered_is_said_and_nothing_is_attached(raw: StandIn, store: MooncakeStore) -> None:
    cache = build_cache(SPEC, CONFIG, model="zeros")
    raw.register_buffer(address_of(cache.store.host_memory[0]) + 4096, 4096)  # as if another user had registered it
    with pytest.raises(StoreError, match="ulimit -l"):
        cache.store.attach(store, WAIT)
    assert cache.store.state is LinkState.DETACHED
    raw.unregister_buffer(address_of(cache.store.host_memory[0]) + 4096)
    cache.store.attach(store, WAIT)
    assert knows(raw, cache)
    with pytest.raises(ConfigError, match="detach it first"):
        cache.store.attach(store, WAIT)
    cache.close()


def test_a_store_that_is_refused_is_shown_nothing(raw: StandIn, store: MooncakeStore) -> None:
    ranks = [numpy_memories(SPEC, layouts_for(SPEC, CONFIG)) for _ in range(2)]
    copy_engine = [NumpyCopyEngine(each) for each in ranks]
    cache = build_cache(SPEC, CONFIG, copy_engines=copy_engine, model="zeros", host_pages=[ranks[0][Tier.HOST]])
    with pytest.raises(ConfigError, match="all 2 rank"):
        cache.store.attach(store, WAIT)
    assert not knows(raw, cache)
    cache.close()


def test_memory_stays_registered_while_a_transfer_runs(raw: StandIn, store: MooncakeStore) -> None:
    cache = build_cache(SPEC, CONFIG, model="zeros")
    cache.store.attach(store, WAIT)
    begun, go = Event(), Event()

    def wait() -> None:
        begun.set()
        assert go.wait(60)

    raw.slow = wait
    with cache.acquire(cache.lookup(PROMPT)) as lease:
        step_until(cache, lambda: lease.ready)
        cache.grow(lease, len(PROMPT))
        cache.commit(lease, len(PROMPT))
    step_until(cache, begun.is_set)
    cache.store.detach()
    for _ in range(20):
        assert cache.step().detached == () and knows(raw, cache)
    go.set()
    step_until(cache, lambda: not knows(raw, cache))
    cache.close()


def test_a_store_that_is_attached_again_keeps_the_memory(raw: StandIn, store: MooncakeStore) -> None:
    cache = build_cache(SPEC, CONFIG, model="zeros")
    cache.store.attach(store, WAIT)
    for _ in range(3):
        cache.store.detach()
        cache.store.attach(store, WAIT)  # before the cache had a step to release it
        cache.step()
        assert knows(raw, cache)
    for _ in range(3):
        detach(cache)
        cache.store.attach(store, WAIT)
        assert knows(raw, cache)
    serve(cache)
    assert raw.slices == [2] * PAGES
    cache.close()


def test_a_store_that_is_still_unregistering_memory_is_refused_at_once(store: MooncakeStore) -> None:
    begun, go = Event(), Event()

    class Slow(Wrapper):
        def unregister(self, memory: object) -> None:
            begun.set()
            assert go.wait(60)

    cache, slow = build_cache(SPEC, CONFIG, model="zeros"), Slow(store)
    cache.store.attach(slow, WAIT)
    cache.store.detach()
    assert cache.step().detached == () and begun.wait(60)
    with pytest.raises(StoreError, match="still unregistering"):
        cache.store.attach(slow, WAIT)
    assert cache.store.state is LinkState.DETACHED
    go.set()
    wait_until(lambda: cache.step().detached, "the store has unregistered it")
    cache.store.attach(slow, WAIT)
    assert cache.store.state is LinkState.ATTACHED
    cache.close()


def test_a_store_in_a_wrapper_is_shown_the_memory_too(raw: StandIn, store: MooncakeStore) -> None:
    cache = build_cache(SPEC, CONFIG, model="zeros")
    cache.store.attach(Wrapper(store), WAIT)
    assert knows(raw, cache)
    detach(cache)
    assert not knows(raw, cache)
    cache.close()


def test_a_store_that_cannot_forget_memory_is_said_and_let_go(raw: StandIn, store: MooncakeStore) -> None:
    class Clinging(Wrapper):
        def unregister(self, memory: object) -> None:
            raise RuntimeError("no")

    cache, clinging, said = build_cache(SPEC, CONFIG, model="zeros"), Clinging(store), []
    cache.store.attach(clinging, WAIT)
    cache.store.detach()

    def is_let_go() -> bool:
        report = cache.step()
        said.extend(report.failures)
        return report.detached == (clinging,)

    wait_until(is_let_go, "the store is released")
    assert len(said) == 1 and "RuntimeError: no" in said[0]
    cache.close()


def test_verified_values_of_several_runs_move_through_memory_that_is_registered(raw: StandIn) -> None:
    layer = VerifiedStore(MooncakeStore(join(raw), staging_bytes=STAGING_BYTES))
    space, half = layer.space(b"a model"), COPY_BYTES + 4096
    runs = [memoryview(bytearray([number]) * half) for number in (1, 2)]
    assert layer.write(space, [WriteRuns(bytes(32), runs)]) == [ItemStatus.OK]
    read = [memoryview(bytearray(half)) for _ in range(2)]
    assert layer.read(space, [ReadRuns(bytes(32), read)]) == [ItemStatus.OK] and read == runs
    layer.write(other := layer.space(b"another model"), [WriteRuns(bytes(32), runs)])
    assert layer.clear(space) == 1 and layer.clear(space) == 0
    assert not layer.contains(space, [bytes(32)])[0] and layer.contains(other, [bytes(32)]) == [True]
    raw.down = True
    with pytest.raises(StoreError, match="does not answer"):
        layer.clear(other)
    layer.close()  # the stand-in minds memory that is left registered
