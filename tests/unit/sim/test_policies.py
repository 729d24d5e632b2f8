"""Policies by name do what their names say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepwell import ConfigError, PlacementConfig
from stepwell.policy.placement import PlacementRules, rules_for
from stepwell.sim.least_recent import LeastRecent
from stepwell.sim.policies import DEFAULT, POLICIES, policy_named
from toys import HYBRID, Rig, text


def _rules(name: str) -> PlacementRules:
    rules = policy_named(name).placement
    assert rules is not None
    return rules


def test_names() -> None:
    assert policy_named(DEFAULT).eviction is None, "as it ships"
    assert policy_named(DEFAULT).placement == rules_for(PlacementConfig()) and policy_named(DEFAULT).on_checkpoint is None
    others = [name for name in POLICIES if name != DEFAULT]
    assert all(isinstance(policy_named(name).eviction, LeastRecent) for name in others)
    assert {name for name in others if _rules(name).most_added is not None} == {"lru"}
    with pytest.raises(ConfigError, match="second-hit"):
        policy_named("third-hit")


def test_a_second_hit_leaves_the_first_checkpoint_and_the_third_resumes_there() -> None:
    rig = Rig(HYBRID, placement=_rules("second-hit"))
    prompts = [[*text(1, 12), *text(name, 9)] for name in (2, 3, 4)]
    assert [rig.serve(prompt).device for prompt in prompts] == [0, 0, 12]
    assert rig.cache.counters["checkpoints_made"] == 1, "none at the end of a prompt"


def test_a_capped_path_keeps_four() -> None:
    rig = Rig(HYBRID, tuning=replace(policy_named("path-cap-4"), page_alignment_bytes=16, eviction=None))
    for turn in range(1, 11):
        rig.serve(text(1, 8 * turn + 1))
    whole = text(1, 81)
    assert {rig.restore(whole[:upto]) for upto in range(1, 82)} == {0, 56, 64, 72, 80}
