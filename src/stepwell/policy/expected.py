"""Predicts how long computing or fetching a prompt takes, from measurements. Pure.

    seconds to compute  =  pace * (passes * a  +  tokens * b  +  (pairs of a token and one before it) * c)
    seconds to fetch    =  pace * (a  +  bytes * b)

The prices a, b and c are fitted to the latest measurement of each size, so that many short prompts do not hide the cost of
attention in long ones. The pace says how much slower everything is now than when those were measured. It follows every
measurement of a size that was measured before, so a wrong first measurement is corrected within two or three.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FOLLOWS, FOLLOWS_FAR = 0.5, 0.9  # the exponents by which the pace follows a ratio near 1, and one that is far off
FAR_OFF, FAR_OFF_NEW = 1.5, 2.0  # a ratio beyond this is far off, for a size that was measured before and for a new one
PRIOR = 0.02  # weight of price 0 for all amounts but the main one, until measurements distinguish them
TOKENS_PER_PASS = 512  # the unit of a pass's fixed cost, in tokens
ALIKE_TOKENS = 32_768  # with this many tokens before it, a token costs about as much through attention as otherwise
BYTES_PER_CALL = 4 << 20  # the unit of a call's fixed cost, in bytes

Numbers = npt.NDArray[np.float64]


class _Sample(NamedTuple):
    amounts: Numbers
    seconds: float  # at pace 1


class Fit:
    """Predicts seconds as a sum of amounts times prices, none of them negative. Knows nothing before the first measurement."""

    def __init__(self, *, main: int) -> None:
        """`main` is the index of the amount to which all cost is attributed at first."""
        self._main = main
        self._pace = 1.0
        self._prices: Numbers | None = None
        self._changed = False  # a size was measured again: prices are fitted when they are next needed, not during a pass
        self._samples: dict[Hashable, _Sample] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._samples)

    def seconds(self, amounts: Sequence[float]) -> float | None:
        if self._changed:
            self._fit()
        return None if self._prices is None else self._pace * float(np.asarray(amounts) @ self._prices)

    def measure(self, size: Hashable, amounts: Sequence[float], seconds: float) -> None:
        """Similar measurements have the same `size`. Amounts are in units of about equal cost."""
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
        """Predicted from the measurement of the same size, or from the fit if that has enough measurements."""
        before = self._samples.get(size)
        if self._prices is None or (before is None and len(self._samples) < len(x)):
            return None
        there = 0.0 if before is None else float(before.amounts @ self._prices)
        by_fit = float(x @ self._prices)
        return self._pace * (by_fit if before is None or there <= 0 else before.seconds * by_fit / there) or None

    def _fit(self) -> None:
        self._prices, self._changed = self._fitted(), False

    def _fitted(self) -> Numbers:
        """Prices by least squares over relative errors; negative ones are set to 0."""
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
    """How long prompts take to compute on this machine: measured, unless `tokens_per_s` is given."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self._given = tokens_per_s
        self._fit = Fit(main=1)
        self._pass_tokens = 1  # of the largest pass so far

    def measure(self, spans: Iterable[tuple[int, int]], seconds: float) -> None:
        """Records one pass over tokens `[start, end)` of one or more prompts."""
        tokens, pairs = 0, 0.0
        for start, end in spans:
            tokens += end - start
            pairs += _pairs(start, end)
        self._pass_tokens = max(self._pass_tokens, tokens)
        size = tokens.bit_length(), round(pairs / max(tokens, 1)).bit_length()
        self._fit.measure(size, _compute_units(1, tokens, pairs), seconds)

    def seconds(self, start: int, end: int) -> float | None:
        """The time to compute tokens `[start, end)` of a single prompt; None before the first measurement."""
        if self._given is not None:
            return (end - start) / self._given
        passes = -(-(end - start) // self._pass_tokens)
        return self._fit.seconds(_compute_units(passes, end - start, _pairs(start, end)))


class FetchTime:
    """How long a store takes to deliver a number of bytes with all its readers."""

    def __init__(self) -> None:
        self._fit = Fit(main=1)
        self.measured_s = float("-inf")  # the time of the last measurement

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
