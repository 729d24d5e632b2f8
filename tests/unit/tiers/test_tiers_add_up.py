"""Device and host hold together what one tier of both sizes would: copies that the device repeats leave the host first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stepwell import Kind, Lease, NoRoom, Tier, WritePolicy
from stepwell.store.memory import MemoryStore
from stepwell.tiers.eviction import make_room
from stepwell.tree.evictable import EvictableSuffix
from stepwell.tree.eviction_order import USEFUL
from stepwell.tree.node import ABSENT, Residency, Run
from toys import ALL_MODELS, FULL, FULL_POINT, HYBRID, PAGE, Rig, text


def _repeated_pages(rig: Rig) -> int:
    """Pages that both tiers have."""
    pairs = [node.runs for node in rig.tree.nodes() if all(run is not None for run in node.runs)]
    return sum(int(np.count_nonzero((a.ids != ABSENT) & (b.ids != ABSENT))) for a, b in pairs if a is not None and b is not None)


def test_exclusive_saves_at_commit_while_the_host_has_room() -> None:
    rig = Rig(HYBRID, host_pages=64, write=WritePolicy.EXCLUSIVE)
    rig.serve(text(1, 17))
    assert rig.used(Tier.HOST, Kind.PREFIX) == 4 and rig.used(Tier.HOST, Kind.POINT) == 1


def test_exclusive_evicts_nothing_from_the_host_for_what_stays_on_the_device() -> None:
    rig = Rig(FULL, device_pages=64, host_pages=8, write=WritePolicy.EXCLUSIVE)
    for name in range(4):
        rig.serve(text(name, 29))
    assert rig.cache.counters["evicted_host_pages"] == 0
    assert rig.cache.counters["evicted_device_pages"] == 0


def test_two_tiers_hold_what_one_of_both_sizes_would() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=16, write=WritePolicy.EXCLUSIVE)
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


def test_the_host_gives_up_what_the_device_has_too_before_what_it_has_alone() -> None:
    rig = Rig(FULL, device_pages=24, host_pages=16, write=WritePolicy.EXCLUSIVE)
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


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_of_a_long_prompt_no_more_goes_down_than_its_room_is_needed_for(spec: str) -> None:
    """The rest stays on the device: on the host it would be a mere repetition."""
    rig = Rig(ALL_MODELS[spec], device_pages=256, host_pages=256, write=WritePolicy.EXCLUSIVE)
    prompt = text(1, 96 * PAGE + 1)
    rig.serve(prompt)
    rig.evict_all(Tier.HOST)
    before, on_device = rig.restore(prompt), rig.used(Tier.DEVICE, Kind.PREFIX)
    while make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: rig.state.arena(Tier.DEVICE).layout.rows(Kind.PREFIX) - 92}).waiting:
        rig.settle()
    assert rig.used(Tier.DEVICE, Kind.PREFIX) < on_device, "nothing had to leave"
    assert 0 < rig.used(Tier.HOST, Kind.PREFIX) <= 32
    assert rig.restore(prompt) == before
    rig.idle_check()


def test_a_checkpoint_that_the_device_has_too_leaves_the_host_first() -> None:
    rig = Rig(FULL_POINT, device_pages=64, host_pages=64, write=WritePolicy.EXCLUSIVE)
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
def test_branches_on_the_host_keep_the_trunk_they_stand_on(spec: str) -> None:
    """A page that only the device has, with host pages behind it, is saved before it leaves the device."""
    rig = Rig(ALL_MODELS[spec], device_pages=40, host_pages=64, write=WritePolicy.EXCLUSIVE)
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
    rig = Rig(FULL, device_pages=16, host_pages=16, write=WritePolicy.EXCLUSIVE)
    for name in range(4):
        rig.serve(text(name, 17), priority=10)
    rig.evict_all(Tier.DEVICE)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 16
    for name in range(10, 16):
        rig.clock.advance(1)
        rig.serve(text(name, 17))
    assert rig.cache.counters["save_skipped_worth_less"] > 0
    assert [rig.restore(text(name, 17)) for name in range(4)] == [16] * 4


def test_a_checkpoint_waits_for_room_that_is_on_its_way() -> None:
    """A request that goes on after a checkpoint gets the page for that before it computes, where it may wait."""
    rig = Rig(FULL_POINT, device_pages=16, host_pages=200, write=WritePolicy.EXCLUSIVE)
    rig.serve(text(1, 33))
    lease = rig.ready(text(2, 17), hints=(8,))
    rig.prefill(lease)
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.cache.counters["checkpoint_skipped_no_room"] == 0
    assert rig.restore(text(2, 9)) == 8 and rig.restore(text(2, 17)) == 16


def test_a_spare_page_is_given_back_by_a_request_that_ends_early() -> None:
    rig = Rig(FULL_POINT, device_pages=32, host_pages=32, write=WritePolicy.EXCLUSIVE)
    lease = rig.ready(text(1, 17))
    rig.cache.grow(lease, 16)
    assert len(lease.spare_points) == 1
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.used(Tier.DEVICE, Kind.POINT) == 0


def test_saves_of_things_worth_the_same_do_not_chase_each_other() -> None:
    """What was saved last left the device last and the host first: each save undid the one before, and no space was made."""
    rig = Rig(HYBRID, device_pages=64, host_pages=192, write=WritePolicy.EXCLUSIVE, store=MemoryStore())
    for name in range(32):  # the clock stands still
        rig.serve(text(name, 41))
    rig.idle_check()


def test_a_copy_made_because_the_device_needs_the_room_is_not_given_up_as_a_repetition() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=8, write=WritePolicy.EXCLUSIVE)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.HOST)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 0
    everything = {Kind.PREFIX: 16}
    assert make_room(rig.state, Tier.DEVICE, everything).waiting
    rig.settle()
    assert _repeated_pages(rig) == 4
    run = rig.tree.ranking.pop(Tier.HOST, runs=True, checkpoints=False)
    assert isinstance(run, Run) and run.standing == USEFUL
    rig.tree.ranking.queue(run)
    rig.serve(text(1, 17))  # now that it was used, it stays on the device
    run = rig.tree.ranking.pop(Tier.HOST, runs=True, checkpoints=False)
    assert isinstance(run, Run) and rig.tree.ranking.suffixes.of(run) == EvictableSuffix(0, unreachable=False, duplicate=True)
    rig.tree.ranking.queue(run)
    rig.cache.audit()


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_nobody_waits_for_a_store_that_never_answers(spec: str) -> None:
    """Evictions below may wait for a store that hangs: requests go on all the same, also before anything times out."""
    rig = Rig(ALL_MODELS[spec], device_pages=48, host_pages=64, write=WritePolicy.EXCLUSIVE, store=MemoryStore())

    def patiently(act: Callable[[], None]) -> None:
        for _ in range(10):
            try:
                return act()
            except NoRoom as refusal:
                if not refusal.waiting:
                    raise
                _answer_copies(rig)
        raise AssertionError("it waited for the store")

    for name in range(36):
        rig.clock.advance(0.01)
        prompt = text(name % 18, 29)
        leases: list[Lease] = []
        patiently(lambda prompt=prompt, leases=leases: leases.append(rig.open(prompt)))  # type: ignore[misc]
        with leases[0] as lease:
            _answer_copies(rig)
            rig.engine.check(lease)
            while lease.position < lease.num_tokens:
                end = min(rig.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens)
                patiently(lambda lease=lease, end=end: rig.compute(lease, end))  # type: ignore[misc]
                _answer_copies(rig)
        _answer_copies(rig)
        rig.cache.audit()
    assert rig.store_executor.pending, "the store was asked for nothing"


def _answer_copies(rig: Rig) -> None:
    rig.cache.step()
    while rig.executor.pending:
        rig.executor.finish_all()
        rig.cache.step()


def test_a_trunk_that_cannot_be_saved_keeps_the_branches_that_stand_on_it() -> None:
    rig = Rig(FULL, device_pages=64, host_pages=64, write=WritePolicy.EXCLUSIVE)
    trunk, branch = text(1, 16), [*text(1, 16), *text(2, 9)]
    for prompt in ([*trunk, *text(3, 9)], branch):
        rig.serve(prompt)
    rig.evict_all(Tier.HOST)
    for _ in range(2):  # first the branches are saved, then they leave and the trunk must be saved
        rig.settle()
        assert make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 64}).waiting
    at = rig.cache.lookup(branch)
    assert (at.device_tokens, at.host_tokens) == (16, 8)
    rig.fail_all()
    rig.clock.advance(1)
    rig.serve(text(4, 17))
    while make_room(rig.state, Tier.DEVICE, {Kind.PREFIX: 60}).waiting:
        rig.settle()
    at = rig.cache.lookup(branch)
    assert (at.device_tokens, at.host_tokens) == (16, 8), "what was used later went first"
    rig.evict_all(Tier.DEVICE)  # the last resort
    assert rig.cache.counters["evicted_cut_off"] == 1 and rig.restore(branch) == 0
    rig.idle_check()


def test_a_request_that_has_the_device_to_itself_is_not_refused_for_a_spare_page() -> None:
    """Its last page fits where no other would: it goes on, and leaves no checkpoint."""
    rig = Rig(FULL_POINT, device_pages=6, host_pages=64, write=WritePolicy.EXCLUSIVE)
    with rig.ready(text(1, 20)) as lease:
        assert rig.used(Tier.DEVICE, Kind.PREFIX) + rig.used(Tier.DEVICE, Kind.POINT) == 6
        rig.cache.grow(lease, 16)
        assert not len(lease.spare_points)
        rig.engine.compute(lease, 16)
        rig.cache.commit(lease, 16)
    assert rig.cache.counters["checkpoint_skipped_no_room"] == 1
    rig.idle_check()


def test_room_that_never_comes_takes_the_spare_page_back() -> None:
    rig = Rig(FULL_POINT, device_pages=8, host_pages=64, write=WritePolicy.EXCLUSIVE)
    with rig.ready(text(1, 17)) as lease:
        rig.cache.grow(lease, 16)
        assert len(lease.spare_points) == 1
        rig.cache.append(lease, text(2, 11))
        rig.cache.grow(lease, 28)
        assert not len(lease.spare_points) and len(lease.prefix_pages) == 7
        rig.cache.audit()
    rig.idle_check()


def test_a_failed_grow_gives_no_spare_page() -> None:
    rig = Rig(FULL_POINT, device_pages=12, host_pages=64, write=WritePolicy.EXCLUSIVE)
    rig.serve(text(1, 17))
    with rig.ready(text(2, 17)) as lease:
        rig.cache.append(lease, text(3, 12))
        held = rig.used(Tier.DEVICE, Kind.POINT)
        with pytest.raises(NoRoom):
            rig.cache.grow(lease, 60)
        assert not len(lease.spare_points) and rig.used(Tier.DEVICE, Kind.POINT) <= held
        rig.cache.audit()
    rig.idle_check()


def test_a_repeated_trunk_may_leave_the_host_whatever_stands_on_it_there() -> None:
    rig = Rig(FULL, device_pages=32, host_pages=32, write=WritePolicy.EXCLUSIVE)
    trunk = text(1, 16)
    rig.serve([*trunk, *text(2, 17)])
    rig.evict_all(Tier.DEVICE)
    rig.serve([*trunk, *text(3, 1)])
    runs = [run for node in rig.tree.nodes() if (run := node.runs[Tier.HOST]) is not None and node.end <= 4]
    assert runs and all(run.node.kids is not None for run in runs), "the branch should be below it on the host"
    tails = [rig.tree.ranking.suffixes.of(run) for run in runs]
    assert all(tail is not None and tail.duplicate for tail in tails)


def test_a_stem_that_was_to_leave_the_device_and_is_used_may_leave_the_host_though_branches_stand_on_it_there() -> None:
    rig = Rig(FULL, device_pages=64, host_pages=64, write=WritePolicy.EXCLUSIVE)
    stem = text(0, 16)
    for name in (1, 2):
        rig.serve([*stem, *text(name, 17)])
    rig.evict_all(Tier.HOST)
    for _ in range(2):  # the branches are saved and leave; then the stem is saved
        rig.evict_idle(Tier.DEVICE)
        rig.settle()
    (node,) = [node for node in rig.tree.nodes() if node.kids and node.parent]
    device, host = node.runs
    assert device is not None and device.leaving and host is not None and not host.entry
    lease = rig.ready([*stem, *text(3, 17)])
    assert host.entry, "the device has it too, and it is no candidate"
    rig.cache.audit()
    rig.cache.release(lease)
