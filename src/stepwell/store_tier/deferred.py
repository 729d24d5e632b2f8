"""Checkpoints that rest on the host before they go down to the store, so that those soon superseded never do.

A conversation leaves a checkpoint at every turn, and the next turn makes all but the last useless. So when a rest is over:

    nothing follows it, it is a milestone, or requests left the path there    it is stored
    a later checkpoint of its path is in the store                            it never will be
    one follows it, but is not in the store yet                               it rests again

A path of which nothing was stored for `MOST_RESTS` is stored at the next chance, so a crash costs no more than that. What rests
is a small part of the host: beyond it the oldest rests are over at once, and so they all are before the store goes. What leaves
the host rests no longer; what rests is worth more there (`policy/value.py`), so that it does not leave for little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from stepwell.base.ids import Tier
from stepwell.metrics.counters import Counters
from stepwell.tree.node import Checkpoint, Residency
from stepwell.tree.ranking import previous_checkpoint

MOST_RESTS = 10  # on end

Question = Callable[[Checkpoint], bool]


class _Verdict(Enum):
    STORE = auto()
    SKIP = auto()
    REST = auto()


@dataclass(slots=True)
class _Deferral:
    began_s: float
    waiting_since_s: float  # since when nothing of its path was stored: those it superseded may have rested before it
    size_bytes: int


class DeferredBackups:
    """The checkpoints at rest, in the order in which they came. One thread."""

    def __init__(
        self,
        *,
        rest_s: float,
        most_bytes: int,
        is_superseded: Question,
        can_be_stored: Question,
        is_stored: Question,
        on_change: Callable[[Residency], None],
        counters: Counters,
    ) -> None:
        """`is_superseded` says whether a later checkpoint of its path serves everybody who would resume at one, and
        `can_be_stored` whether all of it is on the host, and what it stands on in the store; `is_stored`, whether the store is
        believed to have it. `on_change` is told of those on
        the host whose rest began or ended.
        """
        self._rest_s = rest_s  # 0: nothing ever rests
        self._most_bytes = most_bytes
        self._is_superseded = is_superseded
        self._can_be_stored = can_be_stored
        self._is_stored = is_stored
        self._on_change = on_change
        self._counters = counters
        self._deferrals: dict[Checkpoint, _Deferral] = {}
        self._size_bytes = 0
        self._ended_at_s: float | None = None

    def __len__(self) -> int:
        return len(self._deferrals)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._deferrals)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._deferrals

    @property
    def is_used(self) -> bool:
        return self._rest_s > 0

    @property
    def num_due(self) -> int:
        """How many wait for nothing but their turn, once all rests are over."""
        return len(self._deferrals) if self._ended_at_s is not None else 0

    def enter(self, residency: Residency, size_bytes: int, now_s: float) -> bool:
        """Lets a checkpoint rest that is on the host and not in the store; true if it is to be stored instead, and now."""
        checkpoint = residency.checkpoint
        if checkpoint in self._deferrals or (self._rest_s and self._is_spared(checkpoint)):
            return False
        assert checkpoint.node is not None
        before = previous_checkpoint(checkpoint.node, checkpoint.page)
        superseded = self._deferrals.get(before) if before is not None else None
        since_s = superseded.waiting_since_s if superseded is not None else now_s
        residency.unsaved = False  # if it was refused, that was before
        if not self._rest_s or self._is_overdue(since_s, now_s):
            return True
        self._put(checkpoint, _Deferral(now_s, since_s, size_bytes))
        return False

    def leave(self, checkpoint: Checkpoint) -> bool:
        """Ends a rest early; true for a checkpoint that is to be stored now or never."""
        return self._take(checkpoint) is not None and not self._is_spared(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """It left the host: there is nothing to be stored of it, nor any room that it takes."""
        self._take(checkpoint)

    def end_all(self, now_s: float) -> None:
        """Nothing rests any longer: the store is about to go, or the cache is."""
        self._ended_at_s = now_s

    def give_up(self, now_s: float, age_s: float) -> int:
        """Takes out what could not be stored for so long after all rests were over; how many they were."""
        if self._ended_at_s is None or now_s - self._ended_at_s <= age_s:
            return 0
        late = len(self._deferrals)
        self.clear()
        return late

    def clear(self) -> None:
        for checkpoint in list(self._deferrals):
            self._take(checkpoint)

    def due(self, now_s: float) -> Iterator[Checkpoint]:
        """Takes out those whose rest is over and that are to be stored, one at a time."""
        while self._deferrals:
            checkpoint, rest = next(iter(self._deferrals.items()))
            if not self._is_pressed and now_s - rest.began_s < self._rest_s:
                return
            verdict = self._verdict(checkpoint, is_overdue=self._is_overdue(rest.waiting_since_s, now_s))
            self._take(checkpoint)
            if verdict is _Verdict.REST:
                self._put(checkpoint, _Deferral(now_s, rest.waiting_since_s, rest.size_bytes))
            elif verdict is _Verdict.SKIP:
                self._counters.add("backup_superseded_checkpoints")
            else:
                self._forgive_followers(checkpoint, now_s)
                yield checkpoint

    def audit(self) -> None:
        """Asserts that all that rests is on the host, and that its bytes add up."""
        for checkpoint in self._deferrals:
            residency = checkpoint.ready_in(Tier.HOST)
            assert residency is not None and residency.sole_copy, (
                f"boundary {checkpoint.page} rests on the host without being there"
            )
        size_bytes = sum(rest.size_bytes for rest in self._deferrals.values())
        assert size_bytes == self._size_bytes, f"{size_bytes=} counted {self._size_bytes}"

    # ---- inside -----------------------------------------------------------------------------------

    @property
    def _is_pressed(self) -> bool:
        return self._ended_at_s is not None or self._size_bytes > self._most_bytes

    def _is_overdue(self, waiting_since_s: float, now_s: float) -> bool:
        return now_s - waiting_since_s >= MOST_RESTS * self._rest_s

    def _verdict(self, checkpoint: Checkpoint, *, is_overdue: bool) -> _Verdict:
        if self._is_spared(checkpoint):
            return _Verdict.SKIP
        if self._ended_at_s is not None or not self._is_superseded(checkpoint):
            return _Verdict.STORE
        heirs = [each for each in _followers(checkpoint) if each in self._deferrals]
        if self._is_pressed:
            return _Verdict.SKIP if any(map(self._can_be_stored, heirs)) else _Verdict.STORE
        return _Verdict.STORE if is_overdue and not heirs else _Verdict.REST

    def _is_spared(self, checkpoint: Checkpoint) -> bool:
        """Whether the store has a later checkpoint that serves everybody who would resume at this one."""
        return self._is_superseded(checkpoint) and any(map(self._is_stored, _followers(checkpoint)))

    def _forgive_followers(self, checkpoint: Checkpoint, now_s: float) -> None:
        """Something of their path is stored now."""
        for each in _followers(checkpoint):
            if each in self._deferrals:
                self._deferrals[each].waiting_since_s = now_s

    def _put(self, checkpoint: Checkpoint, rest: _Deferral) -> None:
        self._deferrals[checkpoint] = rest
        self._size_bytes += rest.size_bytes
        self._mark(checkpoint, sole_copy=True)

    def _take(self, checkpoint: Checkpoint) -> _Deferral | None:
        rest = self._deferrals.pop(checkpoint, None)
        if rest is not None:
            self._size_bytes -= rest.size_bytes
            self._mark(checkpoint, sole_copy=False)
        return rest

    def _mark(self, checkpoint: Checkpoint, *, sole_copy: bool) -> None:
        residency = checkpoint.held[Tier.HOST]
        if residency is not None:
            residency.sole_copy = sole_copy
            self._on_change(residency)


def _followers(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Those after it on its path, on the branch where one was left last."""
    here = checkpoint.follower
    while here is not None:
        yield here
        here = here.follower
