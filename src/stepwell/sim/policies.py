"""Policies by name: what ships, and rules that others have, to compare it with. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stepwell.base.errors import ConfigError
from stepwell.cache.build import CacheTuning
from stepwell.policy.placement import PlacementRules
from stepwell.sim.least_recent import LeastRecent
from stepwell.sim.thinning import Thinning

# At prompt ends and branches; intervals, where there are any, are as they are given, and answers leave nothing.
_ENDS_AND_BRANCHES = PlacementRules(interval_tokens=0, most_added=None, decode_interval_tokens=0)
_ENDS = replace(_ENDS_AND_BRANCHES, at_branch=False)


def _lru(placement: PlacementRules, thinning: Thinning | None = None) -> CacheTuning:
    return CacheTuning(eviction=LeastRecent(), placement=placement, on_checkpoint=thinning)


DEFAULT = "value"
POLICIES: Mapping[str, CacheTuning] = {
    DEFAULT: CacheTuning(placement=PlacementRules()),
    "lru": _lru(PlacementRules()),
    "end": _lru(_ENDS),
    "every-8192": _lru(replace(_ENDS, interval_tokens=8192)),
    "every-2048": _lru(replace(_ENDS, interval_tokens=2048)),
    "every-512": _lru(replace(_ENDS, interval_tokens=512)),
    "second-hit": _lru(replace(_ENDS_AND_BRANCHES, at_prompt_end=False)),  # Marconi's admission
    "path-cap-4": _lru(_ENDS_AND_BRANCHES, Thinning(path_cap=4)),
    "thinned": _lru(replace(_ENDS_AND_BRANCHES, interval_tokens=2048), Thinning(thinning=0.5)),
}


def policy_named(name: str) -> CacheTuning:
    """Raises ConfigError for a name that is not one."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r:.60}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
