"""Counts of what happened, by name. Nothing here decides; every number can be read at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Counters:
    """Monotone counters; a name appears with its first count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        assert amount >= 0, f"counters only grow: {name=} {amount=}"
        self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> Mapping[str, int]:
        """All counts so far, sorted by name; a copy."""
        return dict(sorted(self._counts.items()))
