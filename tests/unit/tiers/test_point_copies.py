"""Point state that the engine copies behind a pass: the tree gets the copy, and the request goes on with its own at once."""

from __future__ import annotations

import pytest

from stepwell import Kind, Lease, LeaseError, Tier
from stepwell.base.config import PlacementConfig, WritePolicy
from toys import ALL_MODELS, FULL_POINT, FULL_WINDOW, HYBRID, NO_INTERVALS, PAGE, Rig, text

EVERY_PAGE = PlacementConfig(interval_tokens=0)


def compute(rig: Rig, lease: Lease, upto: int) -> int | None:
    """A pass that is queued, with its copy, and not committed yet."""
    rig.cache.grow(lease, upto)
    rig.engine.compute(lease, upto)
    page = rig.cache.copy_point(lease, upto)
    if page is not None:
        rig.engine.copy_point(lease, page)
    return page


def test_the_tree_gets_the_copy_and_the_request_waits_for_nothing() -> None:
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 17))
    mine = lease.point_pages.tolist()
    page = compute(rig, lease, 16)
    rig.cache.commit(lease, 16, point_copy=page)
    assert lease.ready and lease.point_pages.tolist() == mine != [page] and not rig.executor.pending
    checkpoint = rig.cache.lookup(text(1, 17)).checkpoint
    assert checkpoint is not None and checkpoint.residencies[Tier.DEVICE] is not None
    assert checkpoint.residencies[Tier.DEVICE].points.tolist() == [page]
    rig.decode(lease, text(2, 5))
    rig.cache.release(lease)
    rig.engine.check(rig.ready(text(1, 17)))
    rig.cache.audit()


def test_a_pass_may_be_queued_over_a_stop_that_is_not_committed_yet() -> None:
    rig = Rig(HYBRID, placement=EVERY_PAGE)
    lease = rig.ready(text(1, 30), hints=(8, 16))
    pages = [compute(rig, lease, upto) for upto in (8, 16)]
    assert None not in pages and pages[0] != pages[1]
    rig.cache.audit()
    for upto, page in zip((8, 16), pages, strict=True):
        rig.cache.commit(lease, upto, point_copy=page)
        assert lease.ready
    rig.cache.release(lease)
    for boundary in (8, 16):
        again = rig.ready([*text(1, boundary), 5])  # with every byte checked
        assert again.resume == boundary
        rig.cache.release(again)
    rig.idle_check()


def test_a_copy_that_is_asked_for_again_has_the_same_page() -> None:
    """A plan that was given up is made anew."""
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 17))
    rig.cache.grow(lease, 16)
    assert rig.cache.copy_point(lease, 16) == rig.cache.copy_point(lease, 16) is not None
    assert rig.used(Tier.DEVICE, Kind.POINT) == 2
    rig.cache.release(lease)
    rig.idle_check()
    assert rig.used(Tier.DEVICE, Kind.POINT) == 0


@pytest.mark.parametrize("last", [False, True])
def test_a_page_whose_pass_was_cancelled_is_not_taken_for_the_state_there(last: bool) -> None:
    """The page was reserved, and the pass that was to copy to it never ran; another pass ends there without a copy."""
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 17))
    rig.cache.grow(lease, 16)
    assert rig.cache.copy_point(lease, 16) is not None
    rig.engine.compute(lease, 16)
    rig.cache.commit(lease, 16, last=last)
    rig.cache.audit()
    rig.settle()
    rig.cache.release(lease)
    again = rig.ready(text(1, 17))
    assert again.resume == 16
    rig.engine.check(again)
    rig.cache.release(again)
    rig.idle_check()


def test_a_page_that_was_not_reserved_for_the_token_is_refused() -> None:
    rig = Rig(HYBRID, placement=EVERY_PAGE)
    lease = rig.ready(text(1, 30), hints=(8, 16))
    pages = [compute(rig, lease, upto) for upto in (8, 16)]
    for wrong in (pages[1], 10**6):
        with pytest.raises(LeaseError, match="is not the one that copy_point"):
            rig.cache.commit(lease, 8, point_copy=wrong)
    assert lease.position == 0
    rig.cache.commit(lease, 8, point_copy=pages[0])
    with pytest.raises(LeaseError, match="is not the one that copy_point"):
        rig.cache.commit(lease, 8, point_copy=pages[0])
    rig.cache.release(lease)
    rig.idle_check()


def test_a_plan_that_is_made_anew_takes_no_second_page_under_write_back() -> None:
    """There the page for a checkpoint is taken with those for the tokens before it."""
    rig = Rig(FULL_POINT, host_pages=64, write=WritePolicy.EXCLUSIVE)
    lease = rig.ready(text(1, 17))
    for _ in range(3):
        rig.cache.grow(lease, 16)
        assert rig.cache.copy_point(lease, 16) is not None
        assert rig.used(Tier.DEVICE, Kind.POINT) == 2 and not len(lease.spare_points)
    rig.cache.release(lease)
    rig.idle_check()


@pytest.mark.parametrize("upto", [15, 16])
def test_what_is_not_published_is_not_copied(upto: int) -> None:
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 17), publish=upto != 16)
    rig.cache.grow(lease, upto)
    assert rig.cache.copy_point(lease, upto) is None
    rig.cache.release(lease)


def test_nothing_is_copied_for_models_without_point_state() -> None:
    rig = Rig(FULL_WINDOW)
    lease = rig.ready(text(1, 17))
    assert compute(rig, lease, 16) is None
    rig.cache.commit(lease, 16)
    rig.cache.release(lease)
    assert rig.restore(text(1, 17)) == 16


