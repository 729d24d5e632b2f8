"""What the cells of a report come to: the best fixed rule, ours beside it, and how much of the gap to the reference it closes.

    0 ....... best fixed rule ....... ours ............. reference ....... ceiling
                    |----- won ---------|                    |
                    |----------------- gap -----------------|        closed = won / gap

Pure: cells in, figures out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.grid import REFERENCES
from stepwell.sim.policies import DEFAULT

MOST_BELOW = 0.005  # goal (a): so far ours may be under the best fixed rule
LEAST_GAP = 0.03  # goal (b) looks only at gaps larger than this
LEAST_CLOSED = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trace, model and size, with the hit rate of every policy that was replayed."""

    trace: str
    spec: str
    budget: float
    budget_bytes: int
    hit_rates: Mapping[str, float]

    @property
    def best_fixed(self) -> str | None:
        """The name of the fixed rule that does best; None when none was replayed."""
        return self._best(name for name in self.hit_rates if is_fixed(name))

    @property
    def best_other(self) -> str | None:
        """The best of those that are neither fixed rules, nor ours, nor offline."""
        return self._best(name for name in self.hit_rates if not (is_fixed(name) or name == DEFAULT or name in REFERENCES))

    @property
    def reference(self) -> str | None:
        return self._best(name for name in self.hit_rates if name in REFERENCES)

    @property
    def won(self) -> float | None:
        """Ours minus the best fixed rule."""
        ours, fixed = self.hit_rates.get(DEFAULT), self.rate(self.best_fixed)
        return None if ours is None or fixed is None else ours - fixed

    @property
    def gap(self) -> float | None:
        """The reference minus the best fixed rule; negative where the reference, which is greedy, loses to it."""
        most, fixed = self.rate(self.reference), self.rate(self.best_fixed)
        return None if most is None or fixed is None else most - fixed

    @property
    def closed(self) -> float | None:
        """The share of the gap that ours closes; None where there is none."""
        return None if self.won is None or self.gap is None or self.gap <= 0 else self.won / self.gap

    def rate(self, name: str | None) -> float | None:
        return None if name is None else self.hit_rates[name]

    def as_json(self) -> dict[str, object]:
        names = ("trace", "spec", "budget", "budget_bytes", "best_fixed", "reference", "won", "gap", "closed")
        return {name: getattr(self, name) for name in names}

    def _best(self, names: Iterable[str]) -> str | None:
        return max(names, key=lambda name: self.hit_rates[name], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Which rows miss which goal, of how many that can be judged."""

    judged_a: int
    misses_a: Sequence[Row]
    judged_b: int
    misses_b: Sequence[Row]

    def as_json(self) -> dict[str, object]:
        return {
            "goal_a": {"judged": self.judged_a, "misses": [row.as_json() for row in self.misses_a]},
            "goal_b": {"judged": self.judged_b, "misses": [row.as_json() for row in self.misses_b]},
        }


def is_fixed(policy: str) -> bool:
    return policy == "end" or policy.startswith("every-")


def rows_of(cells: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows by trace, model and size, in the order cells come. Cells without figures are passed over."""
    found: dict[tuple[str, str, float], dict[str, Any]] = {}
    for cell in cells:
        key = (cell["trace"], cell["spec"], cell["budget"])
        row = found.setdefault(key, {"budget_bytes": cell["budget_bytes"], "hit_rates": {}})
        if cell["hit_rate"] is not None:
            row["hit_rates"][cell["policy"]] = cell["hit_rate"]
    return [Row(trace=trace, spec=spec, budget=budget, **row) for (trace, spec, budget), row in found.items()]


def summary_of(rows: Sequence[Row]) -> Summary:
    """Judges what can be judged: (a) needs ours and a fixed rule, (b) a reference too, far enough above."""
    judged_a = [row for row in rows if row.won is not None]
    judged_b = [row for row in judged_a if row.gap is not None and row.gap > LEAST_GAP]
    return Summary(
        judged_a=len(judged_a),
        misses_a=[row for row in judged_a if row.won is not None and row.won < -MOST_BELOW],
        judged_b=len(judged_b),
        misses_b=[row for row in judged_b if row.closed is not None and row.closed < LEAST_CLOSED],
    )
