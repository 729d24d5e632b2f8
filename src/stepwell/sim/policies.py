"""Policies by name: eviction and placement as the cache has them, put together the ways people want to compare. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepwell.base.config import EvictionPolicy, PlacementConfig
from stepwell.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a tier gives up first, and where checkpoints are left."""

    eviction: EvictionPolicy
    placement: PlacementConfig


def _lru(placement: PlacementConfig) -> Policy:
    return Policy(eviction=EvictionPolicy.LRU, placement=placement)


# At prompt ends and branches; intervals, where there are any, are as they are given, and answers leave nothing.
_ENDS_AND_BRANCHES = PlacementConfig(interval_tokens=0, most_added=None, decode_interval_tokens=0)
_ENDS = replace(_ENDS_AND_BRANCHES, at_branch=False)

DEFAULT = "value"
POLICIES: Mapping[str, Policy] = {
    DEFAULT: Policy(eviction=EvictionPolicy.VALUE, placement=PlacementConfig()),
    "lru": _lru(PlacementConfig()),
    "end": _lru(_ENDS),
    "every-8192": _lru(replace(_ENDS, interval_tokens=8192)),
    "every-2048": _lru(replace(_ENDS, interval_tokens=2048)),
    "every-512": _lru(replace(_ENDS, interval_tokens=512)),
    "second-hit": _lru(replace(_ENDS_AND_BRANCHES, at_prompt_end=False)),  # Marconi's admission
    "path-cap-4": _lru(replace(_ENDS_AND_BRANCHES, path_cap=4)),
    "thinned": _lru(replace(_ENDS_AND_BRANCHES, interval_tokens=2048, thinning=0.5)),
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError for a name that is not one."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r:.60}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
