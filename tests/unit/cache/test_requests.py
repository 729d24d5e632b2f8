"""The life of a request: acquire, commit, decode, release, and where its tokens came from."""

from __future__ import annotations

import pytest

from stepwell import Kind, LeaseState, PlacementConfig, Tier
from stepwell.base.tasks import Purpose
from stepwell.policy.placement import PlacementRules
from toys import ALL_MODELS, FULL, FULL_POINT, FULL_WINDOW, HYBRID, KV, Rig, model, swa, text


@pytest.mark.parametrize("spec", ALL_MODELS)
def test_a_prompt_served_twice_resumes_at_its_end(spec: str) -> None:
    rig = Rig(ALL_MODELS[spec])
    first, second = rig.serve(text(1, 18)), rig.serve(text(1, 18))
    assert (first.computed, first.device) == (18, 0)
    assert (second.computed, second.device) == (2, 16)


def test_a_lease_says_where_it_stands() -> None:
    rig = Rig(HYBRID)
    lease = rig.open(text(1, 10))
    assert (lease.resume, lease.position, lease.prompt_tokens, lease.num_tokens, lease.stops) == (0, 0, 10, 10, (8,))
    assert repr(lease) == "Lease(#1, pages=3, at token 0 of 10, ready)"
    rig.cache.append(lease, [1, 2])
    assert lease.num_tokens == 12 and lease.prompt_tokens == 10
    rig.cache.release(lease)
    assert lease.state is LeaseState.CLOSED and "closed" in repr(lease)


def test_sources_always_add_up_to_the_prompt() -> None:
    rig = Rig(HYBRID, device_pages=32, host_pages=256)
    totals = dict.fromkeys(("device", "host", "store", "computed"), 0)
    for turn in range(12):
        tokens = [*text(1, 8), *text(2 + turn % 4, 13)]
        if turn % 5 == 4:
            rig.evict_all(Tier.DEVICE)
        sources = rig.serve(tokens)
        assert sources.total == len(tokens) == sources.device + sources.host + sources.store + sources.computed
        for name in totals:
            totals[name] += getattr(sources, name)
    assert {name: rig.cache.counters[f"tokens_{name}"] for name in totals} == totals
    assert totals["host"] > 0 and totals["device"] > 0


def test_chunks_of_any_size_leave_the_same_cache() -> None:
    for chunk in (1, 2, 3, 5, 8, 33):
        rig = Rig(HYBRID, placement=PlacementConfig(interval_tokens=8))
        lease = rig.ready(text(1, 33))
        while lease.position < 33:
            stop = rig.cache.next_stop(lease) or 33
            rig.compute(lease, min(stop, lease.position + chunk, 33))
            rig.settle()
        rig.cache.release(lease)
        assert [rig.restore(text(1, n)) for n in (8, 9, 17, 25, 33)] == [0, 8, 16, 24, 32]
        rig.serve(text(1, 33))


