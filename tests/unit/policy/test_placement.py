"""Where a request leaves checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import ConfigError, Kind, PlacementConfig
from stepwell.base.spec.presets import load_spec
from stepwell.policy.placement import (
    PlacementRules,
    Trigger,
    is_milestone,
    milestone_step,
    next_decode_stop,
    prompt_stops,
    rules_for,
    trigger_of,
)
from toys import FULL, HYBRID, KV, SSM, model, swa

NONE = PlacementRules(interval_tokens=0, most_added=None, decode_interval_tokens=0, at_branch=False, at_prompt_end=False)


def _stops(
    config: PlacementRules, *, resume: int = 0, known: int = 0, prompt: int = 41, hints: tuple[int, ...] = ()
) -> tuple[int, ...]:
    return prompt_stops(HYBRID, config, resume=resume, known=known, prompt_tokens=prompt, hints=hints)


def test_each_reason_alone() -> None:
    assert _stops(NONE) == ()
    assert _stops(replace(NONE, at_prompt_end=True)) == (40,)
    assert _stops(replace(NONE, at_branch=True), known=20) == (20,)
    assert _stops(replace(NONE, interval_tokens=16)) == (16, 32)
    assert _stops(NONE, hints=(9, 24)) == (8, 24)


def test_each_stop_has_the_reason_it_is_made_for() -> None:
    rules = PlacementRules(interval_tokens=16, most_added=None, decode_interval_tokens=4)

    def trigger(boundary: int, known: int = 20) -> Trigger:
        return trigger_of(HYBRID, rules, boundary, known=known, prompt_tokens=41, hints=(9,))

    stops = _stops(rules, known=20, hints=(9,))
    expected = {8: Trigger.HINT, 16: Trigger.INTERVAL, 20: Trigger.BRANCH, 32: Trigger.INTERVAL, 40: Trigger.PROMPT_END}
    assert {stop: trigger(stop) for stop in stops} == expected
    assert trigger(24) is Trigger.ASKED, "no rule asks for it"
    assert (trigger(44), trigger(48)) == (Trigger.ANSWER, Trigger.INTERVAL), "milestones are kept in answers too"
    assert trigger(40, known=40) is Trigger.PROMPT_END, "a prompt that parts at its end is one that ends there"


def test_stops_are_sorted_distinct_and_ahead_of_the_request() -> None:
    everything = PlacementRules(interval_tokens=8, most_added=None)
    assert _stops(everything, resume=16, known=24, hints=(3, 16, 17, 25, 24)) == (24, 32, 40)


def test_a_stop_is_never_the_last_token_of_the_prompt() -> None:
    everything = PlacementRules(interval_tokens=4, most_added=None)
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
    assert prompt_stops(FULL, PlacementRules(interval_tokens=4), resume=0, known=8, prompt_tokens=41, hints=(8,)) == ()
    assert next_decode_stop(FULL, PlacementRules(), position=3) is None


def test_decode_stops_follow_each_other() -> None:
    config = PlacementRules(decode_interval_tokens=8)
    assert [next_decode_stop(HYBRID, config, position=at) for at in (0, 7, 8, 15, 16)] == [8, 8, 16, 16, 24]
    assert next_decode_stop(HYBRID, NONE, position=5) is None


def test_negative_intervals_are_refused() -> None:
    for field in ("interval_tokens", "decode_interval_tokens"):
        with pytest.raises(ConfigError, match="intervals"):
            PlacementRules(**{field: -1})
        with pytest.raises(ConfigError, match="intervals"):
            PlacementConfig(**{field: -1})


# ---- intervals that fit the model -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kv_dtype", "step"),
    [
        ("deepseek-v4-flash", "fp8", 8192),
        ("deepseek-v4-flash", None, 8192),
        ("gpt-oss-120b", None, 8192),
        ("qwen3-next-80b", None, 32_768),
        ("gemma-3-27b", None, 65_536),
        ("kimi-k3", None, 262_144),  # 12.54 % at half of that
        ("mamba2-2.7b", None, 8192),  # it has no pages
    ],
)
def test_the_default_interval_of_real_models(name: str, kv_dtype: str | None, step: int) -> None:
    spec = load_spec(name, kv_dtype=kv_dtype)
    assert milestone_step(spec, PlacementRules()) == step
    assert milestone_step(spec, PlacementRules(most_added=None)) == 8192
    assert is_milestone(spec, PlacementRules(), step) and not is_milestone(spec, PlacementRules(), step // 2)
    stops = prompt_stops(spec, PlacementRules(at_prompt_end=False), resume=0, known=0, prompt_tokens=600_000)
    assert stops == tuple(range(step, 600_000, step))


@pytest.mark.parametrize("window", [0, 1, 6, 8, 50])
@pytest.mark.parametrize("align", [1, 6])
@pytest.mark.parametrize("interval", [1, 4, 13, 60])
@pytest.mark.parametrize("most_added", [0.01, 0.3, 1.0, 2.5])
def test_milestones_add_no_more_than_they_may_and_are_no_further_apart_than_that_takes(
    window: int, align: int, interval: int, most_added: float
) -> None:
    spec = model(KV, replace(SSM, align=align), *([swa(window)] if window else []))
    config = replace(NONE, interval_tokens=interval, most_added=most_added)
    least = milestone_step(spec, replace(config, most_added=None))
    step = milestone_step(spec, config)
    times = step // least
    assert step == times * least and times & (times - 1) == 0

    def share(step: int) -> float:
        """What the checkpoints at 64 multiples take of memory, each window page once, against the pages before the last."""
        windows = {page for at in range(step, 64 * step + 1, step) for page in spec.window_span(at)}
        added = len(windows) * spec.object_bytes(Kind.WINDOW) + 64 * spec.object_bytes(Kind.POINT)
        return added / (64 * step // spec.page_tokens * spec.object_bytes(Kind.PREFIX))

    assert share(step) <= most_added
    assert times == 1 or share(step // 2) > most_added * 0.98, "windows of the first multiples may be shorter"


def test_a_share_that_no_interval_keeps_leaves_none() -> None:
    config = replace(NONE, interval_tokens=8, most_added=1e-300)
    assert milestone_step(HYBRID, config) == 0
    assert _stops(config) == () and not is_milestone(HYBRID, config, 8)


def test_shares_that_make_no_sense_are_refused() -> None:
    for bad in (0.0, -1.0):
        with pytest.raises(ConfigError, match="most_added"):
            PlacementRules(most_added=bad)


def test_an_interval_that_an_operator_gives_is_kept_and_the_default_is_stretched() -> None:
    spec = load_spec("qwen3-next-80b")
    assert rules_for(PlacementConfig()) == PlacementRules()
    assert milestone_step(spec, rules_for(PlacementConfig())) == 32_768
    assert milestone_step(spec, rules_for(PlacementConfig(interval_tokens=8192))) == 8192
    assert milestone_step(spec, rules_for(PlacementConfig(interval_tokens=0))) == 0
    assert rules_for(PlacementConfig(decode_interval_tokens=64)).decode_interval_tokens == 64
