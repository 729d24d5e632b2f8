"""What a cached object is worth: the order in which a tier evicts, and when prompts are expected to return.

    worth = recompute saved per byte * expected returns per second * share of returns that need this object

The second factor changes over time, the others do not. An object's value class (hazard group, gain level, last visit) therefore
determines how its worth will change. Within a group and level, the object visited longest ago is evicted first, so a tier
compares only one object of each. Each step of priority doubles the worth, and is lost after `PRIORITY_STEP_S`.

**Returns** are learned. A visit is one request's use of a path. Visits are sorted into hazard groups by what is known when they
end: how often the path has returned before, at what interval, and how long the answer was (a tool call is short, and its result
follows soon). For each group the rate of return is measured by age, in half octaves,

    rate(group, age) = pages that returned at that age / pages times seconds spent at that age

Visits that have not returned, or are no longer watched, count for the time that they were watched, so early eviction is not
mistaken for a path that never returns. A group with little evidence follows its neighbours. The result is the highest reuse per
second that keeping an object from some age on can give, over all times to stop keeping it:

    returns(age) = max over t > age of  chance to return in [age, t) / expected seconds kept until then

The distance from the old end at which returning prompts diverge from their old path is counted as well. Deterministic: the
caller passes all times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from math import exp, log, log2, pow
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stepwell.base.config import PRIORITY_STEP_S
from stepwell.base.untracked import untrack

Rates = npt.NDArray[np.float64]
Table = list[list[float]]

LEVELS_PER_OCTAVE = 4
MOST_STEPS = 32  # of priority, counted from the visit
DEFERRED_WORTH = 4.0  # factor for deferred backups: evicting one means storing it too early, or losing it if the store is busy

NUM_BINS = 40  # half octaves of seconds: up to eight days
MOST_VISITS = 4096  # watched at a time
LEARN_EVERY = 64  # visits
DECAY_EVERY = 2048  # visits, after which earlier evidence is halved
PRIOR_VISITS = 20.0  # the weight of a group's neighbours, in visits
FIRST_RATE = 0.1  # returns per second in the first bin before any were seen, falling as one over the age
RECENT_GAP = 0.35  # the weight of the latest gap in a rhythm
RETURNS = (1, 4)  # bounds between groups
GAPS_S = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ANSWER_TOKENS = (64, 256, 1024)
LEAST_SHARE = 0.01  # of returns, for every checkpoint: the one that follows it may be gone by then
MOST_SHARES = 4096  # cached results of `share`, until more is learned

NUM_RHYTHMS = len(GAPS_S) + 2
NUM_GROUPS = (len(RETURNS) + 1) * (len(ANSWER_TOKENS) + 1) * NUM_RHYTHMS
_EDGES_s = np.concatenate([[0.0], 2.0 ** (np.arange(NUM_BINS) / 2)])
_WIDTHS_s = np.diff(_EDGES_s)
# Plain numbers for the hot paths, since array elements are several times slower.
_BOUNDS: list[float] = _EDGES_s[1:-1].tolist()
_LOWER: list[float] = _EDGES_s[:-1].tolist()
_UPPER: list[float] = _EDGES_s[1:].tolist()


class ValueClass(NamedTuple):
    """Objects of one hazard group and gain level lose value in the same way from their last visit on."""

    hazard_group: int
    gain_level: int
    last_visit_s: float


class ValuePolicy(Protocol):
    """Assigns objects to value classes and compares those. The lowest worth is evicted first."""

    def level(self, saved_tokens: int, size_bytes: int, next_distance: int, distance: int, *, deferred: bool) -> int:
        """The gain level: what an object saves per byte that is evicted with it. It is needed by returns that diverge less than
        `distance` tokens before the end of the latest visit, except those that diverge less than `next_distance` tokens before
        it, for which the following checkpoint serves. With a `distance` of 0 every return needs it. `deferred`: it is not in the
        store yet, and may be superseded before it must be stored.
        """
        ...

    def due(self, used_at: float, urgent_until_s: float, visit: Visit | None) -> tuple[int, float]:
        """The hazard group and the last visit of a value class."""
        ...

    def worth(self, group: int, level: int, since: float) -> float:
        """What a value class is worth now. It never rises over time, and later visits in one group and level have no less."""
        ...


class Expected:
    """The expected recompute saved per byte and second, by the reuse model."""

    def __init__(self, reuse: ReuseModel) -> None:
        self._reuse = reuse

    def level(self, saved_tokens: int, size_bytes: int, next_distance: int, distance: int, *, deferred: bool) -> int:
        share = self._reuse.share(next_distance, distance) if distance else 1.0
        return _level(saved_tokens, size_bytes, share * DEFERRED_WORTH if deferred else share)

    def due(self, used_at: float, urgent_until_s: float, visit: Visit | None) -> tuple[int, float]:
        group, since = (visit.group, visit.at_s) if visit is not None else (0, used_at)
        if urgent_until_s > since:
            steps = round((urgent_until_s - since) / PRIORITY_STEP_S)
            group += min(steps, MOST_STEPS) * NUM_GROUPS  # more than `MAX_PRIORITY` if the request ran for long
        return group, since

    def worth(self, group: int, level: int, since: float) -> float:
        octaves = level / LEVELS_PER_OCTAVE
        if group >= NUM_GROUPS:
            steps, group = divmod(group, NUM_GROUPS)
            octaves += max(steps - self._reuse.age_s(since) / PRIORITY_STEP_S, 0.0)
        return self._reuse.worth(group, since) * pow(2.0, octaves)


@lru_cache(maxsize=1024)
def _level(saved_tokens: int, size_bytes: int, share: float) -> int:
    """The gain per byte for a share of returns. Cached, because most calls are for prefix pages and have the same arguments."""
    return round(LEVELS_PER_OCTAVE * log2(max(saved_tokens, 1) / size_bytes * share))


# ---- returns ------------------------------------------------------------------------------------


class Visit:
    """One request's use of a path: its time, its history, and the number of its pages that no request has returned to."""

    __slots__ = ("at_s", "end", "gap_s", "group", "pages", "returns")

    def __init__(self, at_s: float, *, end: int, returns: int = 0, gap_s: float = 0.0) -> None:
        self.at_s = at_s
        self.end = end  # pages of its prompt, and of the resumable part of its answer
        self.returns = returns  # how often the path had returned before
        self.gap_s = gap_s  # its rhythm; 0 before the first return
        self.group = _group(returns, gap_s, 0)
        self.pages = 0
        untrack(self)

    def answered(self, tokens: int) -> None:
        """Notes that the request ended with an answer of `tokens` tokens."""
        self.group = _group(self.returns, self.gap_s, tokens)


