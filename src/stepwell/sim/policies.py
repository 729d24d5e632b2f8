"""Policies by name: eviction and placement as the cache has them, put together the ways people want to compare. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepwell.base.config import EvictionPolicy, PlacementConfig
from stepwell.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a tier gives up first, and where checkpoints are left."""

    eviction: EvictionPolicy
    placement: PlacementConfig


def _fixed(interval_tokens: int) -> Policy:
    """Rules that look at nothing: the end of each prompt, and absolute multiples."""
    placement = PlacementConfig(interval_tokens=interval_tokens, decode_interval_tokens=0, at_branch=False)
    return Policy(eviction=EvictionPolicy.LRU, placement=placement)


DEFAULT = "value"
POLICIES: Mapping[str, Policy] = {
    DEFAULT: Policy(eviction=EvictionPolicy.VALUE, placement=PlacementConfig()),
    "lru": Policy(eviction=EvictionPolicy.LRU, placement=PlacementConfig()),
    "end": _fixed(0),
    "every-8192": _fixed(8192),
    "every-2048": _fixed(2048),
    "every-512": _fixed(512),
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError for a name that is not one."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r:.60}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
