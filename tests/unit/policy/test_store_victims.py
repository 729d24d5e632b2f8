"""What a full store is estimated to evict next."""

from __future__ import annotations

from stepwell.policy.store_victims import MOST_ENTRIES, StoreVictimEstimate
from stepwell.policy.value import ValueClass


def value_class(number: int) -> ValueClass:
    return ValueClass(hazard_group=0, gain_level=0, last_visit_s=float(number))


def test_a_store_that_was_not_filled_from_here_has_free_space() -> None:
    estimate = StoreVictimEstimate(100)
    assert estimate.current is None
    estimate.note(value_class(1), 99)
    assert estimate.current is None


def test_what_was_written_longest_ago_goes_next_once_the_store_is_full() -> None:
    estimate = StoreVictimEstimate(100)
    for number in range(1, 5):
        estimate.note(value_class(number), 25)
    assert estimate.current == value_class(1)
    estimate.note(value_class(5), 25)
    assert estimate.current == value_class(2)
    estimate.note(value_class(6), 60)
    assert estimate.current == value_class(4), "25 of it is still there with 25 and 60"


def test_something_larger_than_the_store_displaces_all_else() -> None:
    estimate = StoreVictimEstimate(100)
    estimate.note(value_class(1), 10)
    estimate.note(value_class(2), 500)
    assert estimate.current == value_class(2)


def test_what_was_there_already_takes_no_space_and_stores_of_unknown_size_have_plenty() -> None:
    estimate = StoreVictimEstimate(10)
    estimate.note(value_class(1), 0)
    assert estimate.current is None
    endless = StoreVictimEstimate(None)
    endless.note(value_class(1), 1000)
    assert endless.current is None


def test_a_store_that_keeps_nothing_evicts_nothing() -> None:
    estimate = StoreVictimEstimate(0)
    estimate.note(value_class(1), 10)
    assert estimate.current is None


def test_a_large_store_that_is_filled_in_small_pieces_takes_little_memory() -> None:
    capacity = 100 * MOST_ENTRIES
    estimate = StoreVictimEstimate(capacity)
    for number in range(2 * capacity):
        estimate.note(value_class(number), 1)
    assert len(estimate._written) <= MOST_ENTRIES + 1
    assert estimate.current is not None and abs(estimate.current.last_visit_s - capacity) <= 100, "half of them are still there"
