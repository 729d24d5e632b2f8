"""What is learned about returns: rates by group and age, rhythm, where returns leave their path, and what is dropped."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from stepwell.policy.value import (
    DECAY_EVERY,
    LEARN_EVERY,
    LEAST_SHARE,
    MOST_VISITS,
    NUM_BINS,
    NUM_GROUPS,
    ReuseModel,
    Visit,
    _time_in_bins,
    _waited,
)

PAGE = 4
AGES_S = (0.0, 0.5, 1.0, 3.0, 9.0, 30.0, 100.0, 1000.0, 1e5, 1e9)


def _new(reuse: ReuseModel, at_s: float, pages: int = 8) -> Visit:
    return reuse.arrive(at_s, known=0, end=pages, passed=[], goes_on=False, lost=None)[1]


def _again(reuse: ReuseModel, at_s: float, visit: Visit, pages: int = 8) -> Visit:
    return reuse.arrive(at_s, known=pages, end=pages, passed=[(visit, pages)], goes_on=True, lost=None)[0]


def _worth(reuse: ReuseModel, visit: Visit, age_s: float) -> float:
    return reuse.worth(visit.group, reuse._now_s - age_s)


def _one_regular_among_strangers(turns: int = 300) -> tuple[ReuseModel, Visit, Visit]:
    reuse = ReuseModel(PAGE)
    regular = _new(reuse, 0.0)
    stranger = regular
    for turn in range(1, turns):
        regular = _again(reuse, 10.0 * turn, regular)
        stranger = _new(reuse, 10.0 * turn)
    return reuse, regular, stranger


def test_a_group_that_returns_is_worth_more_than_one_that_never_did() -> None:
    reuse, regular, stranger = _one_regular_among_strangers()
    assert regular.group != stranger.group
    assert _worth(reuse, regular, 5.0) > 10 * _worth(reuse, stranger, 5.0)
    assert _worth(reuse, regular, 5.0) >= 0.09, "one return in ten seconds"


def test_worth_falls_once_the_time_to_return_has_passed() -> None:
    reuse, regular, _ = _one_regular_among_strangers()
    assert _worth(reuse, regular, 100.0) < _worth(reuse, regular, 5.0) / 5


def test_worth_never_rises_with_age_and_is_never_zero() -> None:
    reuse, _, _ = _one_regular_among_strangers()
    for table in (reuse, ReuseModel(PAGE)):
        for group in range(NUM_GROUPS):
            worths = [table.worth(group, table._now_s - age_s) for age_s in AGES_S]
            assert all(young >= old > 0 for young, old in pairwise(worths)), f"{group=} {worths}"


def test_worth_has_no_steps() -> None:
    """Two paths of different groups and nearly one age must not be valued apart by the side of a bin's edge that they are on."""
    reuse, regular, _ = _one_regular_among_strangers()
    for edge_s in (8.0, 16.0, 64.0, 256.0):
        before, after = _worth(reuse, regular, edge_s - 1e-6), _worth(reuse, regular, edge_s + 1e-6)
        assert before == pytest.approx(after, rel=1e-4), f"at {edge_s} s"
    assert _worth(reuse, regular, 20.0) > _worth(reuse, regular, 22.0), "within one bin"


def test_what_is_later_than_the_latest_request_is_of_age_zero() -> None:
    reuse, regular, _ = _one_regular_among_strangers()
    assert _worth(reuse, regular, -1000.0) == _worth(reuse, regular, 0.0)


def test_what_still_waits_counts_as_not_returned() -> None:
    """One of two prompts returns after 20 s: worth half as much as when nothing is known of the other."""
    group = Visit(0.0, end=8).group
    worths = []
    for is_waiting in (True, False):
        reuse = ReuseModel(PAGE)
        for turn in range(400):
            returning = _new(reuse, 1000.0 * turn)
            if is_waiting:
                _new(reuse, 1000.0 * turn)
            _again(reuse, 1000.0 * turn + 20.0, returning)
        reuse._learn()
        worths.append(reuse.worth(group, reuse._now_s))
    assert worths[0] < 0.75 * worths[1], f"{worths=}"


def test_what_was_evicted_early_is_not_taken_for_something_that_never_returns() -> None:
    """Its pages left the tree; when the prompt comes back, the return is counted all the same."""
    kept, evicted = ReuseModel(PAGE), ReuseModel(PAGE)
    one = other = None
    for turn in range(200):
        at_s = 10.0 * turn
        one = _again(kept, at_s, one) if one is not None else _new(kept, at_s)
        other = evicted.arrive(at_s, known=0, end=8, passed=[], goes_on=False, lost=other)[1]
    assert one is not None and other is not None
    assert (other.returns, other.group) == (one.returns, one.group)
    assert _worth(evicted, other, 5.0) == _worth(kept, one, 5.0)


def test_a_return_goes_on_with_the_rhythm_of_the_path() -> None:
    reuse = ReuseModel(PAGE)
    visit = _new(reuse, 0.0)
    assert (visit.returns, visit.gap_s) == (0, 0.0)
    for turn in range(1, 4):
        visit = _again(reuse, 40.0 * turn, visit)
    assert visit.returns == 3 and visit.gap_s == pytest.approx(40.0)
    assert visit.gap_s < _again(reuse, 520.0, visit).gap_s < 400.0, "one late return does not make a new rhythm"


