"""Clocks, and counters by name. They are passed as arguments, never global, and decide nothing."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from threading import Event
from typing import Protocol

MANUAL_WAIT_S = 0.0005  # of real time, which other threads get before a manual clock advances


class Clock(Protocol):
    """Seconds that never go backwards; only differences are meaningful."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        ...

    def wait(self, event: Event, seconds: float) -> None:
        """Lets `seconds` pass, or less if another thread sets the event."""
        ...

    def wall_s(self, at_s: float) -> float:
        """The time of day at a moment of this clock, in seconds since 1970: for people, never for decisions."""
        ...


class SystemClock:
    """The machine's monotonic clock. If the system allows, it includes suspended time, so that TTLs end meanwhile."""

    def now(self) -> float:
        return _running_s()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: Event, seconds: float) -> None:
        event.wait(seconds)

    def wall_s(self, at_s: float) -> float:
        return time.time() - (_running_s() - at_s)


def _running_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class ManualClock:
    """A clock that only advances on request: for tests and replays."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def wait(self, event: Event, seconds: float) -> None:
        if not event.wait(MANUAL_WAIT_S):
            self.advance(seconds)

    def wall_s(self, at_s: float) -> float:
        return at_s  # starts in 1970, so that results are reproducible

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time does not run backwards: {seconds=}"
        self._now_s += seconds


class Counters:
    """Monotonic counters; a name appears with its first count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        assert amount >= 0, f"counters only grow: {name=} {amount=}"
        self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> Mapping[str, int]:
        """All counts so far, sorted by name; a copy."""
        return dict(sorted(self._counts.items()))


class Durations:
    """A histogram of durations and their sum. For one thread."""

    BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)  # up to each bound and above the previous one; the last is above all bounds
        self.total_s = 0.0

    def add(self, took_s: float) -> None:
        self.counts[bisect_left(self.BOUNDS_S, took_s)] += 1
        self.total_s += took_s

    def copy(self) -> Durations:
        made = Durations()
        made.counts, made.total_s = list(self.counts), self.total_s
        return made
