"""Losing the memory of a device drops that tier and nothing else: what the host and the store have serves as before."""

from __future__ import annotations

import pytest

from stepwell.base.errors import LeaseError
from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import Purpose
from stepwell.store.memory import MemoryStore
from toys import FULL, FULL_POINT, HYBRID, Rig, text

SPECS = [FULL, FULL_POINT, HYBRID]


def lose(rig: Rig) -> None:
    """The ranks are gone, and others take their place."""
    rig.executor.gone = True
    rig.cache.lose_device()
    rig.executor.gone = False


@pytest.mark.parametrize("spec", SPECS)
def test_the_host_serves_what_it_has_and_the_device_is_empty(spec: ModelSpec) -> None:
    rig = Rig(spec, host_pages=64)
    rig.serve(text(1, 33))
    lose(rig)
    assert not any(rig.used(Tier.DEVICE, kind) for kind in Kind if kind in rig.state.arena(Tier.DEVICE).layout.strides)
    rig.idle_check()
    sources = rig.serve(text(1, 40))
    assert sources.device == 0 and sources.host >= 16
    rig.idle_check()


@pytest.mark.parametrize("spec", SPECS)
def test_without_a_host_everything_is_missed_and_explained(spec: ModelSpec) -> None:
    rig = Rig(spec)
    rig.serve(text(1, 33))
    lose(rig)
    assert rig.restore(text(1, 33)) == 0 and "a device that was lost" in str(rig.cache.explain(text(1, 33)))
    rig.idle_check()
    assert rig.serve(text(1, 33)).computed == 33


@pytest.mark.parametrize("spec", SPECS)
def test_copies_under_way_are_taken_back_and_what_they_read_stays_trusted(spec: ModelSpec) -> None:
    rig = Rig(spec, host_pages=64)
    rig.serve(text(1, 33))
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(text(1, 40))
    assert rig.pending(Purpose.LOAD)
    rig.cache.release(lease)
    with rig.open(text(2, 20)) as other:
        rig.compute(other, 16)
    assert rig.pending(Purpose.SAVE)
    lose(rig)
    assert not rig.executor.pending
    rig.idle_check()
    assert rig.serve(text(1, 40)).host >= 16, "a load that was cancelled counts nothing against its source"
    rig.idle_check()


def test_what_ended_before_the_loss_counts() -> None:
    rig = Rig(FULL, host_pages=64)
    with rig.open(text(1, 17)) as lease:
        rig.compute(lease, 16)
    rig.executor.finish_all()  # a save; the cache has not looked yet
    lose(rig)
    rig.idle_check()
    assert rig.serve(text(1, 17)).host == 16


def test_the_store_serves_what_it_has() -> None:
    rig = Rig(HYBRID, host_pages=64, store=MemoryStore())
    rig.serve(text(1, 33))
    rig.settle()
    lose(rig)
    rig.evict_all(Tier.HOST)
    assert rig.serve_fetched(text(1, 40)).store >= 16
    rig.idle_check()


def test_open_leases_and_pins() -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17))
    pin = rig.cache.pins.add(text(1, 17))
    with rig.ready(text(1, 20)), pytest.raises(LeaseError, match="1 lease"):
        rig.cache.lose_device()
    lose(rig)
    rig.cache.audit()
    rig.cache.pins.release(pin)
    assert rig.restore(text(1, 17)) == 0
    rig.idle_check()


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_handed_out_is_held_all_the_same(spec: ModelSpec) -> None:
    rig = Rig(spec, host_pages=64)
    rig.serve(text(1, 33))
    out = rig.cache.hand_out(text(1, 33), ttl_s=60.0)
    assert out is not None
    lose(rig)
    rig.evict_all(Tier.HOST)
    again = rig.cache.hand_out(text(1, 33), ttl_s=60.0)
    assert out.pin.held and again is not None and list(again.pages.ids) == list(out.pages.ids)
    for each in (out, again):
        rig.cache.pins.release(each.pin)
    rig.idle_check()
