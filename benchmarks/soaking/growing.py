"""Whether a process grows: the slope of its memory once it is warm, and what it has open. Reads numbers, nothing else.

Connections come and go: the owner of the log has those of all others, with a thread for each, and so have clients that ask at
once. So what counts is how few files and threads there ever are, as owner and as client; what is left open raises that too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from soaking.backend import Footprint

WARM_SHARE = 1 / 3  # of the soak: until tiers and the store are full and every kind of trouble was met
JUDGED_FROM_S = 180.0  # a shorter watch cannot separate noise from growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at_s: float
    found: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of one process while it was watched."""

    watched_s: float
    first_bytes: float
    last_bytes: float
    slope_bytes_per_s: float
    files: int  # more of them: the fewest of the second half, and of the first, in the same role
    threads: int

    @property
    def grown_bytes(self) -> float:
        """By the slope, so that where a wave of the noise began and ended does not count."""
        return self.slope_bytes_per_s * self.watched_s


def growth(samples: Sequence[Sample]) -> Growth | None:
    """After the warm-up; None where there are too few samples."""
    if not samples:
        return None
    begins = samples[0].at_s + WARM_SHARE * (samples[-1].at_s - samples[0].at_s)
    warm = [sample for sample in samples if sample.at_s >= begins]
    if len(warm) < 10:
        return None
    tenth, half = len(warm) // 10, len(warm) // 2
    first, last = warm[:tenth], warm[-tenth:]
    early, late = warm[:half], warm[half:]
    return Growth(
        watched_s=warm[-1].at_s - warm[0].at_s,
        first_bytes=median(each.found.memory_bytes for each in first),
        last_bytes=median(each.found.memory_bytes for each in last),
        slope_bytes_per_s=slope([(each.at_s, each.found.memory_bytes) for each in warm]),
        files=_more(early, late, lambda found: found.files),
        threads=_more(early, late, lambda found: found.threads),
    )


def _more(early: Sequence[Sample], late: Sequence[Sample], count: Callable[[Footprint], int]) -> int:
    """How many more there are at the least, as the log's owner or not: what was met in both halves and grew most."""
    before, after = _fewest(early, count), _fewest(late, count)
    return max((after[role] - before[role] for role in before.keys() & after.keys()), default=0)


def _fewest(samples: Sequence[Sample], count: Callable[[Footprint], int]) -> dict[bool, int]:
    """By whether the process was the owner of the log."""
    found: dict[bool, int] = {}
    for each in samples:
        role, number = each.found.owns, count(each.found)
        found[role] = min(number, found.get(role, number))
    return found


def slope(points: Sequence[tuple[float, float]], most: int = 400) -> float:
    """The median of the slopes between all pairs (Theil and Sen): a third of the points may be anything."""
    some = points[:: max(len(points) // most, 1)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for at, a in enumerate(some) for b in some[at + 1 :] if b[0] > a[0]]
    return median(slopes) if slopes else 0.0
