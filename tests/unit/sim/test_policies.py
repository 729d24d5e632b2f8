"""Policies by name do what their names say."""

from __future__ import annotations

import pytest

from stepwell import ConfigError, PlacementConfig
from stepwell.policy.placement import rules_for
from stepwell.sim.policies import DEFAULT, POLICIES, LeastRecent, policy_named


def test_the_default_is_what_ships_and_lru_changes_the_order_of_eviction_alone() -> None:
    assert [*POLICIES] == [DEFAULT, "lru"]
    assert policy_named(DEFAULT).eviction is None
    assert policy_named(DEFAULT).placement == policy_named("lru").placement == rules_for(PlacementConfig())
    assert isinstance(policy_named("lru").eviction, LeastRecent)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'third-hit'; there are value, lru"):
        policy_named("third-hit")
