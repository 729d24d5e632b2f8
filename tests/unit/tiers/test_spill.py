"""Rows of running requests under pressure: which request sheds, what stays, what is assigned, and what is freed."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import Kind, Lease, NoRoom, Tier
from stepwell.base.tasks import Purpose
from stepwell.tiers.eviction import make_room
from stepwell.tiers.spill import TAIL_PAGES
from toys import PAGE, SPILLING, Rig, text

PAGE_OBJECTS = 3  # of 32 bytes, for a page and its rows on the device


def rig(pages: int = 40, host_pages: int = 400, hot_rows: int = 2 * PAGE, **options: object) -> Rig:
    return Rig(SPILLING, device_pages=pages * PAGE_OBJECTS, host_pages=host_pages, hot_rows=hot_rows, **options)  # type: ignore[arg-type]


def running(tiers: Rig, name: int, pages: int, **request: object) -> Lease:
    """A request that has computed `pages` pages and one token, all saved."""
    lease = tiers.ready(text(name, pages * PAGE + 1), **request)
    tiers.prefill(lease)
    return lease


def backed(tiers: Rig, lease: Lease) -> list[int]:
    """Which of its pages have their rows on the host alone."""
    assert tiers.cache.row_pages is not None
    return np.flatnonzero(tiers.cache.row_pages.backed(lease.prefix_pages)).tolist()


def press(tiers: Rig, rows: int) -> bool:
    """Requests space for `rows` more ROWS pages than are in use."""
    return make_room(tiers.state, Tier.DEVICE, {Kind.ROWS: rows}).fits


def spill_all(tiers: Rig, lease: Lease) -> None:
    """Makes the lease shed all that it can."""
    assert tiers.state.spill is not None
    free = tiers.state.arena(Tier.DEVICE)
    need = 1
    while free.fits({Kind.ROWS: need + 1}):
        need += 1
    sheddable = (lease.position // PAGE + 1 - TAIL_PAGES) - tiers.state.config.hot_rows // PAGE
    assert tiers.state.spill({Kind.ROWS: need + sheddable}), "its rows could not go"


def test_rows_stay_while_there_is_anything_idle() -> None:
    tiers = rig(pages=18)
    tiers.serve(text(1, 8 * PAGE + 1))
    lease = running(tiers, 2, 8)
    other = running(tiers, 3, 6)
    assert not backed(tiers, lease) and not backed(tiers, other)
    assert tiers.cache.counters["spilled_pages"] == 0 and tiers.cache.counters["evicted_device_pages"] > 0


def test_rows_that_are_being_loaded_are_not_counted_twice() -> None:
    """Otherwise requests that come while others load would have to do with hot pages, though there is space for all."""
    tiers = rig(pages=29)
    for name in range(6):
        tiers.serve(text(name, 8 * PAGE + 1))
    leases = [tiers.open(text(name, 8 * PAGE + 1)) for name in range(3)]
    assert tiers.cache.copying and not any(lease.ready for lease in leases)
    tiers.settle()
    assert all(lease.ready and not backed(tiers, lease) for lease in leases)
    for lease in leases:
        tiers.engine.check(lease)
        tiers.cache.release(lease)
    tiers.idle_check()


def test_the_front_is_shed_the_tail_stays_and_the_first_rows_become_hot_pages() -> None:
    tiers = rig()
    lease = running(tiers, 1, 12)
    rows = tiers.cache.row_pages.rows[lease.prefix_pages].tolist()
    used = tiers.used(Tier.DEVICE, Kind.ROWS)
    spill_all(tiers, lease)
    assert backed(tiers, lease) == list(range(11)), "the last full page and the one being written stay"
    assert lease.hot_pages.tolist() == rows[:2] and len(lease.hot_numbers) == 2
    assert tiers.used(Tier.DEVICE, Kind.ROWS) == used - 11 + 2
    tiers.cache.audit()
    tiers.engine.check(lease)
    tiers.decode(lease, [5] * (3 * PAGE))
    tiers.engine.check(lease)
    assert backed(tiers, lease) == list(range(11)), "what is new is resident"
    tiers.cache.release(lease)
    assert not tiers.cache.row_pages.hot
    tiers.idle_check()


def test_a_lease_that_would_free_nothing_is_left_alone() -> None:
    tiers = rig(hot_rows=8 * PAGE)
    lease = running(tiers, 1, 9)  # eight may go, which it would get back as hot pages
    assert not tiers.state.spill({Kind.ROWS: 1000}) and not backed(tiers, lease)
    longer = running(tiers, 2, 12)
    spill_all(tiers, longer)
    assert backed(tiers, longer) and not backed(tiers, lease)
    tiers.cache.audit()


def test_nothing_is_shed_when_that_would_not_do() -> None:
    tiers = rig()
    lease = running(tiers, 1, 12)
    assert not tiers.state.spill({Kind.ROWS: 10_000})
    assert not backed(tiers, lease) and tiers.cache.counters["spilled_pages"] == 0


def test_the_least_urgent_sheds_first_and_then_the_longest() -> None:
    tiers = rig(pages=60)
    urgent, short, long = running(tiers, 1, 16, priority=3), running(tiers, 2, 10), running(tiers, 3, 14)
    press(tiers, _free_rows(tiers) + 3)
    assert backed(tiers, long) and not backed(tiers, short) and not backed(tiers, urgent)
    press(tiers, _free_rows(tiers) + 8)
    assert backed(tiers, short) and not backed(tiers, urgent)
    tiers.cache.audit()


def _free_rows(tiers: Rig) -> int:
    arena, count = tiers.state.arena(Tier.DEVICE), 0
    while arena.fits({Kind.ROWS: count + 1}):
        count += 1
    return count


def test_rows_that_the_host_does_not_have_yet_are_room_on_its_way() -> None:
    tiers = rig(pages=20)
    lease = tiers.ready(text(1, 12 * PAGE + 1))
    tiers.compute(lease, 12 * PAGE)  # its save is not answered
    assert tiers.pending(Purpose.SAVE)
    with pytest.raises(NoRoom) as refusal:
        tiers.open(text(2, 12 * PAGE))
    assert refusal.value.waiting and not backed(tiers, lease)
    tiers.settle()
    other = tiers.open(text(2, 12 * PAGE))
    assert backed(tiers, lease)
    tiers.cache.audit()
    tiers.engine.check(lease)
    assert len(other.prefix_pages) == 12


def test_rows_without_room_on_the_host_stay_and_the_skip_is_counted() -> None:
    tiers = rig(pages=16, host_pages=6)  # four host pages
    lease = running(tiers, 1, 12)
    assert tiers.cache.counters["save_skipped_no_room"] > 0
    with pytest.raises(NoRoom) as refusal:
        tiers.open(text(2, 12 * PAGE))
    assert not refusal.value.waiting and not backed(tiers, lease)
    tiers.engine.check(lease)
    tiers.cache.release(lease)
    tiers.idle_check()


def test_a_request_for_itself_alone_does_not_spill() -> None:
    tiers = rig()
    lease = running(tiers, 1, 12, publish=False)
    assert not tiers.state.spill({Kind.ROWS: _free_rows(tiers) + 1}) and not backed(tiers, lease)


def test_a_duplicate_of_what_another_published_first_does_not_spill() -> None:
    tiers = rig()
    first, second = tiers.ready(text(1, 12 * PAGE + 1)), tiers.ready(text(1, 12 * PAGE + 1))
    for lease in (first, second):
        tiers.prefill(lease)
    spill_all(tiers, first)
    assert backed(tiers, first) and not backed(tiers, second)
    tiers.cache.audit()
    for lease in (first, second):
        tiers.engine.check(lease)


def test_a_shared_page_is_shed_for_all_and_each_gets_hot_pages_of_its_own() -> None:
    tiers = rig(pages=80)
    leader = running(tiers, 1, 12)
    follower = tiers.ready([*text(1, 12 * PAGE), *text(2, 5)], priority=1)
    tiers.prefill(follower)
    assert follower.sources.device == 12 * PAGE and not len(follower.hot_pages)
    spill_all(tiers, leader)
    assert backed(tiers, follower) == backed(tiers, leader) and not len(follower.hot_pages)
    tiers.engine.check(follower)
    tiers.decode(follower, [3])
    assert len(follower.hot_pages) == 2 and not set(follower.hot_pages.tolist()) & set(leader.hot_pages.tolist())
    tiers.cache.release(leader)
    tiers.engine.check(follower)
    tiers.cache.audit()
    tiers.cache.release(follower)
    tiers.idle_check()


def test_pages_of_one_request_go_before_shared_ones() -> None:
    tiers = rig(pages=80)
    leader = running(tiers, 1, 12)
    follower = tiers.ready([*text(1, 6 * PAGE), *text(2, 10 * PAGE + 1)])
    tiers.prefill(follower)
    press(tiers, _free_rows(tiers) + 2)
    assert min(backed(tiers, follower)) == 6, "its own part, not what it shares"
    assert leader.ready
    tiers.cache.audit()


def test_without_room_for_hot_pages_a_request_goes_on() -> None:
    tiers = rig(pages=30)
    leader = running(tiers, 1, 12)
    follower = tiers.ready([*text(1, 12 * PAGE), *text(2, 2)])
    spill_all(tiers, leader)
    arena = tiers.state.arena(Tier.DEVICE)
    taken = arena.alloc({Kind.ROWS: _free_rows(tiers)})[Kind.ROWS]
    assert tiers.used(Tier.DEVICE, Kind.PREFIX)
    tiers.cache.grow(leader, leader.position)
    before = tiers.cache.counters["hot_pages_skipped_no_room"]
    tiers.cache.grow(follower, 12 * PAGE)
    assert tiers.cache.counters["hot_pages_skipped_no_room"] == before + 1 and not len(follower.hot_pages)
    tiers.cache.grow(follower, 12 * PAGE)
    assert tiers.cache.counters["hot_pages_skipped_no_room"] == before + 1, "not tried again in every step"
    tiers.engine.check(follower)
    arena.release(Kind.ROWS, taken)
    tiers.cache.grow(follower, 12 * PAGE)
    assert len(follower.hot_pages) == 2
    tiers.cache.audit()


def test_a_host_page_that_has_a_running_requests_rows_is_not_evicted() -> None:
    tiers = rig(pages=40, host_pages=30)
    lease = running(tiers, 1, 12)
    spill_all(tiers, lease)
    tiers.evict_idle(Tier.HOST)
    tiers.cache.audit()
    tiers.engine.check(lease)
    assert tiers.used(Tier.HOST, Kind.PREFIX) >= 11
    tiers.cache.release(lease)
    tiers.evict_all(Tier.DEVICE)
    tiers.evict_all(Tier.HOST)
    assert tiers.used(Tier.HOST, Kind.PREFIX) == 0
    tiers.idle_check()


def test_a_prompt_is_restored_without_its_rows_where_these_do_not_fit() -> None:
    tiers = rig(pages=20, hot_rows=PAGE)
    tiers.serve(text(1, 10 * PAGE + 1))
    tiers.evict_all(Tier.DEVICE)
    busy = running(tiers, 2, 14)
    lease = tiers.ready(text(1, 10 * PAGE + 1))
    assert lease.sources.host == 10 * PAGE and backed(tiers, lease) == list(range(10)) and len(lease.hot_pages) == 1
    assert tiers.cache.counters["loaded_index_only_pages"] == 10
    tiers.prefill(lease)
    tiers.engine.check(lease)
    tiers.engine.check(busy)
    tiers.cache.release(lease)
    match = tiers.cache.lookup(text(1, 10 * PAGE + 1))
    assert (match.device_tokens, match.host_tokens) == (0, 10 * PAGE), "on the device without their rows"
    again = tiers.ready(text(1, 10 * PAGE + 1))
    assert again.sources.host == 10 * PAGE and len(again.hot_pages) == 1
    tiers.cache.release(again)
    tiers.cache.release(busy)
    tiers.idle_check()


def test_an_index_only_load_that_fails_leaves_nothing_behind() -> None:
    tiers = rig(pages=20, hot_rows=PAGE)
    tiers.serve(text(1, 10 * PAGE + 1))
    tiers.evict_all(Tier.DEVICE)
    busy = running(tiers, 2, 14)
    lease = tiers.open(text(1, 10 * PAGE + 1))
    tiers.fail_all()
    assert lease.failed
    tiers.cache.audit()
    tiers.cache.release(lease)
    assert tiers.restore(text(1, 10 * PAGE + 1)) == 0
    tiers.engine.check(busy)
    tiers.cache.release(busy)
    tiers.idle_check()


def test_a_resumed_prompt_is_resident_where_that_takes_room_from_nobody() -> None:
    tiers = rig(pages=40)
    tiers.serve(text(1, 10 * PAGE + 1))
    tiers.evict_all(Tier.DEVICE)
    busy = running(tiers, 2, 14)
    lease = tiers.ready(text(1, 10 * PAGE + 1))
    assert not backed(tiers, lease) and not backed(tiers, busy) and not len(lease.hot_pages)


def test_a_request_has_no_more_hot_pages_than_pages_whose_rows_are_away() -> None:
    """It shares the beginning of a long one: what it could never fill would be memory that others lack."""
    tiers = rig(hot_rows=6 * PAGE)
    longer = running(tiers, 1, 16)
    spill_all(tiers, longer)
    assert len(longer.hot_pages) == 6 and backed(tiers, longer)[:3] == [0, 1, 2]
    short = tiers.ready([*text(1, 3 * PAGE), *text(2, PAGE + 1)])
    assert backed(tiers, short) == [0, 1, 2] and len(short.hot_pages) == 3
    tiers.prefill(short)
    tiers.decode(short, [1] * 2 * PAGE)
    assert len(short.hot_pages) == 3
    tiers.engine.check(short)
    tiers.cache.release(short)
    tiers.cache.release(longer)
    tiers.idle_check()


def test_a_short_prompt_is_restored_with_its_rows_where_hot_ones_would_take_as_much_room() -> None:
    """Others shed for it either way: with its rows there it need fetch nothing."""
    tiers = rig(pages=20, hot_rows=4 * PAGE)
    tiers.serve(text(1, 4 * PAGE + 1))
    tiers.evict_all(Tier.DEVICE)
    busy = running(tiers, 2, 16)
    lease = tiers.ready(text(1, 4 * PAGE + 1))
    assert lease.sources.host == 4 * PAGE and not backed(tiers, lease) and not len(lease.hot_pages)
    assert backed(tiers, busy) and tiers.cache.counters["loaded_index_only_pages"] == 0
    tiers.engine.check(busy)
    tiers.prefill(lease)
    tiers.engine.check(lease)
    tiers.cache.release(lease)
    tiers.cache.release(busy)
    tiers.idle_check()


def test_what_was_flushed_under_a_request_is_offered_again_with_its_host_pages() -> None:
    tiers = rig()
    lease = running(tiers, 1, 12)
    spill_all(tiers, lease)
    tiers.cache.flush()
    tiers.cache.audit()
    tiers.engine.check(lease)
    saved = tiers.cache.counters["save_pages"]
    tiers.decode(lease, [5] * PAGE)
    assert tiers.cache.counters["save_pages"] == saved + 2, "the tail alone is copied again"
    match = tiers.cache.lookup([*text(1, 12 * PAGE + 1), *[5] * PAGE])
    assert match.restore_tokens == 13 * PAGE
    tiers.cache.audit()
    tiers.cache.release(lease)
    tiers.idle_check()
    tiers.evict_all(Tier.DEVICE)
    assert tiers.serve(text(1, 12 * PAGE + 1)).host == 12 * PAGE


@pytest.mark.parametrize("when", ["running", "spilled", "grown"])
def test_a_request_that_is_aborted_leaks_nothing(when: str) -> None:
    tiers = rig()
    lease = running(tiers, 1, 12)
    if when != "running":
        spill_all(tiers, lease)
    if when == "grown":
        tiers.cache.grow(lease, 12 * PAGE + 1 + 3 * PAGE)  # for guesses that never were committed
    tiers.cache.release(lease)
    tiers.cache.audit()
    tiers.cache.clear()
    tiers.settle()
    assert not any(arena.used_bytes for arena in tiers.state.tree.arenas.values())


def test_a_preempted_request_comes_back_to_what_it_had() -> None:
    tiers = rig(pages=30)
    lease = running(tiers, 1, 12)
    spill_all(tiers, lease)
    tiers.cache.release(lease)
    again = tiers.ready(text(1, 12 * PAGE + 1))
    assert (again.sources.device, again.sources.host) == (PAGE, 11 * PAGE)
    tiers.prefill(again)
    tiers.engine.check(again)
    assert len(again.hot_pages) == 2


def test_a_prompt_longer_than_the_device_is_computed_chunk_by_chunk() -> None:
    tiers = rig(pages=16, hot_rows=PAGE)  # of rows and pages together, or many more without rows
    prompt, chunk = text(1, 20 * PAGE), 3 * PAGE
    assert tiers.cache.could_hold(len(prompt), chunk_tokens=chunk)
    lease = tiers.ready(prompt)
    for end in range(chunk, len(prompt) + chunk, chunk):
        tiers.patiently(lambda end=end: tiers.compute(lease, min(end, len(prompt))))  # type: ignore[misc]
        tiers.settle()
        tiers.engine.check(lease)
        tiers.cache.audit()
    assert len(backed(tiers, lease)) > 8
    tiers.decode(lease, [1] * 2 * PAGE)
    tiers.engine.check(lease)
    tiers.cache.release(lease)
    tiers.idle_check()


def test_how_long_a_request_can_be_counts_what_must_stay_and_what_the_host_holds() -> None:
    """Not what the device could hold with all rows (as #33876), and not without the host (as #23704)."""
    longest = {
        host: max(pages for pages in range(1, 200) if rig(pages=16, host_pages=host, hot_rows=PAGE).cache.could_hold(
            pages * PAGE, chunk_tokens=2 * PAGE))
        for host in (6, 30, 400)
    }  # fmt: skip
    assert 14 <= longest[6] <= 16, "all of it on the device: the host has no space"
    assert longest[30] == 20, "as much as the host holds"
    assert 20 <= longest[400] <= 24, "what is left next to the rows that stay"


def test_room_is_reclaimed_in_both_tiers_before_anybody_is_refused() -> None:
    """Idle pages on the device whose rows are on the host hold pages there: they go for who comes (as in review of #51323)."""
    tiers = rig(pages=20, host_pages=30, hot_rows=PAGE)
    lease = running(tiers, 1, 14)
    spill_all(tiers, lease)
    tiers.cache.release(lease)
    assert tiers.cache.row_pages is not None and len(tiers.cache.row_pages.idle_backed()) > 10
    for name in (2, 3):
        lease = running(tiers, name, 14)
        tiers.engine.check(lease)
        tiers.cache.release(lease)
        tiers.settle()
        match = tiers.cache.lookup(text(name, 14 * PAGE + 1))
        assert match.restore_tokens == 14 * PAGE
        tiers.evict_all(Tier.DEVICE)
        assert tiers.cache.lookup(text(name, 14 * PAGE + 1)).host_tokens == 14 * PAGE, "all of it was saved"
    tiers.idle_check()


def test_resuming_from_the_host_takes_no_more_than_was_counted() -> None:
    """A request that resumes needs no more of the device than one that computes (as #57457)."""
    tiers = rig(pages=16, hot_rows=PAGE)
    prompt = text(1, 18 * PAGE + 1)
    assert tiers.cache.could_hold(len(prompt) + PAGE, chunk_tokens=2 * PAGE)
    for _ in range(3):
        with tiers.ready(prompt) as lease:
            while lease.position < len(prompt):
                end = min(lease.position + 2 * PAGE, len(prompt))
                tiers.patiently(lambda end=end, lease=lease: tiers.compute(lease, end))  # type: ignore[misc]
                tiers.settle()
            tiers.engine.check(lease)
        tiers.settle()
        tiers.evict_all(Tier.DEVICE)
    tiers.idle_check()


def test_a_failed_load_takes_out_pages_that_stand_on_the_same_host_pages() -> None:
    tiers = rig(pages=40)
    lease = running(tiers, 1, 12)
    spill_all(tiers, lease)
    copies, pages = tiers.state.copies, tiers.cache.row_pages.host[lease.prefix_pages[:2]]
    from stepwell.base.tasks import Copy, Span

    fresh = tiers.state.arena(Tier.DEVICE).alloc({Kind.PREFIX: 2})[Kind.PREFIX]
    copies.copy(Purpose.LOAD, [Copy(source=Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=pages),
                                    target=Span(tier=Tier.DEVICE, kind=Kind.PREFIX, ids=fresh))])  # fmt: skip
    tiers.fail_all()
    tiers.state.tree.release(Tier.DEVICE, Kind.PREFIX, fresh)
    assert tiers.restore(text(1, 12 * PAGE + 1)) == 0
    tiers.cache.audit()
    tiers.decode(lease, [5] * (2 * PAGE))
    assert tiers.restore(text(1, 12 * PAGE + 1)) == 0, "the request goes on, and brings none of them back"
    tiers.engine.check(lease)
    tiers.cache.release(lease)
    tiers.idle_check()


def test_rows_that_are_pinned_on_the_host_stay_readable_there() -> None:
    tiers = rig(pages=30)
    lease = running(tiers, 1, 12)
    spill_all(tiers, lease)
    pin = tiers.cache.pins.add(text(1, 12 * PAGE + 1))
    tiers.cache.release(lease)
    tiers.evict_all(Tier.DEVICE)
    tiers.evict_all(Tier.HOST)
    assert tiers.restore(text(1, 12 * PAGE + 1)) == pin.tokens == 12 * PAGE
    tiers.cache.audit()