class ReuseModel:
    """Learns how paths return. For one thread."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._now_s = 0.0
        self._waiting: deque[Visit] = deque()
        self._num_visits = 0
        self._mean_pages = 1.0
        self._returned_GB = np.zeros((NUM_GROUPS, NUM_BINS))
        self._watched_GB = np.zeros((NUM_GROUPS, NUM_BINS))
        self._left = [0.0] * NUM_BINS  # returns that diverged from their old path, by the distance in tokens
        self._left_before = [0.0] * (NUM_BINS + 1)
        self._shares: dict[tuple[int, int], float] = {}  # results of `share` since then
        self._worth, self._fall = (
            _initial_tables()
        )  # at the start of each bin of ages, by group; and by how much it falls in a second

    def arrive(
        self, now_s: float, *, known: int, end: int, passed: Sequence[tuple[Visit | None, int]], goes_on: bool, lost: Visit | None
    ) -> tuple[Visit, Visit]:
        """Records a request with its first `known` of `end` pages in the tree; returns the visits of these and of the rest.

        `passed` are the visits of the known pages, deepest last, with the number of pages of each. `goes_on` says that the
        request begins where an earlier one ended. `lost` is the visit of the following pages, if they were evicted.
        """
        now_s = self._now_s = max(self._now_s, now_s)
        for visit, pages in passed:
            if visit is not None:
                self._return(visit, pages, now_s)
        if lost is not None:
            self._return(lost, min(lost.pages, end - known), now_s)
        before = lost or (passed[-1][0] if passed else None)
        if before is not None:
            self._left[_bin(max(before.end - known, 0) * self._page_tokens)] += lost is None
        return_visit = self._follow(before, now_s, end)
        new_visit = return_visit if goes_on or lost is not None else self._follow(None, now_s, end)
        return_visit.pages += known
        new_visit.pages += end - known
        self._mean_pages += 0.01 * (end - self._mean_pages)
        for visit in (return_visit, new_visit) if return_visit is not new_visit else (return_visit,):
            self._watch(visit)
        return return_visit, new_visit

    def worth(self, group: int, since_s: float) -> float:
        """The expected returns per second of objects last visited at `since_s`."""
        age_s = self._now_s - since_s
        if age_s < 0.0:
            age_s = 0.0
        at = bisect_right(_BOUNDS, age_s)
        return self._worth[group][at] - self._fall[group][at] * (age_s - _LOWER[at])

    def age_s(self, since_s: float) -> float:
        """The time from `since_s` to the latest request."""
        return max(self._now_s - since_s, 0.0)

    def share(self, nearest: int, farthest: int) -> float:
        """The share of returns that diverge from their old path between two distances (in tokens) from its end."""
        found = self._shares.get((nearest, farthest))
        if found is None:
            if len(self._shares) >= MOST_SHARES:
                self._shares.clear()
            found = self._shares[nearest, farthest] = self._share(nearest, farthest)
        return found

    # ---- inside -----------------------------------------------------------------------------------

    def _share(self, nearest: int, farthest: int) -> float:
        total = self._left_before[NUM_BINS]
        if not total:
            return 1.0 if not nearest else LEAST_SHARE
        nearer = self._left_within(nearest) if nearest else 0.0
        return max((self._left_within(farthest) - nearer) / total, LEAST_SHARE)

    def _follow(self, before: Visit | None, now_s: float, end: int) -> Visit:
        if before is None:
            return Visit(now_s, end=end)
        gap_s = max(now_s - before.at_s, 0.5)
        if before.gap_s:
            gap_s = exp(RECENT_GAP * log(gap_s) + (1 - RECENT_GAP) * log(before.gap_s))
        return Visit(now_s, end=end, returns=before.returns + 1, gap_s=gap_s)

    def _return(self, visit: Visit, pages: int, now_s: float) -> None:
        pages = min(pages, visit.pages)
        age_s = max(now_s - visit.at_s, 0.0)
        visit.pages -= pages
        self._returned_GB[visit.group, _bin(age_s)] += pages
        self._watched_GB[visit.group] += pages * _time_in_bins(age_s)

    def _watch(self, visit: Visit) -> None:
        self._num_visits += 1
        if visit.pages:
            self._waiting.append(visit)
        if len(self._waiting) > MOST_VISITS:
            oldest = self._waiting.popleft()
            self._watched_GB[oldest.group] += oldest.pages * _time_in_bins(self._now_s - oldest.at_s)
            oldest.pages = 0
        if self._num_visits % LEARN_EVERY == 0:
            self._learn()
        if self._num_visits % DECAY_EVERY == 0:
            self._returned_GB /= 2
            self._watched_GB /= 2
            self._left = [count / 2 for count in self._left]

    def _learn(self) -> None:
        watched_GB = self._watched_GB + _waited(self._waiting, self._now_s)
        self._worth, self._fall = _tables(_rates(self._returned_GB, watched_GB, PRIOR_VISITS * self._mean_pages))
        self._left_before = [0.0, *np.cumsum(self._left).tolist()]
        self._shares.clear()

    def _left_within(self, distance: int) -> float:
        at = _bin(distance)
        inside = (distance - _LOWER[at]) / (_UPPER[at] - _LOWER[at])
        return self._left_before[at] + (self._left_before[at + 1] - self._left_before[at]) * min(max(inside, 0.0), 1.0)


@cache
def _initial_tables() -> tuple[Table, Table]:
    """The tables before any visit, shared by all models. They are replaced, never changed."""
    nothing_GB = np.zeros((NUM_GROUPS, NUM_BINS))
    return _tables(_rates(nothing_GB, nothing_GB, PRIOR_VISITS))


def _tables(rates_GB: Rates) -> tuple[Table, Table]:
    """The worth at the start of each bin of ages, by group, and its fall per second."""
    worths_GB = _worths(rates_GB)
    next_GB = np.concatenate([worths_GB[:, 1:], worths_GB[:, -1:]], axis=1)
    return worths_GB.tolist(), ((worths_GB - next_GB) / _WIDTHS_s).tolist()


def _worths(rates_GB: Rates) -> Rates:
    """For each group and age, the most returns per second that keeping an object longer can give; never rising with age."""
    stays_GB = np.exp(-rates_GB * _WIDTHS_s)
    left_GE = np.concatenate([np.ones((NUM_GROUPS, 1)), np.cumprod(stays_GB, axis=1)], axis=1)  # E bin edges
    kept_GB = left_GE[:, :-1] * (1 - stays_GB) / rates_GB
    kept_GE = np.concatenate([np.zeros((NUM_GROUPS, 1)), np.cumsum(kept_GB, axis=1)], axis=1)
    returned_GAE = left_GE[:, :-1, None] - left_GE[:, None, 1:]  # from the start of age bin A to the end of bin E
    seconds_GAE = kept_GE[:, None, 1:] - kept_GE[:, :-1, None]
    later_AE = np.triu(np.ones((NUM_BINS, NUM_BINS), np.bool_))
    per_s_GAE = np.where(later_AE & (seconds_GAE > 0), returned_GAE / np.where(seconds_GAE > 0, seconds_GAE, 1.0), 0.0)
    best_GB = np.where(left_GE[:, :-1] > 1e-8, per_s_GAE.max(axis=2), rates_GB)
    worths_GB: Rates = np.maximum.accumulate(best_GB[:, ::-1], axis=1)[:, ::-1]
    return worths_GB


def _rates(returned_GB: Rates, watched_GB: Rates, prior: float) -> Rates:
    """Returns per second by group and age: the group's evidence, shrunk towards its neighbours', which is shrunk towards all."""
    all_B = _overall_rates(returned_GB.sum(axis=0), watched_GB.sum(axis=0), prior)
    returned_NRB = returned_GB.reshape(-1, NUM_RHYTHMS, NUM_BINS)
    watched_NRB = watched_GB.reshape(-1, NUM_RHYTHMS, NUM_BINS)
    neighbours_NB = _shrunk(returned_NRB.sum(axis=1), watched_NRB.sum(axis=1), all_B, prior)
    rates_NRB = _shrunk(returned_NRB, watched_NRB, neighbours_NB[:, None, :], prior)
    return np.maximum(rates_NRB.reshape(NUM_GROUPS, NUM_BINS), 1e-12)


def _group(returns: int, gap_s: float, answer_tokens: int) -> int:
    rhythm = 1 + bisect_right(GAPS_S, gap_s) if gap_s else 0
    kind = bisect_right(RETURNS, returns) * (len(ANSWER_TOKENS) + 1) + bisect_right(ANSWER_TOKENS, answer_tokens)
    return kind * NUM_RHYTHMS + rhythm


def _bin(amount: float) -> int:
    """The half octave of an age or a distance."""
    return bisect_right(_BOUNDS, amount)


def _time_in_bins(age_s: float) -> Rates:
    return np.clip(age_s - _EDGES_s[:-1], 0.0, _WIDTHS_s)


def _waited(waiting: Iterable[Visit], now_s: float) -> Rates:
    """Pages times seconds that visits have waited, by group and age: whole bins below each visit's age, and part of its own."""
    visits = list(waiting)
    pages = np.array([visit.pages for visit in visits], np.float64)
    ages_s = np.maximum(now_s - np.array([visit.at_s for visit in visits], np.float64), 0.0)
    bins = np.minimum(np.searchsorted(_EDGES_s[1:], ages_s, side="right"), NUM_BINS - 1)
    cells = np.array([visit.group for visit in visits], np.intp) * NUM_BINS + bins
    inside_s = np.minimum(ages_s - _EDGES_s[bins], _WIDTHS_s[bins])
    partly_GB = np.bincount(cells, pages * inside_s, NUM_GROUPS * NUM_BINS).astype(np.float64).reshape(NUM_GROUPS, NUM_BINS)
    in_bin_GB = np.bincount(cells, pages, NUM_GROUPS * NUM_BINS).astype(np.float64).reshape(NUM_GROUPS, NUM_BINS)
    beyond_GB = in_bin_GB[:, ::-1].cumsum(axis=1)[:, ::-1] - in_bin_GB
    waited: Rates = partly_GB + beyond_GB * _WIDTHS_s
    return waited


def _overall_rates(returned_B: Rates, watched_B: Rates, prior: float) -> Rates:
    """Rates over all groups; without evidence they fall as one over the age."""
    rates_B = np.empty(NUM_BINS)
    expected = FIRST_RATE
    for at in range(NUM_BINS):
        weight = prior * _WIDTHS_s[at]
        rates_B[at] = (returned_B[at] + expected * weight) / (watched_B[at] + weight)
        expected = rates_B[at] * max(_EDGES_s[at], 1.0) / _EDGES_s[at + 1]
    return rates_B


def _shrunk(returned: Rates, watched: Rates, base: Rates, prior: float) -> Rates:
    """A group's rates; with little evidence those of `base`, scaled by the group's ratio to `base` at lower ages."""
    zero = np.zeros((*returned.shape[:-1], 1))
    returned_so_far = np.concatenate([zero, np.cumsum(returned, axis=-1)[..., :-1]], axis=-1)
    expected_so_far = np.concatenate([zero, np.cumsum(base * watched, axis=-1)[..., :-1]], axis=-1)
    lean = base * (returned_so_far + prior) / (expected_so_far + prior)
    leaning: Rates = (returned + lean * prior * _WIDTHS_s) / (watched + prior * _WIDTHS_s)
    return leaning
