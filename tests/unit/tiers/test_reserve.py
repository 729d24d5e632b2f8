"""What will leave the device next is saved ahead, so that a request that needs a little room never waits for a copy."""

from __future__ import annotations

import pytest

from stepwell import Kind, Tier, WritePolicy
from stepwell.base.tasks import Purpose
from stepwell.store.memory import MemoryStore
from stepwell.tiers.clean import is_clean
from stepwell.tree.eviction_order import CLEAN, REPEATED, USEFUL
from stepwell.tree.node import Residency, Run, Victim
from toys import ALL_MODELS, FULL, FULL_POINT, OBJECT_BYTES, Rig, text

SAVING_LATE = [WritePolicy.ADAPTIVE, WritePolicy.BACK]
DEVICE_PAGES = 1024  # so 16 are kept clean, and 8 of each sort at least


def _stream(rig: Rig, names: range) -> None:
    """Prompts one after the other. What is saved ends between two of them, and no call waits for room."""
    for name in names:
        rig.clock.advance(1.0)
        with rig.open(text(name, 17)) as lease:
            while lease.position < lease.num_tokens:
                rig.compute(lease, min(rig.cache.next_stop(lease) or lease.num_tokens, lease.num_tokens))
                for job in rig.pending(Purpose.FORK):
                    rig.executor.finish(job)
                rig.cache.step()
        rig.settle()


def _fill(rig: Rig, names: range) -> None:
    for name in names:
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(name, 17))


def _ahead(rig: Rig) -> list[Victim]:
    assert rig.state.clean is not None
    return [victim for victim in rig.state.clean if is_clean(victim)]


@pytest.mark.parametrize("write", SAVING_LATE)
@pytest.mark.parametrize("with_store", [False, True], ids=["two tiers", "three tiers"])
def test_a_stream_of_prompts_that_fit_into_the_reserve_never_waits(write: WritePolicy, with_store: bool) -> None:
    store = MemoryStore(budget_bytes=1 << 30) if with_store else None
    rig = Rig(FULL, device_pages=DEVICE_PAGES, host_pages=DEVICE_PAGES, write=write, store=store)
    _fill(rig, range(400))
    before = rig.cache.counters["room_waits_device"]
    _stream(rig, range(400, 500))  # would raise NoRoom
    assert rig.cache.counters["room_waits_device"] == before
    rig.idle_check()


def test_nothing_is_saved_ahead_while_the_device_has_room() -> None:
    rig = Rig(FULL, device_pages=DEVICE_PAGES, host_pages=DEVICE_PAGES, write=WritePolicy.BACK)
    _fill(rig, range(100))
    assert not _ahead(rig) and rig.used(Tier.HOST, Kind.PREFIX) == 0


@pytest.mark.parametrize("options", [{"write": WritePolicy.THROUGH, "host_pages": 64}, {"write": WritePolicy.BACK}])
def test_caches_that_save_nothing_when_it_leaves_keep_no_reserve(options: dict[str, object]) -> None:
    rig = Rig(FULL, **options)  # type: ignore[arg-type]
    assert rig.state.clean is None


@pytest.mark.parametrize("write", SAVING_LATE)
@pytest.mark.parametrize("model", sorted(ALL_MODELS))
def test_the_reserve_is_small(model: str, write: WritePolicy) -> None:
    rig = Rig(ALL_MODELS[model], device_pages=DEVICE_PAGES, host_pages=4 * DEVICE_PAGES, write=write)
    _fill(rig, range(300))
    sizes = [each.num_pages * OBJECT_BYTES if isinstance(each, Run) else each.size_bytes for each in _ahead(rig)]
    assert 0 < sum(sizes) <= (16 + 3 * 8) * OBJECT_BYTES, "more than the reserve and what was begun of each sort"


def test_a_long_path_is_saved_ahead_from_its_end_and_in_part() -> None:
    rig = Rig(FULL, device_pages=DEVICE_PAGES, host_pages=DEVICE_PAGES, write=WritePolicy.BACK)
    for name in range(6):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(name, 4 * 170))
    assert 12 <= rig.used(Tier.HOST, Kind.PREFIX) - rig.cache.counters["evicted_device_pages"] <= 40
    rig.idle_check()


def _a_reserve(model: str = "full") -> Rig:
    rig = Rig(ALL_MODELS[model], device_pages=DEVICE_PAGES, host_pages=DEVICE_PAGES, write=WritePolicy.BACK)
    _fill(rig, range(300))
    assert _ahead(rig)
    return rig


def test_what_was_saved_ahead_counts_on_the_host_as_if_the_device_had_it_no_more() -> None:
    rig = _a_reserve()
    for run in _ahead(rig):
        assert isinstance(run, Run) and run.standing == CLEAN
        host = run.node.runs[Tier.HOST]
        assert host is not None and host.standing == USEFUL
    rig.idle_check()


def test_pages_that_are_used_after_they_were_saved_ahead_are_the_first_to_leave_the_host() -> None:
    rig = _a_reserve()
    run = _ahead(rig)[0]
    assert isinstance(run, Run)
    node = run.node
    prompt = next(text(name, 17) for name in range(300) if rig.cache.lookup(text(name, 17)).path[-1:] == (node,))
    rig.clock.advance(1.0)
    assert rig.serve(prompt).device > 0
    here = node.runs[Tier.HOST]
    assert here is not None and not node.runs[Tier.DEVICE].leaving  # type: ignore[union-attr]
    assert here.standing == REPEATED and not is_clean(run)


def test_a_checkpoint_that_is_used_after_it_was_saved_ahead_is_the_first_to_leave_the_host() -> None:
    rig = _a_reserve("point")
    residency = next(each for each in _ahead(rig) if isinstance(each, Residency))
    checkpoint = residency.checkpoint
    here = checkpoint.held[Tier.HOST]
    assert here is not None and rig.tree.ranking.place_of(here) is not None, "it is taken for a repetition"
    prompt = next(text(name, 17) for name in range(300) if rig.cache.lookup(text(name, 17)).checkpoint is checkpoint)
    rig.clock.advance(1.0)
    rig.serve(prompt)
    assert not residency.leaving and here.standing == REPEATED
    rig.idle_check()


def test_what_is_worth_less_than_all_on_the_host_is_not_saved_ahead() -> None:
    rig = Rig(FULL, device_pages=DEVICE_PAGES, host_pages=64, write=WritePolicy.BACK)
    for name in range(16):
        rig.serve_without_audit(text(name, 17), priority=10)
    rig.evict_all(Tier.DEVICE)
    assert rig.used(Tier.HOST, Kind.PREFIX) == 64
    _fill(rig, range(100, 400))
    assert [rig.restore(text(name, 17)) for name in range(16)] == [16] * 16
    rig.idle_check()


def test_copies_ahead_that_fail_are_not_tried_again_and_nobody_is_worse_off() -> None:
    rig = Rig(FULL_POINT, device_pages=DEVICE_PAGES, host_pages=DEVICE_PAGES, write=WritePolicy.BACK)
    for name in range(120):
        rig.clock.advance(1.0)
        rig.serve_without_audit(text(name, 17))
        while rig.pending(Purpose.SAVE):
            rig.fail_all()
    assert not _ahead(rig)
    rig.idle_check()
