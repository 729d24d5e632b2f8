"""Calls that need a device tier, in a cache without one, and the other way round: refused with what to do, never a bare error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepwell import Cache, ConfigError, EnginePages, Lease, Tier
from toys import FULL_POINT, Rig, text

NEEDS_DEVICE: dict[str, Callable[[Cache, Lease], object]] = {
    "grow": lambda cache, lease: cache.grow(lease, 9),
    "copy_point": lambda cache, lease: cache.copy_point(lease, 8),
    "evict_idle": lambda cache, lease: cache.evict_idle(),
    "lose_device": lambda cache, lease: cache.lose_device(),
    "could_hold": lambda cache, lease: cache.could_hold(100, chunk_tokens=8),
    "commit(point_copy=...)": lambda cache, lease: cache.commit(lease, 8, source=EnginePages(), point_copy=0),
}
NEEDS_NONE: dict[str, Callable[[Cache, Lease], object]] = {
    "load": lambda cache, lease: cache.load(lease, EnginePages()),
    "can_load": lambda cache, lease: cache.can_load(lease),
    "first_unsaved": lambda cache, lease: cache.first_unsaved(lease),
    "commit(source=...)": lambda cache, lease: cache.commit(lease, 8, source=EnginePages()),
}


@pytest.mark.parametrize("call", NEEDS_DEVICE)
def test_a_call_for_the_device_tier_is_refused_without_one(call: str) -> None:
    rig = Rig(FULL_POINT, device_pages=None, host_pages=64)
    with rig.open(text(1, 9)) as lease, pytest.raises(ConfigError, match="needs a device tier") as refused:
        NEEDS_DEVICE[call](rig.cache, lease)
    assert str(refused.value).startswith(call)
    rig.cache.audit()


@pytest.mark.parametrize("call", NEEDS_NONE)
@pytest.mark.parametrize("host_pages", [None, 64])
def test_a_call_for_engines_with_memory_of_their_own_is_refused_with_a_device_tier(call: str, host_pages: int | None) -> None:
    rig = Rig(FULL_POINT, host_pages=host_pages)
    with rig.ready(text(1, 9)) as lease:
        rig.cache.grow(lease, 8)
        with pytest.raises(ConfigError, match="for caches without a device tier") as refused:
            NEEDS_NONE[call](rig.cache, lease)
    assert str(refused.value).startswith(call)
    rig.cache.audit()


def test_all_other_calls_work_in_a_cache_without_a_device_tier() -> None:
    rig = Rig(FULL_POINT, device_pages=None, host_pages=64)
    cache = rig.cache
    with rig.open(text(1, 9)) as lease:
        assert cache.next_stop(lease) == 8 and cache.wants_checkpoint(lease, 8) and cache.can_load(lease)
        assert cache.first_unsaved(lease) == 0 and not cache.arriving(lease) and cache.ask_checkpoint(lease, 4)
        cache.begins(lease)
        cache.append(lease, [5])
    assert cache.hand_out(text(1, 9), ttl_s=1) is None and cache.pins.add(text(1, 9)).tokens == 0
    assert not cache.cached_now() and not cache.tenants() and cache.survey(show=3) and cache.explain(text(1, 9))
    assert cache.stats().tier(Tier.DEVICE).size_bytes == 0 and cache.stats().tier(Tier.HOST).size_bytes > 0
    for order in (cache.flush, cache.clear, cache.step, cache.audit):
        order()
    assert cache.close()
