"""The trace meets published miss counts."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from sparse.trace import STEADY, Trace, count_misses, make_trace

SMALL = replace(STEADY, last=4)


def test_misses_of_a_steady_trace_are_those_that_were_published() -> None:
    """DeepSeek-V3.2, 32K: of 2,048 rows 440 with as many slots, and 175 with 4,096 slots (LRU)."""
    trace = make_trace(STEADY, context=32 << 10, steps=160, scores=True)
    assert count_misses(trace, hot_rows=2048, policy="lru")[80:120].mean() == pytest.approx(440, rel=0.15)
    missed = count_misses(trace, hot_rows=4096, policy="lru")[80:120].mean()
    assert missed == pytest.approx(175, rel=0.1)
    assert count_misses(trace, hot_rows=4096, policy="score")[80:120].mean() < missed


def test_misses_are_those_of_a_list() -> None:
    trace = make_trace(SMALL, context=120, steps=50, count=16, seed=7)
    held: dict[int, tuple[int, int]] = {}
    counted = count_misses(trace, hot_rows=30, policy="lru")
    for step, selected in enumerate(trace.position_NK.tolist()):
        missing = [at for at in selected if at not in held]
        assert len(missing) == counted[step]
        idle = sorted((when, at) for at, when in held.items() if at not in selected)
        for _, at in idle[: max(len(held) + len(missing) - 30, 0)]:
            del held[at]
        held |= {at: (step, at) for at in selected}


def test_a_selection_of_as_many_rows_as_slots_leaves_no_choice() -> None:
    trace = make_trace(SMALL, context=200, steps=30, count=20)
    changed = [len(set(b) - set(a)) for a, b in pairwise(trace.position_NK.tolist())]
    assert count_misses(trace, hot_rows=20, policy="lru").tolist() == [20, *changed]


def test_selections_are_ascending_and_hold_what_is_always_selected() -> None:
    trace = make_trace(SMALL, context=100, steps=10, count=16)
    for step, selected in enumerate(trace.position_NK):
        assert (np.diff(selected) > 0).all() and selected[:4].tolist() == [0, 1, 2, 3]
        assert selected[-4:].tolist() == list(range(97 + step, 101 + step))


def test_score_needs_scores() -> None:
    trace = Trace(position_NK=np.zeros((1, 1), np.int32), score_NT=None)
    with pytest.raises(AssertionError, match="without scores"):
        count_misses(trace, hot_rows=1, policy="score")
