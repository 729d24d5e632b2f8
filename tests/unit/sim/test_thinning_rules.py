"""Which checkpoints of a path go when one more is left on it, by the rules that others have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from stepwell import ConfigError
from stepwell.sim.thinning import Thinning, Waypoint, superseded


def _path(
    boundaries: Sequence[int], *, wanted: Sequence[int] = (), held: Sequence[int] = (), used_at: dict[int, float] | None = None
) -> list[Waypoint]:
    """Checkpoints left one after the other, if nothing else is said."""
    when = {at: float(number) for number, at in enumerate(boundaries)} | (used_at or {})
    return [Waypoint(boundary=at, used_at_s=when[at], is_wanted=at in wanted, is_held=at in held) for at in boundaries]


def test_without_a_cap_or_thinning_nothing_is_superseded() -> None:
    assert superseded(Thinning(), _path(range(1, 100))) == ()


def test_over_the_cap_the_oldest_go_and_those_that_are_wanted_last() -> None:
    rule = Thinning(path_cap=3)
    boundaries = [3, 10, 11, 20, 31]
    assert superseded(rule, _path(boundaries[:3])) == ()
    assert superseded(rule, _path(boundaries)) == (3, 10)
    assert superseded(rule, _path(boundaries, wanted=[3])) == (10, 11)
    assert superseded(rule, _path(boundaries, wanted=[3, 10, 11, 20])) == (3, 10), "the cap holds"
    assert superseded(rule, _path(boundaries, wanted=[3, 10, 11, 20], used_at={3: 99.0})) == (10, 11)
    assert superseded(rule, _path(boundaries, used_at={3: 99.0})) == (10, 11)


def test_what_is_held_and_the_newest_stay_over_any_cap() -> None:
    assert superseded(Thinning(path_cap=1), _path([4, 8, 12], held=[4])) == (8,)
    assert superseded(Thinning(path_cap=1), _path([4, 8], held=[4])) == ()
    assert superseded(Thinning(path_cap=1), _path([4, 8], used_at={8: -1.0})) == (4,)
    assert superseded(Thinning(path_cap=1), _path([4])) == superseded(Thinning(path_cap=1), []) == ()


def test_thinning_by_hand() -> None:
    half = Thinning(thinning=0.5)
    assert superseded(half, _path([4, 8, 12, 40])) == (4, 8), "8 < 18, then 12 < 16, but 40 apart at 12"
    assert superseded(half, _path([4, 8, 12, 40], held=[4])) == (8,)
    assert superseded(half, _path([4, 8, 12, 40], wanted=[8])) == (4,)
    assert superseded(half, _path([8, 30, 40])) == () and superseded(half, _path([8, 12, 40]), start=4) == (8,)
    assert superseded(half, _path([10, 20])) == superseded(half, _path([10])) == superseded(half, []) == ()
    assert superseded(replace(half, path_cap=1), _path([4, 8, 12, 40])) == (4, 8, 12), "both rules hold"


@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_a_growing_path_keeps_few_and_the_spacing_grows_with_the_distance_from_its_end(step: int, part: float) -> None:
    rule = Thinning(thinning=part)
    kept: list[int] = []
    for end in range(step, 2000 * step, step):
        kept.append(end)
        gone = superseded(rule, _path(kept))
        kept = [at for at in kept if at not in gone]
        assert kept[-1] == end
        for before, after in pairwise([0, *kept]):
            assert after - before <= max(part * (end - before), step), "no wider than it may be"
        for before, at, after in zip([0, *kept], kept, kept[1:], strict=False):
            assert after - before >= part * (end - at), "no closer than it must be"
    assert len(kept) < 100 / part, "as many as the logarithm of its length"


def test_caps_and_shares_that_make_no_sense_are_refused() -> None:
    for field, bad in (("path_cap", -1), ("thinning", -0.5), ("thinning", float("nan"))):
        with pytest.raises(ConfigError, match=field):
            Thinning(**{field: bad})  # type: ignore[arg-type]
