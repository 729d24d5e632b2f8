"""Pages in two objects, all of them on the device: saved, evicted, loaded and matched as one."""

from __future__ import annotations

import pytest

from stepwell import CacheConfig, ConfigError, Kind, LeaseError, NoRoom, Tier, WritePolicy, build_cache
from stepwell.base.tasks import Purpose
from toys import PAGE, SPILLING, Rig, text

PAGE_OBJECTS = 3  # of 32 bytes, for a page and its rows on the device


def rig(pages: int = 40, host_pages: int = 200, **options: object) -> Rig:
    return Rig(SPILLING, device_pages=pages * PAGE_OBJECTS, host_pages=host_pages, **options)  # type: ignore[arg-type]


def test_a_page_comes_back_from_the_host_with_its_rows() -> None:
    tiers = rig()
    tiers.serve(text(1, 33))
    tiers.evict_all(Tier.DEVICE)
    assert tiers.used(Tier.DEVICE, Kind.PREFIX) == tiers.used(Tier.DEVICE, Kind.ROWS) == 0
    sources = tiers.serve(text(1, 33))
    assert (sources.device, sources.host, sources.computed) == (0, 32, 1)
    sources = tiers.serve(text(1, 33))
    assert (sources.device, sources.host, sources.computed) == (32, 0, 1)
    tiers.idle_check()


def test_a_page_that_is_copied_in_two_halves_is_counted_once() -> None:
    tiers = rig()
    tiers.serve(text(1, 33))
    assert tiers.cache.counters["save_pages"] == 8
    tiers.evict_all(Tier.DEVICE)
    tiers.serve(text(1, 33))
    assert tiers.cache.counters["load_pages"] == 8


def test_rows_are_taken_chunk_by_chunk() -> None:
    tiers = rig()
    lease = tiers.open(text(1, 8 * PAGE))
    assert len(lease.prefix_pages) == 8 and tiers.used(Tier.DEVICE, Kind.ROWS) == 0
    tiers.compute(lease, 2 * PAGE + 1)
    assert tiers.used(Tier.DEVICE, Kind.ROWS) == 3
    with pytest.raises(LeaseError, match="call grow"):
        tiers.cache.commit(lease, 3 * PAGE + 1)
    tiers.compute(lease, 8 * PAGE)
    assert tiers.used(Tier.DEVICE, Kind.ROWS) == 8
    tiers.settle()
    tiers.engine.check(lease)
    tiers.cache.release(lease)
    tiers.idle_check()


def test_an_aborted_request_leaves_neither_pages_nor_rows() -> None:
    tiers = rig()
    lease = tiers.open(text(1, 8 * PAGE))
    tiers.cache.grow(lease, 5 * PAGE)
    tiers.cache.release(lease)
    assert tiers.used(Tier.DEVICE, Kind.PREFIX) == tiers.used(Tier.DEVICE, Kind.ROWS) == 0
    tiers.idle_check()


def test_a_save_that_fails_leaves_the_page_whole_on_the_device() -> None:
    tiers = rig()
    with tiers.open(text(1, 9)) as lease:
        tiers.compute(lease, 9)
        tiers.fail_all()
        tiers.cache.audit()
        tiers.engine.check(lease)
    tiers.settle()
    assert tiers.restore(text(1, 9)) == 8
    tiers.serve(text(1, 9))
    tiers.idle_check()


def test_a_load_that_fails_takes_both_halves_and_the_source_out() -> None:
    tiers = rig()
    tiers.serve(text(1, 17))
    tiers.evict_all(Tier.DEVICE)
    lease = tiers.open(text(1, 17))
    (job,) = tiers.pending(Purpose.LOAD)
    assert [copy.target.kind for copy in tiers.executor.plan(job).copies] == [Kind.PREFIX, Kind.ROWS]
    tiers.fail_all()
    assert lease.failed
    tiers.cache.audit()
    tiers.cache.release(lease)
    assert tiers.used(Tier.DEVICE, Kind.PREFIX) == tiers.used(Tier.DEVICE, Kind.ROWS) == 0
    assert tiers.restore(text(1, 17)) == 0
    assert tiers.serve(text(1, 17)).computed == 17
    tiers.idle_check()


def test_a_prefix_that_arrives_for_another_is_waited_for_with_its_rows() -> None:
    tiers = rig()
    tiers.serve(text(1, 17))
    tiers.evict_all(Tier.DEVICE)
    first, second = tiers.open(text(1, 17)), tiers.open(text(1, 17))
    assert not second.ready and len(tiers.pending(Purpose.LOAD)) == 1
    tiers.settle()
    for lease in (first, second):
        assert lease.ready
        tiers.engine.check(lease)
        tiers.cache.release(lease)
    tiers.idle_check()


def test_room_is_made_for_rows_as_for_pages() -> None:
    tiers = rig(pages=10)
    for name in range(8):
        tiers.serve(text(name, 4 * PAGE + 1), answer=[7] * 9)
    assert tiers.cache.counters["evicted_device_pages"] > 0
    with tiers.ready(text(20, 6 * PAGE)) as lease:
        tiers.prefill(lease)
        with pytest.raises(NoRoom):
            tiers.open(text(21, 12 * PAGE))
        tiers.engine.check(lease)
    tiers.idle_check()


def test_a_store_brings_pages_back_whole() -> None:
    from stepwell.store.memory import MemoryStore

    store = MemoryStore()
    tiers = rig(store=store)
    tiers.serve(text(1, 33))
    again = rig(store=store)
    sources = again.serve_fetched(text(1, 33))
    assert sources.store == 32
    again.idle_check()


def test_rows_need_a_host_that_everything_is_written_through_to() -> None:
    with pytest.raises(ConfigError, match="both device_bytes and host_bytes"):
        build_cache(SPILLING, CacheConfig(device_bytes=1 << 20))
    with pytest.raises(ConfigError, match="'through', not 'exclusive'"):
        build_cache(SPILLING, CacheConfig(device_bytes=1 << 20, host_bytes=1 << 20, write=WritePolicy.EXCLUSIVE))