def test_a_match_may_be_kept_while_the_tree_moves_on() -> None:
    """Found before a split, an eviction or a clear, used after it: the lease is right or the match is found again."""
    rig = Rig(FULL, host_pages=64)
    prompt = text(1, 33)
    rig.serve(prompt)
    old = rig.cache.lookup(prompt)
    rig.cache.release(rig.open([*prompt[:16], *text(2, 5)]))  # splits the node that `old` names
    lease = rig.cache.acquire(old)
    rig.settle()
    rig.engine.check(lease)
    assert len(set(lease.prefix_pages.tolist())) == 9
    rig.cache.release(lease)
    old = rig.cache.lookup(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.cache.acquire(old)
    assert lease.sources.host == 32
    rig.settle()
    rig.engine.check(lease)
    rig.cache.release(lease)
    old = rig.cache.lookup(prompt)
    rig.cache.clear()
    assert rig.cache.acquire(old).resume == 0
    rig.cache.audit()


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 15, 100])
def test_a_limit_caps_where_a_request_resumes(limit: int) -> None:
    rig = Rig(FULL)
    rig.serve(text(1, 17))
    match = rig.cache.lookup(text(1, 17), limit_tokens=limit)
    assert match.restore_tokens == min(limit // 4 * 4, 16)
    rig.cache.clear()
    rig.serve(text(1, 17))  # the tree moved on: the match is found again, with its limit
    lease = rig.cache.acquire(match)
    assert lease.resume == match.restore_tokens and lease.sources.total == 17
    rig.prefill(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_two_requests_that_compute_the_same_text_keep_their_own_pages() -> None:
    rig = Rig(HYBRID)
    first, second = rig.ready(text(1, 17)), rig.ready(text(1, 17))
    for lease in (first, second):
        rig.prefill(lease)
    assert not set(first.prefix_pages.tolist()) & set(second.prefix_pages.tolist())
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 10
    for lease in (first, second):
        rig.engine.check(lease)
        rig.cache.release(lease)
    assert rig.used(Tier.DEVICE, Kind.PREFIX) == 4
    rig.idle_check()


def test_decoding_grows_page_by_page() -> None:
    rig = Rig(FULL)
    lease = rig.ready(text(1, 6))
    rig.prefill(lease)
    counts = []
    for token in range(8):
        rig.decode(lease, [token])
        counts.append(len(lease.prefix_pages))
    assert counts == [2, 2, 3, 3, 3, 3, 4, 4]
    rig.cache.release(lease)
    assert rig.serve([*text(1, 6), *range(8)]).device == 12


@pytest.mark.parametrize("window", [3, 4, 8, 10])
def test_a_sliding_window_is_given_back_behind_the_request(window: int) -> None:
    rig = Rig(model(KV, swa(window)), placement=PlacementRules(interval_tokens=0, decode_interval_tokens=0, at_prompt_end=False))
    lease = rig.ready(text(1, 9))
    rig.prefill(lease)
    size = rig.spec.window_page_tokens
    for token in range(40):
        rig.decode(lease, [token])
        needed = -(-lease.position // size) - max(lease.position - window, 0) // size
        assert len(lease.window_pages) == rig.used(Tier.DEVICE, Kind.WINDOW) == needed
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.used(Tier.DEVICE, Kind.WINDOW) == 0


def test_only_the_last_checkpoint_of_an_answer_is_kept() -> None:
    placement = PlacementConfig(interval_tokens=0, decode_interval_tokens=4)
    rig = Rig(HYBRID, placement=placement)
    rig.serve(text(1, 9), answer=text(2, 20))
    whole = [*text(1, 9), *text(2, 20), 1]
    assert [rig.restore(whole[:n]) for n in (9, 13, 17, 21, 25, 29, 30)] == [8, 8, 8, 8, 8, 28, 28]


def test_milestones_and_used_checkpoints_of_an_answer_stay() -> None:
    rig = Rig(HYBRID, placement=PlacementConfig(interval_tokens=15, decode_interval_tokens=4))  # 16
    lease = rig.ready(text(1, 9))
    rig.prefill(lease)
    rig.decode(lease, text(2, 4))
    assert rig.serve([*text(1, 9), *text(2, 4)]).device == 12
    rig.decode(lease, text(3, 16))
    rig.cache.release(lease)
    whole = [*text(1, 9), *text(2, 4), *text(3, 16), 1]
    assert [rig.restore(whole[:n]) for n in (9, 13, 17, 21, 25, 29)] == [8, 12, 16, 16, 16, 28]


def test_a_preempted_request_returns_to_what_it_had_computed() -> None:
    rig = Rig(HYBRID, host_pages=256, placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=4))
    lease = rig.ready(text(1, 21))
    rig.prefill(lease)
    rig.decode(lease, text(2, 7))
    so_far = [*text(1, 21), *text(2, 7)]
    rig.cache.release(lease)
    rig.settle()
    rig.evict_all(Tier.DEVICE)
    again = rig.ready([*so_far, 5])
    assert again.resume == 28 and again.sources.host == 28
    rig.prefill(again)
    rig.decode(again, text(3, 5))
    rig.engine.check(again)
    rig.cache.release(again)
    rig.idle_check()


def test_the_last_commit_spares_the_copy_of_the_point_state() -> None:
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 16))
    rig.compute(lease, 16, last=True)
    assert not rig.executor.pending and len(lease.point_pages) == 0 and lease.ready
    rig.cache.release(lease)
    assert rig.serve([*text(1, 16), 1]).device == 16


