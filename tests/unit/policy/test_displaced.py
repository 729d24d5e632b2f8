"""What a full store is taken to give up next."""

from __future__ import annotations

from stepwell.policy.displaced import MOST_PLACES, Displaced
from stepwell.policy.value import Place


def place(number: int) -> Place:
    return Place(group=0, level=0, since=float(number))


def test_a_store_that_was_not_filled_from_here_has_room() -> None:
    displaced = Displaced(100)
    assert displaced.next is None
    displaced.note(place(1), 99)
    assert displaced.next is None


def test_what_went_down_longest_ago_goes_next_once_the_store_is_full() -> None:
    displaced = Displaced(100)
    for number in range(1, 5):
        displaced.note(place(number), 25)
    assert displaced.next == place(1)
    displaced.note(place(5), 25)
    assert displaced.next == place(2)
    displaced.note(place(6), 60)
    assert displaced.next == place(4), "25 of it is still there with 25 and 60"


def test_something_larger_than_the_store_displaces_all_else() -> None:
    displaced = Displaced(100)
    displaced.note(place(1), 10)
    displaced.note(place(2), 500)
    assert displaced.next == place(2)


def test_what_was_there_already_takes_no_room_and_stores_of_unknown_size_have_plenty() -> None:
    displaced = Displaced(10)
    displaced.note(place(1), 0)
    assert displaced.next is None
    endless = Displaced(None)
    endless.note(place(1), 1000)
    assert endless.next is None


def test_a_store_that_keeps_nothing_gives_up_nothing() -> None:
    displaced = Displaced(0)
    displaced.note(place(1), 10)
    assert displaced.next is None


def test_a_large_store_that_is_filled_in_small_pieces_takes_little_memory() -> None:
    room = 100 * MOST_PLACES
    displaced = Displaced(room)
    for number in range(2 * room):
        displaced.note(place(number), 1)
    assert len(displaced._went_down) <= MOST_PLACES + 1
    assert displaced.next is not None and abs(displaced.next.since - room) <= 100, "half of them are still there"
