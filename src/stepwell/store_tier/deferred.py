"""Checkpoints whose backup is deferred: they stay on the host for a while, so that those soon superseded are never stored.

A conversation leaves a checkpoint at every turn, and the next turn makes all but the last useless. So when the delay is over:

    nothing follows it, it is a milestone, or the path branches there         it is stored
    a later checkpoint of its path is in the store                            it is never stored
    one follows it, but is not in the store yet                               it is deferred again

A path without anything stored for `MOST_DELAYS` is stored at the next chance, so a crash costs no more than that; after one delay
if the cache is durable. Deferred checkpoints take a small part of the host: beyond it the oldest are stored at once, and so are
all of them before the store is detached. A checkpoint that leaves the host is no longer deferred; deferred ones are more valuable
there (`policy/value.py`), so that they are not evicted for little.
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
    waiting_since_s: float  # since when nothing of its path was stored: that may include the time of those it superseded
    size_bytes: int


class DeferredBackups:
    """The checkpoints whose backup is deferred, in the order of arrival. One thread."""

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
        """`is_superseded` says whether a later checkpoint of its path serves every request that would resume at one, and
        `can_be_stored` whether all of it is on the host, and everything it depends on in the store; `is_stored` whether the store
        is believed to have it. `on_change` is called with residencies on the host whose backup was deferred, or is not any more.
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
        """How many could be stored now, if nothing is deferred any more."""
        return len(self._deferrals) if self._ended_at_s is not None else 0

    def enter(self, residency: Residency, size_bytes: int, now_s: float) -> bool:
        """Defers the backup of a checkpoint on the host that is not in the store; True if it must be stored now instead."""
        checkpoint = residency.checkpoint
        if checkpoint in self._deferrals or (self._delay_s and self._is_spared(checkpoint)):
            return False
        assert checkpoint.node is not None
        before = previous_checkpoint(checkpoint.node, checkpoint.page)
        superseded = self._deferrals.get(before) if before is not None else None
        since_s = superseded.waiting_since_s if superseded is not None else now_s
        residency.unsaved = False  # an earlier refusal no longer counts
        if not self._delay_s or self._is_overdue(since_s, now_s):
            return True
        self._put(checkpoint, _Deferral(now_s, since_s, size_bytes))
        return False

    def leave(self, checkpoint: Checkpoint) -> bool:
        """Ends a delay early; True if the checkpoint must be stored now or never."""
        return self._take(checkpoint) is not None and not self._is_spared(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drops a checkpoint that left the host: it cannot be stored, and takes no space."""
        self._take(checkpoint)

    def end_all(self, now_s: float) -> None:
        """Ends all delays: the store is about to be detached, or the cache closed."""
        self._ended_at_s = now_s

    def rested(self, now_s: float) -> None:
        """Restarts timers after a while in which nothing could be sent: what is due has had no chance."""
        if self._ended_at_s is not None:
            self._ended_at_s = now_s

    def give_up(self, now_s: float, age_s: float) -> int:
        """Drops checkpoints that could not be stored for `age_s` after all delays were over; returns their number."""
        if self._ended_at_s is None or now_s - self._ended_at_s <= age_s:
            return 0
        late = len(self._deferrals)
        self.clear()
        return late

    def clear(self) -> None:
        for checkpoint in list(self._deferrals):
            self._take(checkpoint)

    def due(self, now_s: float) -> Iterator[Checkpoint]:
        """Removes and returns those whose delay is over and that must be stored, one at a time."""
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
        """Asserts that all deferred checkpoints are on the host, and that their bytes add up."""
        for checkpoint in self._deferrals:
            residency = checkpoint.ready_in(Tier.HOST)
            assert residency is not None and residency.backup_deferred, (
                f"boundary {checkpoint.page} is deferred, but not on the host"
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
        """Whether the store has a later checkpoint that serves every request that would resume at this one."""
        return self._is_superseded(checkpoint) and any(map(self._is_stored, _followers(checkpoint)))

    def _forgive_followers(self, checkpoint: Checkpoint, now_s: float) -> None:
        """Resets the timers of later checkpoints of a path: something of it is stored now."""
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
        residency = checkpoint.residencies[Tier.HOST]
        if residency is not None:
            residency.backup_deferred = backup_deferred
            self._on_change(residency)


def _followers(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The checkpoints after it on its path, on the branch where one was left last."""
    here = checkpoint.follower
    while here is not None:
        yield here
        here = here.follower
