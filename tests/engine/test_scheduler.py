"""Waiting for a prefix that another request computes: found by comparing prompts once, and not in every step."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from engine.small import PAGE, alone, greedy, prompt, run, small, tokens_of
from stepwell.engine import scheduler
from stepwell.engine.scheduler import _shared_bytes


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 3))
def test_shared_beginnings_are_whole_units(one: int, other: int, alike: int, tail: int) -> None:
    unit, random = 8, Random(one * other)
    same = random.randbytes(alike * unit + tail)
    left, right = (same + fill * (count * unit) for fill, count in ((b"a", one), (b"b", other)))
    assert _shared_bytes(left, right, unit) == len(same) // unit * unit
    assert _shared_bytes(left, left, unit) == len(left) // unit * unit


def test_prompts_are_compared_once_however_long_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def counted(one: bytes, other: bytes, unit: int) -> int:
        compared.append((one, other))
        return _shared_bytes(one, other, unit)

    monkeypatch.setattr(scheduler, "_shared_bytes", counted)
    shared = prompt(40 * PAGE)
    asks = [greedy(shared + prompt(20, seed=seed), 4) for seed in range(1, 5)]
    with small() as engine:
        answers = run(engine, asks)
        assert engine.passes > 10
        assert engine.scheduler._compared == {}, "what is known of leases goes with them"
    assert len(compared) == len(set(compared)) <= 6, "of four requests there are six pairs"
    assert [tokens_of(each) for each in answers] == alone("llama", asks)
    computed = [deltas[-1].usage.sources.computed for deltas in answers if deltas[-1].usage is not None]
    assert sum(count > len(shared) for count in computed) == 1, "one computes what all share"
