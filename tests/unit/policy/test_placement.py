"""Where a request leaves checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import ConfigError, PlacementConfig
from stepwell.policy.placement import is_milestone, next_decode_stop, prompt_stops
from toys import FULL, HYBRID, KV, SSM, model

NONE = PlacementConfig(interval_tokens=0, decode_interval_tokens=0, at_branch=False, at_prompt_end=False)


def _stops(
    config: PlacementConfig, *, resume: int = 0, known: int = 0, prompt: int = 41, hints: tuple[int, ...] = ()
) -> tuple[int, ...]:
    return prompt_stops(HYBRID, config, resume=resume, known=known, prompt_tokens=prompt, hints=hints)


def test_each_reason_alone() -> None:
    assert _stops(NONE) == ()
    assert _stops(replace(NONE, at_prompt_end=True)) == (40,)
    assert _stops(replace(NONE, at_branch=True), known=20) == (20,)
    assert _stops(replace(NONE, interval_tokens=16)) == (16, 32)
    assert _stops(NONE, hints=(9, 24)) == (8, 24)


def test_stops_are_sorted_distinct_and_ahead_of_the_request() -> None:
    everything = PlacementConfig(interval_tokens=8)
    assert _stops(everything, resume=16, known=24, hints=(3, 16, 17, 25, 24)) == (24, 32, 40)


def test_a_stop_is_never_the_last_token_of_the_prompt() -> None:
    everything = PlacementConfig(interval_tokens=4)
    assert _stops(everything, prompt=40)[-1] == 36
    assert _stops(everything, prompt=4) == ()


def test_hints_outside_the_prompt_are_ignored() -> None:
    assert _stops(NONE, hints=(-7, 0, 400)) == ()


@pytest.mark.parametrize("resume", [0, 4, 12, 16, 20])
def test_intervals_are_absolute_not_relative_to_where_a_request_resumed(resume: int) -> None:
    assert _stops(replace(NONE, interval_tokens=8), resume=resume) == tuple(b for b in range(8, 41, 8) if b > resume)


def test_an_interval_that_is_no_legal_boundary_is_rounded_up() -> None:
    spec = model(KV, replace(SSM, align=6))
    config = replace(NONE, interval_tokens=13)
    assert prompt_stops(spec, config, resume=0, known=0, prompt_tokens=80) == (24, 48, 72)
    assert [boundary for boundary in range(1, 80) if is_milestone(spec, config, boundary)] == [24, 48, 72]
    assert not is_milestone(spec, NONE, 24)


def test_models_without_windows_or_points_need_no_stops() -> None:
    assert prompt_stops(FULL, PlacementConfig(interval_tokens=4), resume=0, known=8, prompt_tokens=41, hints=(8,)) == ()
    assert next_decode_stop(FULL, PlacementConfig(), position=3) is None


def test_decode_stops_follow_each_other() -> None:
    config = PlacementConfig(decode_interval_tokens=8)
    assert [next_decode_stop(HYBRID, config, position=at) for at in (0, 7, 8, 15, 16)] == [8, 8, 16, 16, 24]
    assert next_decode_stop(HYBRID, NONE, position=5) is None


def test_negative_intervals_are_refused() -> None:
    for field in ("interval_tokens", "decode_interval_tokens"):
        with pytest.raises(ConfigError, match="intervals"):
            PlacementConfig(**{field: -1})
