"""Keeps a small reserve on the device clean, so that nobody waits for a copy: what will leave it next is saved ahead, and stays.

    order of eviction    | worth nothing |-- clean: the host has it too --|------------ what is left ------------|
                                                                          ^ saved ahead, from here on

Its copy on the host counts as what it soon is, the only one (`Run.leaving`). Once it is used again that copy is a mere
repetition, the first to leave the host. Saved ahead is only what would be saved when it leaves; what would not be goes at once
anyway.

Of runs and of checkpoints each some are kept clean, whatever the order: room for one sort is seldom made out of the other
(`eviction._make_room`).
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.base.ids import Tier
from stepwell.tiers.clean import Clean, is_clean
from stepwell.tiers.cutting import cut_end
from stepwell.tiers.eviction import bytes_of
from stepwell.tiers.saving import write_back
from stepwell.tiers.state import CacheState, Leaving
from stepwell.tiers.worth_saving import is_lost_without, is_worth_saving
from stepwell.tree.eviction_order import USEFUL
from stepwell.tree.node import Residency, Run, Victim

CLEAN_SHARE = 1 / 64  # of the device: what is used again before it leaves was copied for nothing
LARGEST_SHARE = 1 / 32  # one of the largest objects, where that takes no more than this
SORT_SHARE = 1 / 2  # of the reserve, of runs and of checkpoints each
LOOK_AGAIN = 1 / 4  # of the reserve, to be gone before more is looked for
MOST_SAVED = 16  # in a step
MOST_VICTIMS = 64  # of so many that are looked at
MOST_CHECKED = 16  # of those that were clean, in a step in which little has left


class _Part(NamedTuple):
    """How much of which sorts is to be clean."""

    runs: bool
    checkpoints: bool
    wanted_bytes: int


class Reserve:
    """Fills the reserve of one cache. Its thread."""

    def __init__(self, state: CacheState, clean: Clean) -> None:
        self._state = state
        self._clean = clean
        layout = state.arena(Tier.DEVICE).layout
        largest = max(layout.strides.values())
        size = int(CLEAN_SHARE * layout.size_bytes)
        if largest <= LARGEST_SHARE * layout.size_bytes:
            size = max(size, largest)
        if size < layout.prefix_stride:
            size = 0  # too small a device
        self.size_bytes = size
        self._parts = [_Part(True, True, size)]
        if len(layout.strides) > 1:
            self._parts += [_Part(True, False, int(SORT_SHARE * size)), _Part(False, True, int(SORT_SHARE * size))]
        self._passed_bytes = [0] * len(self._parts)  # that would go at once, since they are not worth saving
        self._room = {kind: -(-size // stride) for kind, stride in layout.strides.items()}
        self._seen = -1  # version of the tree that nothing is left to do for
        self._num_left = 0  # that may still be saved in this step

    def step(self) -> None:
        """Saves some of what will leave next, once some of what was clean has left or was used. Never waits."""
        state, clean = self._state, self._clean
        if self._seen == state.tree.version or not self.size_bytes:
            return
        has_left = clean.left_bytes >= LOOK_AGAIN * self.size_bytes
        clean.check(len(clean) if has_left else MOST_CHECKED)
        if has_left:
            clean.left_bytes, self._passed_bytes = 0, [0] * len(self._parts)
        self._num_left, is_done = MOST_SAVED, True
        for index, part in enumerate(self._parts):
            if self._has(index) >= (1 - LOOK_AGAIN) * part.wanted_bytes or state.arena(Tier.DEVICE).fits(self._room):
                continue
            is_done = self._fill(index)
            if not is_done:
                break
        self._seen = state.tree.version if is_done else -1

    # ---- inside -----------------------------------------------------------------------------------

    def _has(self, index: int) -> int:
        part, clean = self._parts[index], self._clean
        return part.runs * clean.run_bytes + part.checkpoints * clean.checkpoint_bytes + self._passed_bytes[index]

    def _lacking(self, index: int) -> int:
        return self._parts[index].wanted_bytes - self._has(index)

    def _fill(self, index: int) -> bool:
        """Goes through the order from its beginning. False when it is worth going on in the next step."""
        state, ranking, part = self._state, self._state.tree.ranking, self._parts[index]
        stay: list[Victim] = []
        self._passed_bytes[index] = 0
        ranking.hold(Tier.DEVICE, USEFUL)
        try:
            while len(stay) < MOST_VICTIMS and self._num_left and (lacking := self._lacking(index)) > 0:
                victim = ranking.pop(Tier.DEVICE, runs=part.runs, checkpoints=part.checkpoints)
                if victim is None:
                    break
                if isinstance(victim, Run):
                    victim = cut_end(state, victim, lacking // state.arena(Tier.DEVICE).layout.prefix_stride, share=0.0)
                leaving = self._save(victim)
                if leaving is not Leaving.LATER:
                    stay.append(victim)
                if leaving is Leaving.BLOCKED:
                    break
                if not is_clean(victim):
                    self._passed_bytes[index] += bytes_of(state, victim)
        finally:
            ranking.let_go(Tier.DEVICE)
            for victim in stay:
                ranking.queue(victim)
        return self._num_left > 0

    def _save(self, victim: Victim) -> Leaving:
        """Starts saving it, or notes that it is clean."""
        state, leaving = self._state, Leaving.NOW
        if is_lost_without(state, victim):
            if not is_worth_saving(state, victim):
                return Leaving.NOW
            size = bytes_of(state, victim)
            leaving = write_back(state, victim)
            if leaving is Leaving.LATER:
                self._num_left -= 1
                state.counters.add("saved_ahead_bytes", size)
        elif isinstance(victim, Residency):
            victim.leaving = victim.ready and not victim.users
        else:
            tail = state.tree.ranking.tails.of(victim)
            victim.leaving = tail is not None and not tail.dead
        if is_clean(victim):
            self._clean.note(victim)
        return leaving
