"""Checkpoints whose backup is deferred: they stay on the host for a while first, so that those soon superseded are never stored.

A conversation leaves a checkpoint at every turn, and the next turn makes all but the last useless. So when the time is over:

    nothing follows it, it is a milestone, or requests left the path there    it is stored
    a later checkpoint of its path is in the store                            it never will be
    one follows it, but is not in the store yet                               it is deferred again

A path of which nothing was stored for `MOST_DELAYS` is stored at the next chance, so a crash costs no more than that; for one
delay, where the cache is durable. What is deferred is a small part of the host: beyond it the oldest are stored at once, and so
are all before the store goes. What leaves the host is deferred no longer; what is deferred is worth more there
(`policy/value.py`), so that it does not leave for little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from stepwell.base.ids import Tier
from stepwell.base.meters import Counters
from stepwell.tree.node import Checkpoint, Residency, previous_checkpoint

MOST_DELAYS = 10  # one after another

Question = Callable[[Checkpoint], bool]


class _Verdict(Enum):
    STORE = auto()
    SKIP = auto()
    DEFER = auto()


@dataclass(slots=True)
class _Deferral:
    began_s: float
    waiting_since_s: float  # since when nothing of its path was stored: those it superseded may have been deferred before it
    size_bytes: int


class DeferredBackups:
    """The checkpoints whose backup is deferred, in the order in which they came. One thread."""

    def __init__(
        self,
        *,
        delay_s: float,
        most_delays: int = MOST_DELAYS,
        most_bytes: int,
        is_superseded: Question,
        can_be_stored: Question,
        is_stored: Question,
        on_change: Callable[[Residency], None],
        counters: Counters,
    ) -> None:
        """`is_superseded` says whether a later checkpoint of its path serves everybody who would resume at one, and
        `can_be_stored` whether all of it is on the host, and what it stands on in the store; `is_stored`, whether the store is
        believed to have it. `on_change` is told of those on the host
        whose backup was deferred, or is so no longer.
        """
        self._delay_s = delay_s  # 0: nothing is ever deferred
        self._most_delays = most_delays
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
        return self._delay_s > 0

    @property
    def num_due(self) -> int:
        """How many wait for nothing but their turn, once nothing is deferred any more."""
        return len(self._deferrals) if self._ended_at_s is not None else 0

    def enter(self, residency: Residency, size_bytes: int, now_s: float) -> bool:
        """Defers the backup of a checkpoint on the host that is not in the store; true if it is to be stored instead, and now."""
        checkpoint = residency.checkpoint
        if checkpoint in self._deferrals or (self._delay_s and self._is_spared(checkpoint)):
            return False
        assert checkpoint.node is not None
        before = previous_checkpoint(checkpoint.node, checkpoint.page)
        superseded = self._deferrals.get(before) if before is not None else None
        since_s = superseded.waiting_since_s if superseded is not None else now_s
        residency.unsaved = False  # if it was refused, that was before
        if not self._delay_s or self._is_overdue(since_s, now_s):
            return True
        self._put(checkpoint, _Deferral(now_s, since_s, size_bytes))
        return False

    def leave(self, checkpoint: Checkpoint) -> bool:
        """Ends a delay early; true for a checkpoint that is to be stored now or never."""
        return self._take(checkpoint) is not None and not self._is_spared(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """It left the host: there is nothing to be stored of it, nor any room that it takes."""
        self._take(checkpoint)

    def end_all(self, now_s: float) -> None:
        """Nothing is deferred any longer: the store is about to go, or the cache is."""
        self._ended_at_s = now_s

    def rested(self, now_s: float) -> None:
        """Nobody could send anything off for a while: what is due has had no chance, and its time begins anew."""
        if self._ended_at_s is not None:
            self._ended_at_s = now_s

    def give_up(self, now_s: float, age_s: float) -> int:
        """Takes out what could not be stored for so long after all delays were over; how many they were."""
        if self._ended_at_s is None or now_s - self._ended_at_s <= age_s:
            return 0
        late = len(self._deferrals)
        self.clear()
        return late

    def clear(self) -> None:
        for checkpoint in list(self._deferrals):
            self._take(checkpoint)

    def due(self, now_s: float) -> Iterator[Checkpoint]:
        """Takes out those whose time is over and that are to be stored, one at a time."""
        while self._deferrals:
            checkpoint, deferral = next(iter(self._deferrals.items()))
            if not self._is_pressed and now_s - deferral.began_s < self._delay_s:
                return
            verdict = self._verdict(checkpoint, is_overdue=self._is_overdue(deferral.waiting_since_s, now_s))
            self._take(checkpoint)
            if verdict is _Verdict.DEFER:
                self._put(checkpoint, _Deferral(now_s, deferral.waiting_since_s, deferral.size_bytes))
            elif verdict is _Verdict.SKIP:
                self._counters.add("backup_superseded_checkpoints")
            else:
                self._forgive_followers(checkpoint, now_s)
                yield checkpoint

    def audit(self) -> None:
        """Asserts that all that is deferred is on the host, and that its bytes add up."""
        for checkpoint in self._deferrals:
            residency = checkpoint.ready_in(Tier.HOST)
            assert residency is not None and residency.backup_deferred, (
                f"boundary {checkpoint.page} rests on the host without being there"
            )
        size_bytes = sum(each.size_bytes for each in self._deferrals.values())
        assert size_bytes == self._size_bytes, f"{size_bytes=} counted {self._size_bytes}"

    # ---- inside -----------------------------------------------------------------------------------

    @property
    def _is_pressed(self) -> bool:
        return self._ended_at_s is not None or self._size_bytes > self._most_bytes

    def _is_overdue(self, waiting_since_s: float, now_s: float) -> bool:
        return now_s - waiting_since_s >= self._most_delays * self._delay_s

    def _verdict(self, checkpoint: Checkpoint, *, is_overdue: bool) -> _Verdict:
        if self._is_spared(checkpoint):
            return _Verdict.SKIP
        if self._ended_at_s is not None or not self._is_superseded(checkpoint):
            return _Verdict.STORE
        heirs = [each for each in _followers(checkpoint) if each in self._deferrals]
        if self._is_pressed:
            return _Verdict.SKIP if any(map(self._can_be_stored, heirs)) else _Verdict.STORE
        return _Verdict.STORE if is_overdue and not heirs else _Verdict.DEFER

    def _is_spared(self, checkpoint: Checkpoint) -> bool:
        """Whether the store has a later checkpoint that serves everybody who would resume at this one."""
        return self._is_superseded(checkpoint) and any(map(self._is_stored, _followers(checkpoint)))

    def _forgive_followers(self, checkpoint: Checkpoint, now_s: float) -> None:
        """Something of their path is stored now."""
        for each in _followers(checkpoint):
            if each in self._deferrals:
                self._deferrals[each].waiting_since_s = now_s

    def _put(self, checkpoint: Checkpoint, deferral: _Deferral) -> None:
        self._deferrals[checkpoint] = deferral
        self._size_bytes += deferral.size_bytes
        self._mark(checkpoint, backup_deferred=True)

    def _take(self, checkpoint: Checkpoint) -> _Deferral | None:
        deferral = self._deferrals.pop(checkpoint, None)
        if deferral is not None:
            self._size_bytes -= deferral.size_bytes
            self._mark(checkpoint, backup_deferred=False)
        return deferral

    def _mark(self, checkpoint: Checkpoint, *, backup_deferred: bool) -> None:
        residency = checkpoint.held[Tier.HOST]
        if residency is not None:
            residency.backup_deferred = backup_deferred
            self._on_change(residency)


def _followers(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Those after it on its path, on the branch where one was left last."""
    here = checkpoint.follower
    while here is not None:
        yield here
        here = here.follower