def test_a_point_state_is_copied_when_it_is_restored_and_handed_over_when_it_is_published() -> None:
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 17))
    mine = int(lease.point_pages[0])
    rig.compute(lease, 16)
    checkpoint = rig.cache.lookup(text(1, 17)).checkpoint
    assert checkpoint is not None and checkpoint.residencies[Tier.DEVICE] is not None
    assert checkpoint.residencies[Tier.DEVICE].points.tolist() == [mine] != lease.point_pages.tolist()
    rig.settle()
    other = rig.open(text(1, 17))
    (job,) = rig.pending(Purpose.LOAD)
    (copy,) = rig.executor.plan(job).copies
    assert copy.source.ids.tolist() == [mine] and copy.target.ids.tolist() == other.point_pages.tolist()
    for each in (lease, other):
        rig.cache.release(each)
    rig.idle_check()


def test_window_pages_on_the_device_are_shared_not_copied() -> None:
    rig = Rig(FULL_WINDOW)
    rig.serve(text(1, 17))
    lease = rig.open(text(1, 17))
    assert lease.ready and not rig.executor.pending
    checkpoint = rig.cache.lookup(text(1, 17)).checkpoint
    assert checkpoint is not None and checkpoint.residencies[Tier.DEVICE] is not None
    assert lease.window_pages.tolist() == checkpoint.residencies[Tier.DEVICE].windows.tolist()
    rig.cache.release(lease)
    rig.idle_check()


def test_hints_become_stops_and_the_engine_is_told_the_next_one() -> None:
    rig = Rig(HYBRID, placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=8))
    lease = rig.ready(text(1, 22), hints=(9, 13))
    assert lease.stops == (8, 12, 20)
    seen = []
    for _ in range(5):
        stop = rig.cache.next_stop(lease)
        assert stop is not None
        seen.append(stop)
        if stop > lease.num_tokens:
            rig.cache.append(lease, [1] * (stop - lease.num_tokens))
        rig.compute(lease, stop)
        rig.settle()
    assert seen == [8, 12, 20, 24, 32]
    rig.cache.release(lease)
    assert rig.serve([*text(1, 12), 9]).device == 12


def test_no_stop_is_asked_for_among_tokens_that_are_being_computed() -> None:
    """A pass that was queued over it leaves nothing there."""
    rig = Rig(HYBRID, placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=8))
    lease = rig.ready(text(1, 30), hints=(8,))
    assert lease.stops == (8, 28)
    assert not rig.cache.ask_checkpoint(lease, 12, begun=16) and lease.stops == (8, 28)
    assert rig.cache.ask_checkpoint(lease, 8, begun=16), "a stop that is there already is not dropped"
    assert rig.cache.ask_checkpoint(lease, 16, begun=16) and lease.stops == (8, 16, 28), "nothing is queued behind this one yet"
    assert [rig.cache.next_stop(lease, after=after) for after in (0, 8, 15, 16)] == [8, 16, 16, 28]
    rig.cache.release(lease)


def test_without_checkpoints_what_is_being_computed_can_be_waited_for() -> None:
    rig = Rig(FULL)
    lease = rig.ready(text(1, 30))
    assert rig.cache.ask_checkpoint(lease, 12, begun=16) and not lease.stops
    rig.cache.release(lease)


def test_a_stop_that_is_passed_over_leaves_no_checkpoint() -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(text(1, 22))
    rig.compute(lease, 22)
    rig.cache.release(lease)
    assert rig.cache.lookup(text(1, 22)).known_tokens == 20 and rig.restore(text(1, 22)) == 0
