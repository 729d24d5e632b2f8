"""What a clairvoyant can give up, and which of it first. Knows worths and times; nothing of pages or checkpoints."""

from __future__ import annotations

import numpy as np

from stepwell.sim.clairvoyant_tree import NEVER_S, NOWHERE, Floats, Ints

SOON_S = 0.001  # requests closer than this are at the same time


class Choice:
    """Candidates C, packed at the front of arrays so that looking at all of them is one pass; each is a place P of a tree."""

    def __init__(self, num_places: int) -> None:
        self._next_s_P = np.full(num_places, NEVER_S)
        self._slot_P = np.full(num_places, NOWHERE)
        self._count = 0
        self._place_C = np.zeros(num_places, np.int64)
        self._worth_C = np.zeros(num_places)

    def offer(self, place: int, worth: float) -> None:
        """`place` may be given up; or it may be already, and its worth has changed."""
        slot = int(self._slot_P[place])
        if slot == NOWHERE:
            slot = self._slot_P[place] = self._count
            self._place_C[slot] = place
            self._count += 1
        self._worth_C[slot] = worth

    def withdraw(self, place: int) -> None:
        """`place` may not be given up. It need not have been offered."""
        slot = int(self._slot_P[place])
        if slot != NOWHERE:
            self._count -= 1
            last = self._place_C[self._count]
            self._place_C[slot], self._worth_C[slot] = last, self._worth_C[self._count]
            self._slot_P[last] = slot
            self._slot_P[place] = NOWHERE

    def pass_by(self, path: Ints, next_s: Floats) -> None:
        """A request comes by these places, and the next one at these times."""
        self._next_s_P[path] = next_s

    def first(self, at_s: float, *, sparing: Ints) -> int:
        """The candidate of least worth for each second until somebody comes by, none of `sparing`; NOWHERE if there is none."""
        if not self._count:
            return NOWHERE
        places = self._place_C[: self._count]
        worth = self._worth_C[: self._count] / np.maximum(self._next_s_P[places] - at_s, SOON_S)
        slots = self._slot_P[sparing]
        worth[slots[slots != NOWHERE]] = np.inf
        slot = int(worth.argmin())
        return NOWHERE if worth[slot] == np.inf else int(places[slot])
