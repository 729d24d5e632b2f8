"""Eviction by time since last use alone: what others do, and Stepwell is compared with. Pure."""

from __future__ import annotations

from stepwell.policy.value import Facts, Place, Visit


class LeastRecent:
    """Time since last use alone."""

    def place(self, facts: Facts) -> Place:
        return Place(0, 0, max(facts.used_at, facts.urgent_until_s))

    def due(self, used_at: float, urgent_until_s: float, visit: Visit | None) -> tuple[int, float]:
        return 0, max(used_at, urgent_until_s)

    def worth(self, group: int, level: int, since: float) -> float:
        return since
