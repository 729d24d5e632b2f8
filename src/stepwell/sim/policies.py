"""Policies by name: the one that ships, and plain LRU to compare it with."""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.base.errors import ConfigError
from stepwell.cache.build import CacheTuning
from stepwell.policy.placement import PlacementRules
from stepwell.policy.value import Visit


class LeastRecent:
    """Evicts by time since last use alone: the simplest `ValuePolicy`."""

    def level(self, saved_tokens: int, size_bytes: int, next_distance: int, distance: int, *, deferred: bool) -> int:
        return 0

    def due(self, used_at: float, urgent_until_s: float, visit: Visit | None) -> tuple[int, float]:
        return 0, max(used_at, urgent_until_s)

    def worth(self, group: int, level: int, since: float) -> float:
        return since


DEFAULT = "value"
POLICIES: Mapping[str, CacheTuning] = {
    DEFAULT: CacheTuning(placement=PlacementRules()),
    "lru": CacheTuning(eviction=LeastRecent(), placement=PlacementRules()),
}


def policy_named(name: str) -> CacheTuning:
    """Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r:.60}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
