"""How long computing a prompt and fetching it are expected to take, learned from how long they took. Pure.

    seconds to compute  =  pace * (passes * a  +  tokens * b  +  (pairs of a token and one before it) * c)
    seconds to fetch    =  pace * (a  +  bytes * b)

The prices a, b and c are fitted to the latest measurement of each size, so that what long prompts cost through attention is not
forgotten over short ones. The pace says how much slower everything is by now than when those were measured: it follows each
measurement of a size that was measured before. So a first measurement that was wrong is corrected within two or three.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FOLLOWS, FOLLOWS_FAR = 0.5, 0.9  # how much of a ratio the pace follows: within the next, and beyond it
FAR_OFF, FAR_OFF_NEW = 1.5, 2.0  # of a size that was measured before, and of one that was not
PRIOR = 0.02  # weight of "costs nothing" for all amounts but the main one: as long as measurements do not tell them apart
TOKENS_PER_PASS = 512  # what a pass may cost beyond its tokens, in tokens
ALIKE_TOKENS = 32_768  # before a token, for attention to them to cost about as much as all else
BYTES_PER_CALL = 4 << 20  # what a call may cost, in bytes

Numbers = npt.NDArray[np.float64]


class _Sample(NamedTuple):
    amounts: Numbers
    seconds: float  # at pace 1


class Fit:
    """Seconds as a sum over amounts, none of them with a negative price. Knows nothing before the first measurement."""

    def __init__(self, *, main: int) -> None:
        """`main` is the amount that everything is put down to before more is known."""
        self._main = main
        self._pace = 1.0
        self._prices: Numbers | None = None
        self._changed = False  # a size was measured again since: the fit is made when somebody asks, not in a pass
        self._samples: dict[Hashable, _Sample] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._samples)

    def seconds(self, amounts: Sequence[float]) -> float | None:
        if self._changed:
            self._fit()
        return None if self._prices is None else self._pace * float(np.asarray(amounts) @ self._prices)

    def measure(self, size: Hashable, amounts: Sequence[float], seconds: float) -> None:
        """`size` is the same for measurements that are alike. Amounts are in units that may be expected to cost alike."""
        x = np.asarray(amounts, np.float64)
        if seconds <= 0 or x[self._main] <= 0:
            return
        expected_s, before = self._expected(size, x), self._samples.get(size)
        if expected_s is not None:
            ratio = seconds / expected_s
            far = FAR_OFF if before is not None else FAR_OFF_NEW
            is_far = not 1 / far <= ratio <= far
            if before is not None or is_far:
                self._pace *= ratio ** (FOLLOWS_FAR if is_far else FOLLOWS)
            if is_far:
                return
        self._samples[size] = _Sample(x, seconds / self._pace)
        self._changed = True
        if before is None:
            self._fit()

    def _expected(self, size: Hashable, x: Numbers) -> float | None:
        """By the measurement of the same size, else by the fit, where that has seen enough to say."""
        before = self._samples.get(size)
        if self._prices is None or (before is None and len(self._samples) < len(x)):
            return None
        there = 0.0 if before is None else float(before.amounts @ self._prices)
        by_fit = float(x @ self._prices)
        return self._pace * (by_fit if before is None or there <= 0 else before.seconds * by_fit / there) or None

    def _fit(self) -> None:
        self._prices, self._changed = self._fitted(), False

    def _fitted(self) -> Numbers:
        """Least squares over relative errors. What would get a negative price costs nothing."""
        amounts = np.array([each.amounts / each.seconds for each in self._samples.values()])
        others = np.arange(amounts.shape[1]) != self._main
        prior = PRIOR * np.diag(others * amounts[:, self._main].mean())
        rows, wanted = np.vstack([amounts, prior]), np.concatenate([np.ones(len(amounts)), np.zeros(len(prior))])
        used, prices = np.ones(len(others), np.bool_), np.zeros(len(others))
        while used.any():
            found = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0]
            prices[:] = 0.0
            prices[used] = found
            if prices.min() >= 0:
                break
            used[prices.argmin()] = False
        return prices


class ComputeTime:
    """How long prompts take to compute on this machine. `tokens_per_s` where that is given, and not to be measured."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self._given = tokens_per_s
        self._fit = Fit(main=1)
        self._pass_tokens = 1  # of the largest pass so far

    def measure(self, spans: Iterable[tuple[int, int]], seconds: float) -> None:
        """One pass over tokens `start` .. `end` of one or more prompts."""
        tokens, pairs = 0, 0.0
        for start, end in spans:
            tokens += end - start
            pairs += _pairs(start, end)
        self._pass_tokens = max(self._pass_tokens, tokens)
        size = tokens.bit_length(), round(pairs / max(tokens, 1)).bit_length()
        self._fit.measure(size, _compute_units(1, tokens, pairs), seconds)

    def seconds(self, start: int, end: int) -> float | None:
        """To compute tokens `start` .. `end` of a prompt alone; None before anything was measured."""
        if self._given is not None:
            return (end - start) / self._given
        passes = -(-(end - start) // self._pass_tokens)
        return self._fit.seconds(_compute_units(passes, end - start, _pairs(start, end)))


class FetchTime:
    """How long a store takes to deliver so many bytes, with all its readers."""

    def __init__(self) -> None:
        self._fit = Fit(main=1)
        self.measured_s = float("-inf")  # when it was measured last

    @property
    def is_known(self) -> bool:
        return self._fit.is_known

    def measure(self, size_bytes: int, seconds: float, now: float) -> None:
        self.measured_s = now
        self._fit.measure(size_bytes.bit_length(), _fetch_units(size_bytes), seconds)

    def seconds(self, size_bytes: int) -> float | None:
        return self._fit.seconds(_fetch_units(size_bytes))


def _pairs(start: int, end: int) -> float:
    return (end * end - start * start) / 2


def _compute_units(passes: int, tokens: int, pairs: float) -> tuple[float, float, float]:
    return passes * TOKENS_PER_PASS, tokens, pairs / ALIKE_TOKENS


def _fetch_units(size_bytes: int) -> tuple[float, float]:
    return 1.0, size_bytes / BYTES_PER_CALL
