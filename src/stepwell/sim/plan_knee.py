"""The knee of a curve: the size after which a byte begins to give less than the average byte did. Pure.

value  |          o----o      The point farthest above the straight line from the first point to the last, both axes
       |      o .             scaled to 1. Sizes are on a straight axis, not a logarithmic one: bytes are what is paid for.
       |    .
       | o                    A curve that is flat has none, nor has one that no point of lies above that line.
       +----------------
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LEAST_HEIGHT = 0.05  # above the line, of the whole gain: less is noise


class Bend(Enum):
    KNEE = "knee"
    RISING = "no knee: still rising at the largest size"
    FLAT = "no knee: size makes no difference in this range"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """How a curve bends; `size_bytes` is where, or the end of the range that it rises or is flat over."""

    bend: Bend
    size_bytes: int

    def as_json(self) -> dict[str, object]:
        return {"bend": self.bend.name.lower(), "size_bytes": self.size_bytes}


def knee(sizes: Sequence[int], values: Sequence[float], *, least_gain: float) -> Knee:
    """The knee of `values` over growing `sizes`; a curve that gains less than `least_gain` is flat."""
    assert list(sizes) == sorted(set(sizes)) and len(sizes) == len(values) > 0, f"not a curve: {sizes=} {values=}"
    best = [max(values[: at + 1]) for at in range(len(values))]  # more memory can be left unused
    gain = best[-1] - best[0]
    if gain < least_gain or gain <= 0:
        return Knee(bend=Bend.FLAT, size_bytes=sizes[0])
    span = sizes[-1] - sizes[0]
    above = [(value - best[0]) / gain - (size - sizes[0]) / span for size, value in zip(sizes, best, strict=True)]
    highest = max(range(len(above)), key=above.__getitem__)
    if above[highest] < LEAST_HEIGHT:
        return Knee(bend=Bend.RISING, size_bytes=sizes[-1])
    return Knee(bend=Bend.KNEE, size_bytes=sizes[highest])
