"""What a store that is full gives up next, as far as can be told without asking it: what went down longest ago.

A guess: others may use the store, what was read since has a later turn, and what memory has again an earlier one. It decides
only whether something is worth writing. While nothing is, nothing more goes down, and the guess stays what it was, until that
has faded. A store that has not been filled from here is taken to have room; so is one that several ranks fill until each has
written as much as it keeps, since bytes are counted of one rank.
"""

from __future__ import annotations

from collections import deque

from stepwell.policy.value import Place

MOST_PLACES = 4096  # that are remembered apart, about: what goes down in smaller pieces shares the place of the first of them


class Displaced:
    """The places of what went down, as much as the store has room for."""

    def __init__(self, room_bytes: int | None) -> None:
        """`room_bytes`: what the store keeps at most; None where nobody knows. One that keeps nothing gives up nothing."""
        self._room_bytes = room_bytes or None
        self._went_down: deque[tuple[int, Place]] = deque()
        self._num_bytes = 0

    def note(self, place: Place, size_bytes: int) -> None:
        """Something of that place went down."""
        if self._room_bytes is None or not size_bytes:
            return
        self._num_bytes += size_bytes
        if self._went_down and self._went_down[-1][0] + size_bytes <= self._room_bytes // MOST_PLACES:
            before, place = self._went_down.pop()
            size_bytes += before
        self._went_down.append((size_bytes, place))
        while self._num_bytes - self._went_down[0][0] >= self._room_bytes:
            self._num_bytes -= self._went_down.popleft()[0]

    @property
    def next(self) -> Place | None:
        """The place of what would be given up for more; None while there is room."""
        if self._room_bytes is None or self._num_bytes < self._room_bytes:
            return None
        return self._went_down[0][1]
