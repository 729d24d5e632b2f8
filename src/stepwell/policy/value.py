"""What a cached object is worth keeping: the one order in which a tier gives things up.

An object that saves `saved_tokens` of recompute for `size_bytes`, and whose chance of being used again
halves every `half_life_s`, is worth

    worth(t) = saved_tokens / size_bytes * (1 + uses) * 2 ** (-(t - used_at) / half_life_s)

Only the order matters, and the logarithm of that order does not depend on t:

    rank = used_at + half_life_s * log2(saved_tokens / size_bytes * (1 + uses))

so a heap stays valid while time passes. With the second term left out it is plain LRU. Pure functions.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple, Protocol


class Facts(NamedTuple):  # not a dataclass: one is made for every candidate that eviction looks at
    """What a value policy may look at."""

    used_at: float
    uses: int
    saved_tokens: int
    size_bytes: int


class ValuePolicy(Protocol):
    """Ranks objects: the lowest is given up first. Touching an object must not lower its rank."""

    def rank(self, facts: Facts) -> float: ...


class LeastRecent:
    """Time since last use alone."""

    def rank(self, facts: Facts) -> float:
        return facts.used_at


class SavedPerByte:
    """Expected recompute saved per byte, fading with a half-life."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s

    def rank(self, facts: Facts) -> float:
        return facts.used_at + self._half_life_s * log2(max(facts.saved_tokens, 1) / facts.size_bytes * (1 + facts.uses))
