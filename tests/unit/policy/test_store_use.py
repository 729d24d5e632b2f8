"""When a store is left alone, how long it is waited for, and how deep it should take a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import ConfigError, StoreConfig
from stepwell.policy.store_use import (
    FAILURES_TO_OPEN,
    FIRST_COOL_OFF_S,
    LONGEST_COOL_OFF_S,
    MOST_ALLOWANCE_S,
    MOST_FALLBACKS,
    SHARERS,
    Breaker,
    BreakerState,
    Grant,
    Patience,
    Speed,
    StoreTuning,
    fallbacks,
    is_worth_it,
    reachable,
    restore_points,
)
from toys import FULL, HYBRID


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now)
    return breaker


def test_a_breaker_opens_after_failures_in_a_row_and_a_success_starts_the_count_again() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.failed(0.0) for _ in range(FAILURES_TO_OPEN)] == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert not breaker.allows(0.0)


def test_after_a_cool_off_one_request_decides() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST_COOL_OFF_S - 0.1) and breaker.allows(FIRST_COOL_OFF_S)
    breaker.asked(FIRST_COOL_OFF_S)
    assert not breaker.allows(FIRST_COOL_OFF_S), "one at a time"
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_every_failed_trial_doubles_the_cool_off_up_to_a_limit() -> None:
    breaker, now = opened(), 0.0
    for _ in range(20):
        now += LONGEST_COOL_OFF_S
        breaker.asked(now)
        assert breaker.failed(now)
    assert not breaker.allows(now + LONGEST_COOL_OFF_S - 1) and breaker.allows(now + LONGEST_COOL_OFF_S)


def test_a_trial_that_says_nothing_is_followed_by_another() -> None:
    breaker = opened()
    breaker.asked(FIRST_COOL_OFF_S)
    breaker.undecided()
    assert breaker.allows(FIRST_COOL_OFF_S)


def test_an_answer_from_before_does_not_close_an_open_breaker() -> None:
    breaker = opened()
    breaker.succeeded()
    assert breaker.state is BreakerState.OPEN


def distrusted(*, credit_s: float, share: float) -> Patience:
    """Of a store that was waited for in vain, with the credit still there."""
    patience = Patience(credit_s=credit_s, share=share)
    patience.settle(patience.take(30.0), waited_s=1e-9, saved_s=0.0, given_up=True)
    assert not patience.trusted
    return patience


def test_waiting_in_vain_is_bounded_whatever_is_asked() -> None:
    patience, waited_s, limit_s = Patience(credit_s=0.5, share=0.01), 0.0, 30.0
    for _ in range(1000):
        patience.computed(0.1)
        grant = patience.take(limit_s)
        waited_s += grant.seconds
        patience.settle(grant, waited_s=grant.seconds, saved_s=0.0, given_up=True)
    assert limit_s <= waited_s <= limit_s + 0.5 + 0.01 * 100, "one wait on trust, then the allowance"


def test_answers_that_help_nobody_cost_trust_too() -> None:
    patience, waited_s = Patience(credit_s=0.5, share=0.01), 0.0
    for _ in range(1000):
        patience.computed(0.1)
        grant = patience.take(30.0)
        waits_s = min(grant.seconds, 0.2)  # the store says that it has nothing, slowly
        waited_s += waits_s
        patience.settle(grant, waited_s=waits_s, saved_s=0.0, given_up=waits_s < 0.2)
    assert waited_s <= 0.2 + 0.5 + 0.01 * 100


def test_a_store_that_pays_stays_trusted() -> None:
    patience = Patience(credit_s=0.5, share=0.0)
    for _ in range(100):
        patience.settle(patience.take(30.0), waited_s=5.0, saved_s=6.0, given_up=False)
    assert patience.take(30.0) == Grant(seconds=30.0, on_trust=True)


def test_many_who_waited_in_vain_at_a_time_pay_once_and_leave_no_debt() -> None:
    patience = Patience(credit_s=0.5, share=0.1)
    for grant in [patience.take(2.0) for _ in range(8)]:
        patience.settle(grant, waited_s=2.0, saved_s=0.0, given_up=True)
    assert patience.allowance_s == 0.0 and patience.take(2.0).seconds == 0.0
    patience.computed(8.0)
    assert patience.take(2.0).seconds == pytest.approx(0.8 / SHARERS)


def test_what_was_not_used_comes_back_and_savings_are_added_up_to_a_limit() -> None:
    patience = distrusted(credit_s=0.8, share=0.0)
    grant = patience.take(30.0)
    assert grant.seconds == pytest.approx(0.8 / SHARERS) and not grant.on_trust
    patience.settle(grant, waited_s=0.0, saved_s=0.0, given_up=False)
    assert patience.allowance_s == pytest.approx(0.8)
    patience.settle(Grant(seconds=0.0), waited_s=1.0, saved_s=1e6, given_up=False)
    assert patience.allowance_s == MOST_ALLOWANCE_S
    patience.settle(Grant(seconds=0.0), waited_s=20.0, saved_s=0.0, given_up=False)
    assert patience.take(30.0).seconds == 0.0, "a debt is paid back before anybody waits again"


def test_a_fetch_expected_to_be_quick_may_take_more_of_the_allowance_but_not_more_than_there_is() -> None:
    patience = distrusted(credit_s=0.8, share=0.0)
    grant = patience.take(30.0)
    assert patience.take_more(grant, 0.05) == grant and patience.take_more(grant, 2.0) == grant
    assert patience.take_more(grant, 0.5) == Grant(seconds=0.5) and patience.allowance_s == pytest.approx(0.3)


def test_a_speed_follows_what_is_measured() -> None:
    speed = Speed()
    assert speed.per_s is None
    for _ in range(50):
        speed.measure(100, 1.0)
    assert speed.per_s == pytest.approx(100)
    for _ in range(50):
        speed.measure(10, 1.0)
    assert speed.per_s == pytest.approx(10, rel=0.01)
    speed.measure(0, 1.0)
    assert speed.per_s == pytest.approx(10, rel=0.01), "nothing moved in some time says nothing"


def test_the_joint_rule() -> None:
    has_page = np.array([False, False, True, True, False, True])
    assert reachable(2, has_page) == 4 and reachable(0, has_page) == 0 and reachable(5, has_page) == 6
    has_checkpoint = np.array([False, False, True, False, False, True, False])
    assert list(restore_points(HYBRID, above=0, upto=4, has_checkpoint=has_checkpoint)) == [2]
    assert list(restore_points(HYBRID, above=2, upto=6, has_checkpoint=has_checkpoint)) == [5]
    assert list(restore_points(FULL, above=1, upto=4, has_checkpoint=has_checkpoint)) == [4, 3, 2]


def test_fallbacks_cost_no_more_than_their_share_and_are_spread() -> None:
    points = list(range(90, 0, -10))
    chosen = fallbacks(points, checkpoint_bytes=10, fetch_bytes=120, share=0.25)
    assert len(chosen) == 3 and chosen == sorted(chosen) and max(chosen) - min(chosen) > 40
    assert fallbacks(points, checkpoint_bytes=1000, fetch_bytes=120, share=0.25) == []
    assert len(fallbacks(list(range(1000, 0, -1)), checkpoint_bytes=1, fetch_bytes=10**6, share=0.25)) == MOST_FALLBACKS


def test_what_was_never_measured_gets_the_chance_to_be() -> None:
    assert is_worth_it(None, 1.0) and is_worth_it(1.0, None) and is_worth_it(0.9, 1.0) and not is_worth_it(1.1, 1.0)


def test_beside_a_fetch_of_most_of_the_host_each_may_take_half_of_what_is_left() -> None:
    tuning = StoreTuning(host_share=0.5, host_share_alone=0.9)
    assert tuning.fetch_room_bytes(100, held_bytes=0, largest_bytes=0) == pytest.approx(90)
    assert tuning.fetch_room_bytes(100, held_bytes=80, largest_bytes=80) == pytest.approx(5)
    assert tuning.fetch_room_bytes(100, held_bytes=84, largest_bytes=80) == pytest.approx(3)
    for held in range(8, 49, 8):  # many that are small keep to what all may have
        assert tuning.fetch_room_bytes(100, held_bytes=held, largest_bytes=8) == pytest.approx(50 - held)


@pytest.mark.parametrize(
    ("tuning", "says"),
    [
        ({"wait_share": -0.1}, "wait_share must be 0 or more"),
        ({"op_timeout_s": 0.0}, "op_timeout_s must be positive"),
        ({"backup_queue": 0}, "backup_queue must be positive"),
        ({"fetch_chunk_bytes": 0}, "fetch_chunk_bytes must be positive"),
        ({"host_share": 1.5}, "host_share must be more than 0 and at most 1"),
    ],
)
def test_tunings_that_cannot_work(tuning: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StoreTuning(**tuning)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prefetch_timeout_s": -1.0}, "prefetch_timeout_s must be 0 or more"),
        ({"checkpoint_delay_s": -1.0}, "checkpoint_delay_s must be 0 or more"),
        ({"readers": 0}, "readers must be positive"),
        ({"writers": 0}, "writers must be positive"),
        ({"recompute_tokens_per_s": 0.0}, "recompute_tokens_per_s must be positive"),
    ],
)
def test_settings_of_a_store_that_cannot_work(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StoreConfig(**settings)  # type: ignore[arg-type]
