"""What a cached object is worth keeping: the one order in which a tier gives things up.

    worth = recompute saved per byte * returns a second to expect * share of returns that need this object

The second factor changes with time, the others do not. So an object has a place (group, level) that says how its worth
will change, and in one place the one visited longest ago goes first; a tier compares one object of each place. A priority
doubles the worth at every step, and fades by a step every `PRIORITY_STEP_S`. Pure.
"""

from __future__ import annotations

from math import log2, pow
from typing import NamedTuple, Protocol

from stepwell.base.config import PRIORITY_STEP_S
from stepwell.policy.reuse_model import NUM_GROUPS, ReuseModel, Visit

LEVELS_PER_OCTAVE = 4
MOST_STEPS = 32  # of priority, from the visit on
DEFERRED_WORTH = 4.0  # times as much: what rests is stored too early when it has to go, or lost while the store is busy


class Facts(NamedTuple):  # not a dataclass: one is made for every candidate that eviction looks at
    """What a value policy may look at."""

    used_at: float
    saved_tokens: int
    size_bytes: int  # that go with it
    urgent_until_s: float = 0.0  # when the last step of its priority is lost
    visit: Visit | None = None  # the latest on its path
    distance: int = 0  # who leaves the path nearer than this many tokens to that visit's end needs it,
    next_distance: int = 0  # unless they do nearer than this, and are served by the checkpoint that follows
    backup_deferred: bool = False  # it is not in the store yet, and may be superseded before it has to be


class Place(NamedTuple):
    """Objects of one group and level lose worth alike."""

    group: int
    level: int
    since: float


class ValuePolicy(Protocol):
    """Puts objects into places, and compares those; the lowest worth is given up first."""

    def place(self, facts: Facts) -> Place: ...

    def worth(self, group: int, level: int, since: float) -> float:
        """Of a place, now. Never rises while time passes, and of two in one group and level the later has no less."""
        ...


class Expected:
    """Expected recompute saved per byte and second kept, as the reuse model says."""

    def __init__(self, reuse: ReuseModel) -> None:
        self._reuse = reuse

    def place(self, facts: Facts) -> Place:
        visit, share = facts.visit, 1.0
        if facts.distance:
            share = self._reuse.share(facts.next_distance, facts.distance)
        if facts.backup_deferred:
            share *= DEFERRED_WORTH
        level = round(LEVELS_PER_OCTAVE * log2(max(facts.saved_tokens, 1) / facts.size_bytes * share))
        group, since = (visit.group, visit.at_s) if visit is not None else (0, facts.used_at)
        steps = round((facts.urgent_until_s - since) / PRIORITY_STEP_S) if facts.urgent_until_s > since else 0
        steps = min(steps, MOST_STEPS)  # more than a priority has where the request was long at it
        return Place(group + steps * NUM_GROUPS, level, since)

    def worth(self, group: int, level: int, since: float) -> float:
        octaves = level / LEVELS_PER_OCTAVE
        if group >= NUM_GROUPS:
            steps, group = divmod(group, NUM_GROUPS)
            octaves += max(steps - self._reuse.age_s(since) / PRIORITY_STEP_S, 0.0)
        return self._reuse.worth(group, since) * pow(2.0, octaves)
