"""Which tiers there are, when things are saved, and what happens when one is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import Kind, LeaseState, NoRoom, Tier, WritePolicy
from stepwell.base.tasks import PageIds, Purpose
from stepwell.memory.arena import Need
from stepwell.tiers import restore
from stepwell.tiers.state import MOST_UNUSED_NAMESPACES, CacheState
from toys import ALL_MODELS, EVICTIONS, FULL, FULL_POINT, HYBRID, PAGE, SMALL_PAGES, Rig, text


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_what_left_the_device_comes_back_from_the_host(spec: str) -> None:
    rig = Rig(ALL_MODELS[spec], host_pages=64)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 0
    again = rig.serve(text(1, 17))
    assert (again.device, again.host) == (0, 16)
    assert rig.serve(text(1, 17)).device == 16  # one load serves everybody after it


def test_write_through_saves_at_commit() -> None:
    rig = Rig(HYBRID, host_pages=64, write=WritePolicy.THROUGH)
    rig.serve(text(1, 17))
    assert rig.used(Tier.HOST, Kind.PREFIX) == 4 and rig.used(Tier.HOST, Kind.POINT) == 1


def test_selective_saves_at_the_second_use() -> None:
    rig = Rig(HYBRID, host_pages=64, write=WritePolicy.SELECTIVE)
    rig.serve(text(1, 17))
    assert rig.cache.stats().tier(Tier.HOST).used_bytes == 0
    rig.serve(text(1, 17))
    assert rig.used(Tier.HOST, Kind.PREFIX) == 4 and rig.used(Tier.HOST, Kind.POINT) == 1


def test_write_back_saves_when_the_device_needs_the_room() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=64, write=WritePolicy.EXCLUSIVE)
    rig.serve(text(1, 29))
    rig.serve(text(2, 29))
    rig.evict_all(Tier.HOST)
    assert rig.cache.stats().tier(Tier.HOST).used_bytes == 0
    with pytest.raises(NoRoom) as refusal:
        rig.open(text(3, 29))
    assert refusal.value.waiting and rig.pending(Purpose.SAVE)
    assert rig.restore(text(1, 29)) == 28  # not dropped before it is saved
    rig.settle()
    assert rig.serve(text(3, 29)).computed == 29
    assert rig.serve(text(1, 29)).host > 0


def test_write_back_gives_up_when_the_host_is_full_instead_of_blocking() -> None:
    rig = Rig(FULL, device_pages=16, host_pages=1, write=WritePolicy.EXCLUSIVE)
    for name in range(6):
        rig.serve(text(name, 29))
    assert rig.cache.counters["save_skipped_no_room"] > 0
    assert rig.cache.stats().tier(Tier.HOST).used_bytes <= 32


@pytest.mark.parametrize("write", list(WritePolicy))
def test_device_only(write: WritePolicy) -> None:
    rig = Rig(HYBRID, device_pages=48, write=write)
    for name in range(8):
        rig.serve(text(name, 17))
    assert rig.cache.counters["evicted_device_pages"] > 0
    assert rig.cache.stats().tier(Tier.HOST).used_bytes == 0
    assert rig.serve(text(7, 17)).device == 16


@pytest.mark.parametrize("policy", EVICTIONS)
def test_a_full_device_keeps_what_was_used_last(policy: str) -> None:
    rig = Rig(FULL, device_pages=20, tuning=replace(SMALL_PAGES, eviction=EVICTIONS[policy]))
    for name in range(10):
        rig.clock.advance(5)
        rig.serve(text(name, 17))
        rig.clock.advance(5)
        rig.serve(text(0, 17))
    assert rig.restore(text(0, 17)) == 16 and rig.restore(text(1, 17)) == 0


def test_available_bytes_are_what_no_request_holds() -> None:
    rig = Rig(FULL, device_pages=32)
    rig.serve(text(1, 33))
    assert (
        rig.cache.stats().tier(Tier.DEVICE).available_bytes == 32 * 32 and rig.cache.stats().tier(Tier.HOST).available_bytes == 0
    )
    lease = rig.ready(text(1, 33))
    assert rig.cache.stats().tier(Tier.DEVICE).available_bytes == (32 - 9) * 32
    rig.cache.release(lease)


@pytest.mark.parametrize("spec", ["window", "point", "hybrid"])
def test_a_checkpoint_loaded_again_is_kept_on_the_device(spec: str) -> None:
    rig = Rig(ALL_MODELS[spec], host_pages=64)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    for _ in range(2):
        rig.cache.release(rig.ready(text(1, 17)))
    checkpoint = rig.cache.lookup(text(1, 17)).checkpoint
    assert checkpoint is not None and checkpoint.ready_in(Tier.DEVICE) is not None
    assert rig.cache.counters["checkpoints_promoted"] == 1
    before = rig.executor.num_submitted
    rig.cache.release(rig.ready(text(1, 17)))
    assert rig.executor.num_submitted - before == len(rig.spec.parts(Kind.POINT))  # a point is copied within the device
    rig.idle_check()


def test_no_more_is_evicted_than_is_missing() -> None:
    rig = Rig(FULL, device_pages=32)
    rig.serve(text(1, 4 * 20 + 1))
    rig.cache.release(rig.ready(text(2, 4 * 13)))
    assert rig.restore(text(1, 81)) == 4 * 19


def test_neighbouring_checkpoints_share_window_pages_in_both_tiers() -> None:
    rig = Rig(HYBRID, host_pages=128)
    rig.serve(text(1, 41), hints=(32, 36))  # windows of two pages: [6,8) [7,9) [8,10)
    assert rig.used(Tier.DEVICE, Kind.WINDOW) == rig.used(Tier.HOST, Kind.WINDOW) == 4
    rig.evict_all(Tier.DEVICE)
    for upto in (33, 37, 41):
        assert rig.serve(text(1, upto)).computed == 1


def test_a_load_that_takes_too_long_is_given_up_and_does_no_harm_later() -> None:
    rig = Rig(HYBRID, host_pages=64, tuning=replace(SMALL_PAGES, copy_timeout_s=2.0))
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(text(1, 17))
    rig.clock.advance(1.9)
    assert rig.cache.step().failed == () and lease.state is LeaseState.LOADING
    rig.clock.advance(0.2)
    report = rig.cache.step()
    assert report.failed == (lease,) and report.failures == ("no answer within 2 s",)
    assert rig.cache.counters["abandoned_jobs"] == 1 and rig.cache.step().failures == ()
    rig.cache.release(lease)
    rig.cache.audit()
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 4, "a page went back while a rank may still write it"
    assert rig.serve_beside(text(1, 17)) == 17
    rig.settle()  # the answer that came too late
    rig.idle_check()
    assert rig.serve(text(1, 17)).device == 16


@pytest.mark.parametrize("error", [None, "too late, and wrong"])
def test_a_save_that_takes_too_long_counts_as_failed_and_holds_its_pages_till_it_answers(error: str | None) -> None:
    rig = Rig(HYBRID, host_pages=64, tuning=replace(SMALL_PAGES, copy_timeout_s=2.0))
    lease = rig.ready(text(1, 17))
    rig.compute(lease, 16, last=True)
    rig.cache.release(lease)
    rig.clock.advance(2.0)
    assert rig.cache.step().failures
    rig.cache.audit()
    assert rig.used(Tier.HOST, Kind.PREFIX) == 4
    for job in rig.executor.pending:
        rig.executor.answer(job, error=error)
    rig.cache.step()
    rig.idle_check()
    assert rig.cache.stats().tier(Tier.HOST).used_bytes == 0 and rig.serve(text(1, 17)).device == 16


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_its_own_bytes_back(ranks: int) -> None:
    rig = Rig(HYBRID, host_pages=64, ranks=ranks)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    before = rig.engine.rows_checked
    assert rig.serve(text(1, 17)).host == 16
    assert (rig.engine.rows_checked - before) % ranks == 0 and rig.engine.rows_checked > before


def test_room_that_is_held_by_others_is_refused_and_tried_again() -> None:
    rig = Rig(FULL, device_pages=8)
    holder = rig.ready(text(1, 29))
    with pytest.raises(NoRoom, match="release a lease or wait") as refusal:
        rig.open(text(2, 17))
    assert not refusal.value.waiting
    rig.cache.audit()
    rig.cache.release(holder)
    rig.serve(text(2, 17))


def test_used_bytes_never_exceed_a_budget_that_is_not_a_whole_number_of_pages() -> None:
    rig = Rig(HYBRID, device_pages=37, host_pages=23)
    for name in range(10):
        rig.serve([*text(1, 4), *text(name, 9)])
        assert (
            rig.cache.stats().tier(Tier.DEVICE).used_bytes <= 37 * 32 and rig.cache.stats().tier(Tier.HOST).used_bytes <= 23 * 32
        )


def test_room_that_is_on_its_way_for_a_promotion_is_not_reported_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt sends every candidate off to be saved; one without the promotion would find none, and give up."""
    rig = Rig(FULL_POINT, host_pages=64)
    for _ in range(2):
        rig.serve(text(1, 17))
        rig.evict_all(Tier.DEVICE)
    asked = []

    def refuse(state: CacheState, tier: Tier, need: Need, *, tenant: str | None) -> dict[Kind, PageIds]:
        asked.append(need[Kind.POINT])
        raise NoRoom("being saved", waiting=len(asked) == 1)

    monkeypatch.setattr(restore, "allocate", refuse)
    with pytest.raises(NoRoom) as refusal:
        rig.open(text(1, 17))
    assert asked == [2] and refusal.value.waiting


def test_a_namespace_stays_known_however_many_others_come_while_its_request_runs() -> None:
    rig = Rig(FULL, device_pages=64)
    mine = rig.cache.namespace_for(salt="mine")
    match = rig.cache.lookup(text(1, 4 * PAGE + 1), namespace=mine)
    with rig.cache.acquire(match) as lease:
        for salt in range(MOST_UNUSED_NAMESPACES + 10):
            rig.cache.acquire(rig.cache.lookup([1, 2], namespace=rig.cache.namespace_for(salt=str(salt)))).__exit__(
                None, None, None
            )
        rig.cache.commit(lease, 4 * PAGE)
    assert mine in rig.cache.namespaces and "mine" not in repr(mine)
