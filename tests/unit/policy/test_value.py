"""The worth of cached things: an order that does not depend on when one looks."""

from __future__ import annotations

from itertools import combinations

from stepwell.policy.value import Facts, LeastRecent, SavedPerByte

HALF_LIFE_S = 100.0


def _facts(*, used_at: float = 0.0, uses: int = 0, saved: int = 64, size: int = 1024) -> Facts:
    return Facts(used_at=used_at, uses=uses, saved_tokens=saved, size_bytes=size)


MANY = [
    _facts(used_at=at, uses=uses, saved=saved, size=size)
    for at in (0.0, 90.0, 350.0)
    for uses in (0, 3)
    for saved in (1, 64, 4096)
    for size in (100, 90_000)
]


def _worth(facts: Facts, now: float) -> float:
    fade = 2.0 ** (-(now - facts.used_at) / HALF_LIFE_S)
    return facts.saved_tokens / facts.size_bytes * (1 + facts.uses) * fade


def test_rank_orders_as_worth_does_at_any_time() -> None:
    policy = SavedPerByte(HALF_LIFE_S)
    for now in (400.0, 1000.0, 3000.0):
        for left, right in combinations(MANY, 2):
            difference = policy.rank(left) - policy.rank(right)
            ratio = _worth(left, now) / _worth(right, now)
            assert abs(difference) < 1e-6 or (difference > 0) == (ratio > 1), f"{left} {right} {now}"


def test_one_half_life_is_worth_a_factor_of_two() -> None:
    policy = SavedPerByte(HALF_LIFE_S)
    assert policy.rank(_facts(saved=128)) == policy.rank(_facts(used_at=HALF_LIFE_S, saved=64))
    assert policy.rank(_facts(size=512)) == policy.rank(_facts(uses=1))


def test_using_something_never_lowers_its_rank() -> None:
    for policy in (SavedPerByte(HALF_LIFE_S), LeastRecent()):
        assert policy.rank(_facts(used_at=5, uses=1)) >= policy.rank(_facts(used_at=0, uses=0))


def test_least_recent_looks_at_time_alone() -> None:
    assert LeastRecent().rank(_facts(used_at=7, saved=1, size=10**9)) == 7


def test_something_that_saves_nothing_still_has_a_rank() -> None:
    assert SavedPerByte(HALF_LIFE_S).rank(_facts(saved=0)) < SavedPerByte(HALF_LIFE_S).rank(_facts(saved=2))
