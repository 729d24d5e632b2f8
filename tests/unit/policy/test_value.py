"""The worth of cached things: places whose order does not change while time passes."""

from __future__ import annotations

from itertools import pairwise, product
from math import log2

from stepwell.policy.value import LEVELS_PER_OCTAVE, Expected, ReuseModel, ValuePolicy, Visit
from stepwell.sim.policies import LeastRecent

PAGE = 4


def _worth(policy: ValuePolicy, *, used_at: float = 0.0, saved: int = 64, size: int = 1024, visit: Visit | None = None,
           distance: int = 0, next_distance: int = 0) -> float:  # fmt: skip
    group, since = policy.due(used_at, 0.0, visit)
    return policy.worth(group, policy.level(saved, size, next_distance, distance, deferred=False), since)


def _busy_reuse() -> ReuseModel:
    """One prompt that comes every 10 s among many that never do."""
    reuse, visit = ReuseModel(PAGE), None
    for turn in range(200):
        visit, _ = reuse.arrive(10.0 * turn, known=8 if visit else 0, end=8, passed=[(visit, 8)], goes_on=True, lost=None)
        reuse.arrive(10.0 * turn + 1, known=0, end=8, passed=[], goes_on=False, lost=None)
    return reuse


def test_worth_grows_with_what_is_saved_and_falls_with_its_size() -> None:
    policy = Expected(_busy_reuse())
    for more, less in (((128, 1024), (64, 1024)), ((64, 512), (64, 1024)), ((4096, 90_000), (64, 90_000))):
        assert _worth(policy, saved=more[0], size=more[1]) > _worth(policy, saved=less[0], size=less[1])


def test_a_level_is_the_logarithm_of_what_is_saved_per_byte() -> None:
    policy = Expected(ReuseModel(PAGE))
    for saved, size in product((1, 64, 4096), (100, 90_000)):
        exact = LEVELS_PER_OCTAVE * log2(saved / size)
        assert abs(policy.level(saved, size, 0, 0, deferred=False) - exact) <= 0.5


def test_in_one_place_the_later_is_worth_no_less() -> None:
    policy = Expected(_busy_reuse())
    for group in range(8):
        worths = [policy.worth(group, 0, since) for since in (0.0, 500.0, 1500.0, 1900.0, 1985.0, 1991.0, 5000.0)]
        assert all(older <= newer for older, newer in pairwise(worths)), f"{group=} {worths}"


def test_the_visit_says_since_when_and_in_which_group() -> None:
    visit = Visit(50.0, end=8, returns=3, gap_s=10.0)
    assert Expected(ReuseModel(PAGE)).due(90.0, 0.0, visit) == (visit.group, 50.0) and visit.group != Visit(50.0, end=8).group


def test_without_a_visit_the_use_counts() -> None:
    assert Expected(ReuseModel(PAGE)).due(90.0, 0.0, None) == (Visit(0.0, end=1).group, 90.0)


def test_a_checkpoint_that_is_followed_is_worth_less_than_one_that_is_not() -> None:
    policy = Expected(_busy_reuse())
    assert _worth(policy, distance=9 * PAGE, next_distance=2 * PAGE) < _worth(policy, distance=9 * PAGE)


def test_using_something_never_lowers_its_worth_under_least_recent() -> None:
    policy = LeastRecent()
    assert _worth(policy, used_at=5) >= _worth(policy, used_at=0)


def test_least_recent_looks_at_time_alone() -> None:
    visit = Visit(3.0, end=8, returns=3, gap_s=10.0)
    policy = LeastRecent()
    assert _worth(policy, used_at=7, saved=1, size=10**9, visit=visit) == _worth(policy, used_at=7) == 7


def test_something_that_saves_nothing_still_has_a_place() -> None:
    policy = Expected(ReuseModel(PAGE))
    assert 0 < _worth(policy, saved=0) < _worth(policy, saved=2)


def test_a_share_is_found_anew_once_more_was_learned() -> None:
    reuse = _busy_reuse()
    before = reuse.share(2 * PAGE, 9 * PAGE)
    assert reuse.share(2 * PAGE, 9 * PAGE) == before
    visit = None
    for turn in range(200):  # now they leave their old path far from its end
        _, fresh = reuse.arrive(4000.0 + turn, known=1 if visit else 0, end=8, passed=[(visit, 1)], goes_on=False, lost=None)
        visit = fresh
    assert reuse.share(2 * PAGE, 9 * PAGE) > 2 * before