def test_a_request_that_leaves_a_known_path_is_new_from_there_on() -> None:
    reuse = ReuseModel(PAGE)
    first = _new(reuse, 0.0)
    again, fresh = reuse.arrive(10.0, known=4, end=8, passed=[(first, 4)], goes_on=False, lost=None)
    assert (again.returns, again.pages, fresh.returns, fresh.pages, first.pages) == (1, 4, 0, 4, 4)


def test_a_page_comes_back_from_a_visit_once() -> None:
    reuse = ReuseModel(PAGE)
    first = _new(reuse, 0.0)
    reuse.arrive(10.0, known=8, end=8, passed=[(first, 8), (first, 8)], goes_on=True, lost=first)
    assert first.pages == 0 and reuse._returned_GB.sum() == 8


def test_shares_say_how_far_from_the_end_returns_leave_their_path() -> None:
    reuse = ReuseModel(PAGE)
    for turn in range(LEARN_EVERY):
        old = _new(reuse, 10.0 * turn, pages=64)
        known = 64 if turn % 4 else 32  # three of four go on at the end, one leaves 128 tokens before it
        reuse.arrive(10.0 * turn + 5, known=known, end=64, passed=[(old, known)], goes_on=False, lost=None)
    assert reuse.share(0, PAGE) == pytest.approx(0.75)
    assert reuse.share(0, 10**6) == pytest.approx(1.0)
    assert reuse.share(128, 256) == pytest.approx(0.25)
    assert reuse.share(PAGE, 100) == LEAST_SHARE == reuse.share(300, 300)


def test_before_anything_was_seen_only_ends_of_paths_are_needed() -> None:
    assert ReuseModel(PAGE).share(0, 5) == 1.0 and ReuseModel(PAGE).share(5, 9) == LEAST_SHARE


def test_evidence_fades() -> None:
    """A habit that ended is unlearned: what it was worth falls as others come and it does not."""
    reuse, regular, _ = _one_regular_among_strangers(400)
    returned = reuse._returned_GB[regular.group].sum()
    left = sum(reuse._left)
    for _ in range(DECAY_EVERY):
        _new(reuse, reuse._now_s + 1.0)
    assert reuse._returned_GB[regular.group].sum() <= returned / 2 and sum(reuse._left) <= left / 2


def test_only_so_many_visits_are_watched() -> None:
    reuse = ReuseModel(PAGE)
    first = _new(reuse, 0.0)
    for turn in range(1, MOST_VISITS + 500):
        _new(reuse, float(turn))
    assert len(reuse._waiting) == MOST_VISITS and first.pages == 0
    assert reuse._watched_GB.sum() > 0, "what is not watched any longer was, for a while"
    _again(reuse, 1e5, first)
    assert reuse._returned_GB.sum() == 0


def test_waiting_is_added_up_as_visit_by_visit() -> None:
    random = Random(3)
    visits = [
        Visit(random.choice([0.0, 1.0, 990.0, 999.5]) + random.random(), end=8, returns=random.randrange(7)) for _ in range(99)
    ]
    expected = np.zeros((NUM_GROUPS, NUM_BINS))
    for visit in visits:
        visit.pages = random.randrange(5)
        expected[visit.group] += visit.pages * _time_in_bins(1000.0 - visit.at_s)
    assert np.allclose(_waited(visits, 1000.0), expected) and not _waited([], 5.0).any()
    assert np.allclose(_waited([visits[0]], 1e9)[visits[0].group], visits[0].pages * _time_in_bins(1e9)), (
        "older than the last bin"
    )


def test_visits_without_pages_are_not_watched() -> None:
    reuse = ReuseModel(PAGE)
    _new(reuse, 0.0)
    assert [visit.pages for visit in reuse._waiting] == [8]


def test_a_clock_that_goes_back_makes_nothing_younger() -> None:
    reuse, regular, _ = _one_regular_among_strangers()
    before = [reuse.worth(group, regular.at_s) for group in range(NUM_GROUPS)]
    later = _again(reuse, 1.0, regular)
    assert later.at_s == regular.at_s and later.returns == regular.returns + 1
    assert [reuse.worth(group, regular.at_s) for group in range(NUM_GROUPS)] == before


def _random_life(seed: int) -> list[float]:
    reuse, random, visits = ReuseModel(PAGE), Random(seed), [Visit(0.0, end=4)]
    now_s = 0.0
    for _ in range(500):
        now_s += random.expovariate(0.5)
        old, known = random.choice(visits[-20:]), random.randrange(1, 8)
        lost = random.choice([None, old])
        visits += reuse.arrive(now_s, known=known, end=9, passed=[(old, known)], goes_on=random.random() < 0.5, lost=lost)
    return [reuse.worth(group, now_s - age_s) for group in range(NUM_GROUPS) for age_s in AGES_S]


def test_same_calls_same_worths() -> None:
    assert _random_life(7) == _random_life(7) != _random_life(8)


def test_answers_tell_apart_who_returns_soon_from_who_does_not() -> None:
    """Short answers are followed by a return after 5 s, long ones by none."""
    reuse = ReuseModel(PAGE)
    for turn in range(300):
        for tokens in (10, 2000):
            visit = _new(reuse, 100.0 * turn)
            visit.answered(tokens)
            if tokens == 10:
                _again(reuse, 100.0 * turn + 5.0, visit)
    short, long = _new(reuse, 30_000.0), _new(reuse, 30_000.0)
    short.answered(10)
    long.answered(2000)
    assert short.group != long.group
    assert _worth(reuse, short, 2.0) > 10 * _worth(reuse, long, 2.0)
