"""When to leave a failing store alone, and when to try it again. Pure: times are handed in.

CLOSED --failures in a row--> OPEN --cool-off--> one try --success--> CLOSED
                                ^------failure, longer cool-off------'
"""

from __future__ import annotations

from enum import Enum

FAILURES_TO_OPEN = 3
FIRST_COOL_OFF_S, LONGEST_COOL_OFF_S = 1.0, 60.0


class BreakerState(Enum):
    CLOSED = "closed"  # all is well
    OPEN = "open"  # the store is left alone
    TRYING = "trying"  # one request is out to see whether it is well again


class Breaker:
    """Counts failures in a row. One thread."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._cool_off_s = FIRST_COOL_OFF_S
        self._opened_s = 0.0

    def allows(self, now: float) -> bool:
        """Whether the store may be asked now. Changes nothing."""
        if self.state is BreakerState.OPEN:
            return now >= self._opened_s + self._cool_off_s
        return self.state is BreakerState.CLOSED

    def asked(self, now: float) -> None:
        """A request went out. After a cool-off it is the one that decides."""
        if self.state is BreakerState.OPEN and self.allows(now):
            self.state = BreakerState.TRYING

    def succeeded(self) -> None:
        if self.state is not BreakerState.OPEN:  # a straggler from before does not say that it is well now
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._cool_off_s = FIRST_COOL_OFF_S

    def undecided(self) -> None:
        """A request was called off before it said anything: the next one decides."""
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.OPEN

    def failed(self, now: float) -> bool:
        """Notes a failure; true when it switched the store off."""
        self._failures += 1
        if self.state is BreakerState.TRYING:
            self._cool_off_s = min(2 * self._cool_off_s, LONGEST_COOL_OFF_S)
        elif self.state is BreakerState.OPEN or self._failures < FAILURES_TO_OPEN:
            return False
        self.state = BreakerState.OPEN
        self._opened_s = now
        return True
