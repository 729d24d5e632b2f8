"""How long computing and fetching take, learned from measurements."""

from __future__ import annotations

from random import Random

import pytest

from stepwell.policy.expected import ComputeTime, FetchTime

LENGTHS = (512, 2_048, 8_192, 32_768, 60_000)
FIRST = ((0, 64), (0, 256), (0, 1024), (0, 8192), (8192, 16384), (16384, 24576), (24576, 32768))


def true_s(start: int, end: int) -> float:
    passes = -(-(end - start) // 8192)
    return 8e-3 * passes + 8e-6 * (end - start) + 2.4e-10 * (end * end - start * start) / 2


def measured(slowness: float = 1.0) -> ComputeTime:
    time = ComputeTime()
    for start, end in FIRST:
        time.measure([(start, end)], slowness * true_s(start, end))
    return time


def is_right(time: ComputeTime, slowness: float = 1.0, *, within: float) -> bool:
    return all(time.seconds(0, each) == pytest.approx(slowness * true_s(0, each), rel=within) for each in LENGTHS)


def test_nothing_is_expected_before_the_first_measurement() -> None:
    assert ComputeTime().seconds(0, 100) is None and FetchTime().seconds(100) is None
    assert ComputeTime(50.0).seconds(0, 100) == 2.0


def test_a_few_lengths_say_what_all_others_take() -> None:
    assert is_right(measured(), within=0.02)


def test_many_short_prompts_do_not_make_it_forget_what_long_ones_take() -> None:
    time, random = measured(), Random(1)
    for _ in range(500):
        time.measure([(0, 700)], true_s(0, 700) * random.uniform(0.9, 1.1))
    assert is_right(time, within=0.1)


@pytest.mark.parametrize("slowness", [0.1, 1 / 3, 3.0, 10.0])
def test_a_first_measurement_that_was_wrong_is_corrected_by_three_prompts(slowness: float) -> None:
    time = measured(slowness)
    for length in (2_048, 8_192, 2_048):
        time.measure([(0, length)], true_s(0, length))
    assert is_right(time, within=0.15)


def test_a_pass_over_several_prompts_counts_as_one() -> None:
    time = measured()
    spans = [(0, 2_000), (4_000, 6_000), (0, 4_000)]
    took_s = 8e-3 + 8e-6 * 8_000 + 2.4e-10 * (2_000**2 + 6_000**2 - 4_000**2 + 4_000**2) / 2
    for _ in range(20):
        time.measure(spans, took_s)
    assert is_right(time, within=0.05)


def test_a_fetch_has_a_latency_and_a_speed() -> None:
    time = FetchTime()
    for size in (8 << 20, 64 << 20):
        time.measure(size, 0.002 + size / 2e9, 1.0)
    for size in (1 << 20, 300 << 20, 3 << 30):
        assert time.seconds(size) == pytest.approx(0.002 + size / 2e9, rel=0.02)
    time.measure(100 << 20, 5.0, 2.0)  # it hung
    assert (time.seconds(100 << 20) or 0.0) > 1.0
    for _ in range(3):
        time.measure(100 << 20, 0.002 + (100 << 20) / 2e9, 3.0)
    assert time.seconds(100 << 20) == pytest.approx(0.002 + (100 << 20) / 2e9, rel=0.15)


def test_no_price_is_negative() -> None:
    time = ComputeTime()
    for length, seconds in ((4_096, 1.0), (1_024, 0.5), (64, 0.001)):
        time.measure([(0, length)], seconds)
    assert all((time.seconds(0, each) or 0.0) > 0 for each in (1, 64, 1_024, 100_000))
