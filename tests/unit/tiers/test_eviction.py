"""Making space: how much goes at a time, and for how long the order is kept when it is a slab that is missing."""

from __future__ import annotations

import pytest

from stepwell import Kind, NoRoom, Point, StateSpec, Tier, WritePolicy
from stepwell.memory.layout import ArenaLayout
from stepwell.tiers import eviction
from toys import FULL, KV, OBJECT_BYTES, Rig, model, text

BIG = StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=16 * OBJECT_BYTES, dtype="u8")


def test_pages_go_many_at_a_time_when_a_point_lacks_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(model(KV, BIG), device_pages=256)
    rig.serve(text(1, 4 * 150 + 1))
    rig.serve(text(2, 5))
    cuts, cut = [], eviction.discard_suffix
    monkeypatch.setattr(eviction, "discard_suffix", lambda *args: cuts.append(cut(*args)))
    before = rig.cache.counters["evicted_device_pages"]
    arena = rig.state.arena(Tier.DEVICE)
    points = next(count for count in range(1, 17) if arena.shortage({Kind.POINT: count}))
    assert arena.shortage({Kind.PREFIX: 1, Kind.POINT: points}) == {Kind.POINT: 1}, "no prefix page is missing"
    eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 1, Kind.POINT: points + 4})
    pages = rig.cache.counters["evicted_device_pages"] - before
    assert pages >= 16 and len(cuts) <= pages / 8, f"{pages} pages went in {len(cuts)} cuts"
    rig.cache.audit()


def test_no_more_pages_go_than_are_short() -> None:
    rig = Rig(model(KV, BIG), device_pages=256)
    rig.serve(text(1, 4 * 200 + 1))
    need = {Kind.PREFIX: 100}
    short = rig.state.arena(Tier.DEVICE).shortage(need)[Kind.PREFIX]
    assert eviction.make_room(rig.state, Tier.DEVICE, need).fits
    assert rig.cache.counters["evicted_device_pages"] <= short
    rig.cache.audit()


def _full_of_unsaved() -> Rig:
    """Under `exclusive`: twelve prompts of five pages, one after the other, on a device of 64 that alone has them."""
    rig = Rig(FULL, device_pages=64, host_pages=256, write=WritePolicy.EXCLUSIVE)
    for name in range(12):
        rig.clock.advance(1)
        rig.serve(text(name, 4 * 5))
    rig.evict_all(Tier.HOST)
    return rig


def test_little_more_is_saved_than_is_short() -> None:
    """Under `exclusive` memory has to be waited for: what is on its way already is not asked for again."""
    rig = _full_of_unsaved()
    need = {Kind.PREFIX: 64 - rig.used(Tier.DEVICE, Kind.PREFIX) + 6}
    for _ in range(10):
        found = eviction.make_room(rig.state, Tier.DEVICE, need)
        assert found.waiting and not found.fits
    saving = sum(len(copy.source.ids) for plan in rig.state.copies.tasks() for copy in plan.copies)
    assert 6 + 4 <= saving < 6 + 4 + 5, "what is short and a sixteenth, in whole prompts"
    rig.settle()
    assert eviction.make_room(rig.state, Tier.DEVICE, need).fits
    rig.cache.audit()


def test_whoever_needs_what_is_being_saved_is_told_to_wait() -> None:
    """Pages that are being saved are in use, so that nothing could be evicted for it now; it is refused, but not for good."""
    rig = _full_of_unsaved()
    for _ in range(3):
        with pytest.raises(NoRoom) as refusal:
            eviction.allocate(rig.state, Tier.DEVICE, {Kind.PREFIX: 60})
        assert refusal.value.waiting
    for _ in range(8):
        rig.settle()
        if eviction.make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 60}).fits:
            break
    eviction.allocate(rig.state, Tier.DEVICE, {Kind.PREFIX: 60})
    with pytest.raises(NoRoom) as refusal:
        eviction.allocate(rig.state, Tier.DEVICE, {Kind.PREFIX: 65})
    assert not refusal.value.waiting, "that never fits"


def test_copies_that_were_given_up_on_are_not_waited_for() -> None:
    rig = _full_of_unsaved()
    need = {Kind.PREFIX: 64 - rig.used(Tier.DEVICE, Kind.PREFIX) + 6}
    assert eviction.make_room(rig.state, Tier.DEVICE, need).waiting
    rig.clock.advance(1000)
    assert rig.state.copies.give_up_overdue(10.0)
    assert rig.state.copies.saving_bytes(Tier.DEVICE) == 0
    assert eviction.make_room(rig.state, Tier.DEVICE, need).waiting, "others are saved in their place"
    assert rig.state.copies.saving_bytes(Tier.DEVICE) > 0


@pytest.mark.parametrize(("slabs", "patience_slabs"), [(4, 1), (16, 1), (48, 3), (128, 8), (4096, 8)])
def test_patience_is_some_slabs_but_a_small_share_of_the_tier(slabs: int, patience_slabs: int) -> None:
    layout = ArenaLayout(size_bytes=100 * slabs, slab_bytes=100, strides={Kind.PREFIX: 10, Kind.POINT: 50})
    assert eviction.patience_bytes_of(layout) == 100 * patience_slabs
