"""Policies by name do what their names say."""

from __future__ import annotations

import pytest

from stepwell import ConfigError, EvictionPolicy
from stepwell.sim.policies import DEFAULT, POLICIES, policy_named
from toys import HYBRID, Rig, text


def test_names() -> None:
    assert policy_named(DEFAULT).eviction is EvictionPolicy.VALUE
    others = [name for name in POLICIES if name != DEFAULT]
    assert all(policy_named(name).eviction is EvictionPolicy.LRU for name in others)
    assert {name for name in others if POLICIES[name].placement.most_added is not None} == {"lru"}
    with pytest.raises(ConfigError, match="second-hit"):
        policy_named("third-hit")


def test_a_second_hit_leaves_the_first_checkpoint_and_the_third_resumes_there() -> None:
    rig = Rig(HYBRID, placement=policy_named("second-hit").placement)
    prompts = [[*text(1, 12), *text(name, 9)] for name in (2, 3, 4)]
    assert [rig.serve(prompt).device for prompt in prompts] == [0, 0, 12]
    assert rig.cache.counters["checkpoints_made"] == 1, "none at the end of a prompt"


def test_a_capped_path_keeps_four() -> None:
    rig = Rig(HYBRID, placement=policy_named("path-cap-4").placement)
    for turn in range(1, 11):
        rig.serve(text(1, 8 * turn + 1))
    whole = text(1, 81)
    assert {rig.restore(whole[:upto]) for upto in range(1, 82)} == {0, 56, 64, 72, 80}