def test_a_copy_is_given_back_when_another_request_left_the_same_checkpoint() -> None:
    rig = Rig(FULL_POINT)
    one, other = (rig.ready(text(1, 17)) for _ in range(2))
    for lease in (one, other):
        rig.cache.commit(lease, 16, point_copy=compute(rig, lease, 16))
        rig.cache.audit()
    assert rig.used(Tier.DEVICE, Kind.POINT) == 3
    for lease in (one, other):
        rig.cache.release(lease)
    rig.idle_check()


def test_without_room_for_a_copy_no_page_is_named_and_the_request_goes_on() -> None:
    rig = Rig(FULL_POINT, device_pages=5)
    lease = rig.ready(text(1, 15))
    assert compute(rig, lease, 12) is None
    rig.cache.commit(lease, 12)
    assert lease.ready and rig.cache.counters["checkpoint_skipped_no_room"]
    rig.cache.release(lease)
    rig.idle_check()


# ---- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_MODELS)
@pytest.mark.parametrize("answer", [1, PAGE, 3 * PAGE + 1, 9 * PAGE + 3])
def test_an_answer_is_resumed_at_the_end_of_its_last_full_page(name: str, answer: int) -> None:
    rig = Rig(ALL_MODELS[name], placement=EVERY_PAGE)
    rig.serve(text(1, 9), answer=text(2, answer))
    lease = rig.ready([*text(1, 9), *text(2, answer), 5])
    assert lease.resume == rig.spec.floor(9 + answer)
    rig.cache.release(lease)
    rig.idle_check()


def test_the_end_of_a_path_is_that_of_its_answer() -> None:
    """So that who sends no answer back is seen to leave before it, and what they resume at is worth keeping."""
    rig = Rig(HYBRID, placement=EVERY_PAGE)
    lease = rig.ready(text(1, 9))
    rig.prefill(lease)
    assert [visit.end for visit in lease.visits] == [2, 2]
    rig.decode(lease, text(2, 10))
    assert [visit.end for visit in lease.visits] == [4, 4]
    rig.cache.release(lease)
    quiet = Rig(HYBRID, placement=NO_INTERVALS)
    with quiet.ready(text(1, 9)) as lease:
        quiet.prefill(lease)
        quiet.decode(lease, text(2, 10))
        assert [visit.end for visit in lease.visits] == [2, 2], "no request could resume behind the prompt"


# ---- answers that are alike -----------------------------------------------------------------------


def answered(*, twins: int, lag: int = 0, passes_copy: bool) -> Rig:
    """A cache in which as many requests as said were given the same answer side by side, the others `lag` tokens later."""
    rig = Rig(HYBRID, placement=EVERY_PAGE, host_pages=256, write=WritePolicy.THROUGH)
    leases = [rig.ready(text(1, 9)) for _ in range(twins)]
    for lease in leases:
        rig.prefill(lease)
    answer = text(2, 10 * PAGE)
    for at in range(len(answer) + lag):
        for lease, token in zip(leases, (at, *[at - lag] * (twins - 1)), strict=True):
            if 0 <= token < len(answer):
                rig.cache.append(lease, [answer[token]])
                if passes_copy:
                    copy = compute(rig, lease, lease.num_tokens)
                    rig.cache.commit(lease, lease.num_tokens, point_copy=copy)
                else:
                    rig.compute(lease, lease.num_tokens)
                rig.settle()
    for lease in leases:
        rig.cache.release(lease)
    rig.idle_check()
    return rig


@pytest.mark.parametrize("passes_copy", [False, True], ids=["the cache copies", "passes copy"])
@pytest.mark.parametrize("lag", [0, 1, PAGE, 3 * PAGE + 1])
def test_answers_that_are_alike_leave_what_one_of_them_leaves(lag: int, passes_copy: bool) -> None:
    alone, twins = answered(twins=1, passes_copy=passes_copy), answered(twins=3, lag=lag, passes_copy=passes_copy)
    for tier in (Tier.DEVICE, Tier.HOST):
        for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT):
            assert twins.used(tier, kind) == alone.used(tier, kind), f"{tier.label} {kind.label} pages"
    assert twins.cache.counters["save_jobs"] == alone.cache.counters["save_jobs"]
    assert twins.restore([*text(1, 9), *text(2, 10 * PAGE), 5]) == 48


def test_an_answer_that_goes_on_where_one_alike_has_ended_leaves_that_its_checkpoint() -> None:
    rig = Rig(FULL_POINT, placement=EVERY_PAGE)
    short, long = (rig.ready(text(1, 9)) for _ in range(2))
    for lease in (short, long):
        rig.prefill(lease)
        rig.decode(lease, text(2, 8))
    rig.cache.release(short)
    rig.decode(long, text(2, 20)[8:])
    rig.cache.release(long)
    assert rig.restore([*text(1, 9), *text(2, 8), 5]) == 16 and rig.restore([*text(1, 9), *text(2, 20), 5]) == 28
    assert rig.used(Tier.DEVICE, Kind.POINT) == 3, "at the end of the prompt, and of both answers"
    rig.idle_check()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_an_answer_that_repeats_a_prompt_leaves_it_its_checkpoint(tier: Tier) -> None:
    rig = Rig(FULL_POINT, placement=EVERY_PAGE, host_pages=256, write=WritePolicy.THROUGH)
    rig.serve([*text(1, 9), *text(2, 8)])
    if tier is Tier.HOST:
        rig.evict_all(Tier.DEVICE)
    rig.serve(text(1, 9), answer=text(2, 20))
    assert rig.restore([*text(1, 9), *text(2, 8), 5]) == 16
    rig.idle_check()
