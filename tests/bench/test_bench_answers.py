"""A small loop of agents: what the benchmark counts adds up, and answers in the cache are worth something."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from bench_answers import PLENTY_BYTES, play, turns_of


@pytest.mark.parametrize("drops", [False, True])
def test_prompts_repeat_answers_unless_clients_drop_them(drops: bool) -> None:
    first, second, *_ = turns = list(turns_of(sessions=1, seed=3, drops=drops))
    grown = [*first.prompt.tolist(), *first.answer]
    assert (second.prompt[: len(grown)].tolist() == grown) is not drops
    assert all(0 < turn.new_tokens <= len(turn.prompt) for turn in turns)
    assert first.new_tokens == len(first.prompt)
    assert second.new_tokens == len(second.prompt) - (len(first.prompt) if drops else len(grown) - 1)


def test_every_boundary_spares_more_than_every_256_tokens_and_that_more_than_none() -> None:
    turns = list(turns_of(sessions=2, seed=3, drops=False))
    none, some, every = (play("qwen3-next-80b", turns, interval, PLENTY_BYTES >> 4)[0] for interval in (0, 256, 1))
    assert sum(turn.new_tokens for turn in turns) <= every < some < none
