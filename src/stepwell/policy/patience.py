"""How long a request may wait for a store, so that having one is never worse than having none. Pure: times are handed in.

Waiting is paid from an allowance: half a second to begin with, a small share of all time spent computing, and everything that
earlier fetches saved. So whatever the store does, all waiting in vain adds up to less than

    credit_s + share * (time spent computing) + (time saved by fetches)

and the sum never exceeds the time without a store by more than the first two. A request may wait as long as that is less
than its grant plus what has arrived for it so far is worth.
"""

from __future__ import annotations

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


class Patience:
    """The allowance. One thread."""

    def __init__(self, *, credit_s: float, share: float) -> None:
        self._allowance_s = credit_s
        self._share = share

    @property
    def allowance_s(self) -> float:
        return self._allowance_s

    def take(self, limit_s: float) -> float:
        """Reserves as much as a request may wait in vain, at most `limit_s`; returns it. Others get some too."""
        granted = max(min(limit_s, self._allowance_s / SHARERS), 0.0)
        self._allowance_s -= granted
        return granted

    def settle(self, granted_s: float, *, waited_s: float, saved_s: float) -> None:
        """Gives back what was not used of a grant, and adds what the waiting saved."""
        self._add(granted_s - waited_s + saved_s)

    def computed(self, seconds: float) -> None:
        """A request spent this long computing."""
        self._add(self._share * seconds)

    def _add(self, seconds: float) -> None:
        self._allowance_s = min(self._allowance_s + seconds, max(MOST_ALLOWANCE_S, self._allowance_s))  # may be in debt
