"""Device and host hold together what one tier of both sizes would: copies that the device repeats leave the host first."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import Kind, Tier, WritePolicy
from stepwell.tree.node import ABSENT, Residency
from toys import ALL_MODELS, FULL, FULL_POINT, HYBRID, Rig, text

SAVING_LATE = [WritePolicy.ADAPTIVE, WritePolicy.BACK]


def _repeated_pages(rig: Rig) -> int:
    """Pages that both tiers have."""
    pairs = [node.runs for node in rig.tree.nodes() if all(run is not None for run in node.runs)]
    return sum(int(np.count_nonzero((a.ids != ABSENT) & (b.ids != ABSENT))) for a, b in pairs if a is not None and b is not None)


def test_adaptive_saves_at_commit_while_the_host_has_room() -> None:
    rig = Rig(HYBRID, host_pages=64, write=WritePolicy.ADAPTIVE)
    rig.serve(text(1, 17))
    assert rig.used(Tier.HOST, Kind.PREFIX) == 4 and rig.used(Tier.HOST, Kind.POINT) == 1


def test_adaptive_evicts_nothing_from_the_host_for_what_stays_on_the_device() -> None:
    rig = Rig(FULL, device_pages=64, host_pages=8, write=WritePolicy.ADAPTIVE)
    for name in range(4):
        rig.serve(text(name, 29))
    assert rig.cache.counters["evicted_host_pages"] == 0
    assert rig.cache.counters["evicted_device_pages"] == 0


@pytest.mark.parametrize("write", SAVING_LATE)
def test_two_tiers_hold_what_one_of_both_sizes_would(write: WritePolicy) -> None:
    rig = Rig(FULL, device_pages=16, host_pages=16, write=write)
    prompts = [text(name, 17) for name in range(7)]  # 4 pages each that can be resumed from
    for prompt in prompts:
        rig.clock.advance(1)
        rig.serve(prompt)
    assert [rig.restore(prompt) for prompt in prompts] == [16] * 7


def test_write_through_holds_what_the_larger_tier_has_room_for() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=16, write=WritePolicy.THROUGH)
    prompts = [text(name, 17) for name in range(7)]
    for prompt in prompts:
        rig.clock.advance(1)
        rig.serve(prompt)
    assert sum(rig.restore(prompt) == 16 for prompt in prompts) <= 4


@pytest.mark.parametrize("write", SAVING_LATE)
def test_the_host_gives_up_what_the_device_has_too_before_what_it_has_alone(write: WritePolicy) -> None:
    rig = Rig(FULL, device_pages=24, host_pages=16, write=write)
    for name in range(4):
        rig.clock.advance(1)
        rig.serve(text(name, 17))
    rig.evict_all(Tier.DEVICE)
    rig.clock.advance(1)
    assert rig.serve(text(0, 17)).host == 16  # on both tiers from now on
    assert _repeated_pages(rig) == 4
    rig.shrink(Tier.HOST, 4)
    assert _repeated_pages(rig) == 0
    assert [rig.restore(text(name, 17)) for name in range(4)] == [16] * 4


def test_a_checkpoint_that_the_device_has_too_leaves_the_host_first() -> None:
    rig = Rig(FULL_POINT, device_pages=64, host_pages=64, write=WritePolicy.ADAPTIVE)
    for name in (1, 2):
        rig.clock.advance(1)
        rig.serve(text(name, 17))
    rig.evict_all(Tier.DEVICE)
    for _ in range(2):  # the second use brings its checkpoint up to stay
        rig.clock.advance(1)
        rig.serve(text(1, 17))
    victim = rig.tree.ranking.pop(Tier.HOST, runs=False, checkpoints=True)
    assert isinstance(victim, Residency) and victim.checkpoint.ready_in(Tier.DEVICE) is not None
    rig.tree.ranking.queue(victim)
    rig.cache.audit()


@pytest.mark.parametrize("spec", ALL_MODELS)
@pytest.mark.parametrize("write", SAVING_LATE)
def test_branches_on_the_host_keep_the_trunk_they_stand_on(spec: str, write: WritePolicy) -> None:
    """A page that only the device has, with host pages behind it, is saved before it leaves the device."""
    rig = Rig(ALL_MODELS[spec], device_pages=40, host_pages=64, write=write)
    trunk = text(1, 16)
    for branch in range(2, 6):
        rig.clock.advance(1)
        rig.serve([*trunk, *text(branch, 9)])
    before = rig.restore([*trunk, *text(2, 9)])
    for other in range(6, 9):
        rig.clock.advance(1)
        rig.serve(text(other, 17))
    assert rig.cache.counters["evicted_cut_off"] == 0
    assert rig.restore([*trunk, *text(2, 9)]) == before == 24


def test_what_is_worth_less_than_all_on_the_host_is_not_saved() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=16, write=WritePolicy.ADAPTIVE)
    for name in range(4):
        rig.serve(text(name, 17), priority=10)
    rig.evict_all(Tier.DEVICE)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 16
    for name in range(10, 16):
        rig.clock.advance(1)
        rig.serve(text(name, 17))
    assert rig.cache.counters["save_skipped_worth_less"] > 0
    assert [rig.restore(text(name, 17)) for name in range(4)] == [16] * 4


@pytest.mark.parametrize("write", SAVING_LATE)
def test_a_checkpoint_waits_for_room_that_is_on_its_way(write: WritePolicy) -> None:
    """A request that goes on after a checkpoint gets the page for that before it computes, where it may wait."""
    rig = Rig(FULL_POINT, device_pages=16, host_pages=200, write=write)
    rig.serve(text(1, 33))
    lease = rig.ready(text(2, 17), hints=(8,))
    rig.prefill(lease)
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.cache.counters["checkpoint_skipped_no_room"] == 0
    assert rig.restore(text(2, 9)) == 8 and rig.restore(text(2, 17)) == 16


def test_a_spare_page_is_given_back_by_a_request_that_ends_early() -> None:
    rig = Rig(FULL_POINT, device_pages=32, host_pages=32, write=WritePolicy.ADAPTIVE)
    lease = rig.ready(text(1, 17))
    rig.cache.grow(lease, 16)
    assert len(lease.spare_points) == 1
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.used(Tier.DEVICE, Kind.POINT) == 0
