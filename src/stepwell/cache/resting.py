"""Checkpoints that wait on the host before they go down to the store, so that those soon superseded never do.

A conversation leaves a checkpoint at every turn, and the next turn makes all but the last of them useless. One that is
followed by another on its path when its rest is over is not stored, unless requests may leave the path there: at a
milestone, or where some have. A path that never rests is stored every few rests all the same, so a crash costs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from stepwell.metrics.counters import Counters
from stepwell.tree.node import Checkpoint

MOST_RESTS = 10  # of a path whose checkpoints keep being superseded, before one is stored all the same


@dataclass(slots=True)
class _Rest:
    began_s: float
    waited_since_s: float  # since when nothing of its path was stored: the one it supersedes may have waited before it


class Resting:
    """The checkpoints at rest, in the order in which they came. One thread."""

    def __init__(self, rest_s: float, *, is_superseded: Callable[[Checkpoint], bool], counters: Counters) -> None:
        """`is_superseded` says whether a later checkpoint serves everybody who would resume at one."""
        self._rest_s = rest_s
        self._is_superseded = is_superseded
        self._counters = counters
        self._rests: dict[Checkpoint, _Rest] = {}
        self._is_over = not rest_s

    def __len__(self) -> int:
        return len(self._rests)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._rests

    @property
    def num_due(self) -> int:
        """How many wait for nothing but their turn, once all rests are over."""
        return len(self._rests) if self._is_over else 0

    def enter(self, checkpoint: Checkpoint, now_s: float) -> None:
        """Lets a checkpoint rest that is on the host and not in the store; one that was superseded already has no use for it."""
        if checkpoint not in self._rests and not (self._rest_s and self._is_superseded(checkpoint)):
            self._rests[checkpoint] = _Rest(now_s, now_s)

    def leave(self, checkpoint: Checkpoint) -> bool:
        """Ends a rest early; false for a checkpoint that is not at rest."""
        return self._rests.pop(checkpoint, None) is not None

    def end_all(self) -> None:
        """Nothing rests any longer: the store is about to go, or the cache is."""
        self._is_over = True

    def take_all(self) -> list[Checkpoint]:
        """Takes out everything at rest; returns what was not superseded."""
        taken = list(self._rests)
        self._rests.clear()
        return [each for each in taken if each.node is not None and not self._is_superseded(each)]

    def give_up(self, now_s: float, age_s: float) -> int:
        """Takes out those that would have been stored that long ago, had the store been well; how many they were."""
        last_s = now_s - self._rest_s - age_s
        late = [each for each, _ in takewhile(lambda item: item[1].began_s < last_s, self._rests.items())]
        for each in late:
            del self._rests[each]
        return len(late)

    def rested(self, now_s: float) -> Iterator[Checkpoint]:
        """Takes out those whose rest is over and that are to be stored, one at a time."""
        while self._rests:
            checkpoint, rest = next(iter(self._rests.items()))
            if not self._is_over and now_s - rest.began_s < self._rest_s:
                return
            del self._rests[checkpoint]
            if checkpoint.node is None:
                continue
            is_overdue = now_s - rest.waited_since_s >= MOST_RESTS * self._rest_s
            if self._rest_s and not is_overdue and self._is_superseded(checkpoint):
                self._counters.add("backup_superseded_checkpoints")
                self._hand_on(checkpoint, rest)
            else:
                yield checkpoint

    def _hand_on(self, checkpoint: Checkpoint, rest: _Rest) -> None:
        heir = self._rests.get(checkpoint.follower) if checkpoint.follower is not None else None
        if heir is not None:
            heir.waited_since_s = min(heir.waited_since_s, rest.waited_since_s)
