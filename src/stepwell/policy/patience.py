"""How long a request may wait for a store, so that having one is never worse than having none. Pure: times are handed in.

A store is trusted until it is first waited for in vain: whoever asks it may wait as long as their limit says, which is no
longer than computing would take. That costs one wait at most, since those who wait then go on together. From there on
waiting is paid from an allowance: a small share of all time spent computing, and everything that fetches have saved. So
whatever the store does, all waiting in vain adds up to less than

    one limit + credit_s + share * (time spent computing) + (time saved by fetches)

and the sum never exceeds the time without a store by more than the first three. A request may wait as long as that is less
than its grant plus what has arrived for it so far is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

MOST_ALLOWANCE_S = 10.0  # a store that was good for a day may still turn bad
SHARERS = 8  # a request gets this part of the allowance, so that several at a time can wait
KEPT_OF_MEAN = 0.8  # how much of a running mean the next measurement leaves


class Speed:
    """A running mean of amounts per second, recent ones counting more; None before the first measurement."""

    def __init__(self, known_per_s: float | None = None) -> None:
        self._amount = known_per_s or 0.0
        self._seconds = 1.0 if known_per_s else 0.0
        self.measured_s = float("-inf")  # when it was measured last

    @property
    def per_s(self) -> float | None:
        return self._amount / self._seconds if self._seconds > 0 else None

    def measure(self, amount: float, seconds: float, now: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        self.measured_s = now
        self._amount = KEPT_OF_MEAN * self._amount + amount
        self._seconds = KEPT_OF_MEAN * self._seconds + seconds

    def seconds_for(self, amount: float) -> float | None:
        return amount / self.per_s if self.per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """How long one request may wait in vain; on trust, or out of the allowance."""

    seconds: float
    on_trust: bool = False


UNLIMITED = Grant(seconds=inf)


class Patience:
    """Trust, then the allowance. One thread."""

    def __init__(self, *, credit_s: float, share: float) -> None:
        self._allowance_s = credit_s
        self._share = share
        self.trusted = True  # it was never waited for in vain

    @property
    def allowance_s(self) -> float:
        return self._allowance_s

    def take(self, limit_s: float) -> Grant:
        """How long a request may wait in vain, at most `limit_s`: on trust all may; else it is reserved, and others get some."""
        if self.trusted:
            return Grant(seconds=limit_s, on_trust=True)
        granted_s = max(min(limit_s, self._allowance_s / SHARERS), 0.0)
        self._allowance_s -= granted_s
        return Grant(seconds=granted_s)

    def take_more(self, grant: Grant, expected_s: float) -> Grant:
        """Reserves as much as a fetch is expected to take, for one that computing would not beat; all of it, or nothing more."""
        missing_s = expected_s - grant.seconds
        if grant.on_trust or not 0 < missing_s <= self._allowance_s:
            return grant
        self._allowance_s -= missing_s
        return Grant(seconds=expected_s)

    def settle(self, grant: Grant, *, waited_s: float, saved_s: float, given_up: bool) -> None:
        """Gives back what was not used of a grant, adds what the waiting saved, and loses trust where it saved too little."""
        if not grant.on_trust:
            self._add(grant.seconds - waited_s + saved_s)
        elif self.trusted or saved_s > waited_s:  # of many who waited in vain at a time, one pays
            self._add(saved_s - waited_s)
        if self.trusted and (self._allowance_s < 0 or (given_up and saved_s < waited_s)):
            self.trusted = False
            self._allowance_s = max(self._allowance_s, 0.0)  # waiting on trust leaves no debt

    def computed(self, seconds: float) -> None:
        """A request spent this long computing."""
        self._add(self._share * seconds)

    def _add(self, seconds: float) -> None:
        self._allowance_s = min(self._allowance_s + seconds, max(MOST_ALLOWANCE_S, self._allowance_s))  # may be in debt
