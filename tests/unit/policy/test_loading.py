"""Computing the end of a prefix while the rest is loaded: how much, and what the best speed of late is."""

from __future__ import annotations

from random import Random

import pytest

from stepwell.policy.loading import KEPT_OF_PEAK, PeakSpeed, Race


def test_with_overlap_both_take_as_long() -> None:
    race = Race(bytes_per_s=1000.0, tokens_per_s=100.0, overlap=True)
    count = race.tokens_to_compute(load_bytes=10_000, load_tokens=1000, new_tokens=0)  # 10 s to load, 10 s to compute
    assert count == 500
    assert race.first_token_s(load_bytes=5000, compute_tokens=500) == pytest.approx(5.0)


def test_new_tokens_that_hide_the_load_leave_nothing_to_compute() -> None:
    race = Race(bytes_per_s=1000.0, tokens_per_s=100.0, overlap=True)
    assert race.tokens_to_compute(load_bytes=10_000, load_tokens=1000, new_tokens=2000) == 0


def test_without_overlap_it_is_all_or_nothing() -> None:
    for per_s, count in ((101.0, 1000), (99.0, 0)):
        race = Race(bytes_per_s=1000.0, tokens_per_s=per_s, overlap=False)
        assert race.tokens_to_compute(load_bytes=10_000, load_tokens=1000, new_tokens=5) == count


@pytest.mark.parametrize("seed", range(50))
def test_no_other_count_is_much_sooner(seed: int) -> None:
    random = Random(seed)
    race = Race(bytes_per_s=random.uniform(1, 1e4), tokens_per_s=random.uniform(1, 1e3), overlap=seed % 2 == 0)
    tokens, each, new = random.randrange(1, 200), random.uniform(1, 100), random.randrange(1, 100)

    def first_s(count: int) -> float:
        return race.first_token_s(load_bytes=(tokens - count) * each, compute_tokens=new + count)

    chosen = race.tokens_to_compute(load_bytes=tokens * each, load_tokens=tokens, new_tokens=new)
    one_token_s = each / race.bytes_per_s + 1 / race.tokens_per_s
    assert 0 <= chosen <= tokens
    assert first_s(chosen) <= min(map(first_s, range(tokens + 1))) + one_token_s


def test_the_best_speed_is_kept_a_while() -> None:
    speed = PeakSpeed()
    assert speed.per_s is None
    speed.measure(100, 1)
    speed.measure(10, 1)
    assert speed.per_s == pytest.approx(100 * KEPT_OF_PEAK)
    speed.measure(200, 1)
    speed.measure(0, 1)
    speed.measure(1, 0)
    assert speed.per_s == 200
