"""Eviction by time since last use alone: what others do, and Stepwell is compared with. Pure."""

from __future__ import annotations

from stepwell.policy.value import Visit


class LeastRecent:
    """Time since last use alone."""

    def level(self, saved_tokens: int, size_bytes: int, next_distance: int, distance: int, *, deferred: bool) -> int:
        return 0

    def due(self, used_at: float, urgent_until_s: float, visit: Visit | None) -> tuple[int, float]:
        return 0, max(used_at, urgent_until_s)

    def worth(self, group: int, level: int, since: float) -> float:
        return since
