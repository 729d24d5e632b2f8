"""When a store is left alone, how long it is waited for, and how deep it should take a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import ConfigError, StoreConfig
from stepwell.policy.store_use import (
    FAILURES_TO_OPEN,
    FIRST_COOL_OFF_S,
    LONGEST_COOL_OFF_S,
    MOST_FALLBACKS,
    Breaker,
    BreakerState,
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
    assert tuning.fetch_capacity_bytes(100, held_bytes=0, largest_bytes=0) == pytest.approx(90)
    assert tuning.fetch_capacity_bytes(100, held_bytes=80, largest_bytes=80) == pytest.approx(5)
    assert tuning.fetch_capacity_bytes(100, held_bytes=84, largest_bytes=80) == pytest.approx(3)
    for held in range(8, 49, 8):  # many that are small keep to what all may have
        assert tuning.fetch_capacity_bytes(100, held_bytes=held, largest_bytes=8) == pytest.approx(50 - held)


@pytest.mark.parametrize(
    ("tuning", "says"),
    [
        ({"fallback_share": -0.1}, "fallback_share must be 0 or more"),
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
