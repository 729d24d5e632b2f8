"""Selections like those of a sparse-attention model, without one; and how many rows each way of replacing slots would fetch.

    score of a position   static + slow + fast + noise: each normal, the middle two change from step to step; static and slow are
                          alike for neighbours, so that selections come in spans
    selected              the first few positions, the last ones, and the best of the others; one position more each step

The figures of `STEADY` and `HARD` were fitted to published miss counts of DeepSeek-V3.2, and with a longer context `STEADY` meets
those of GLM-5.1. Belady's rule knows the future and is the least that any rule can fetch. Needs NumPy only. Axes: N steps,
K positions selected, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """What scores are made of: how strong each part is, and how much of it stays from one step to the next."""

    static: float
    slow: float
    slow_stays: float
    fast: float
    fast_stays: float
    noise: float
    span: int = 8  # positions that are alike
    first: int = 4  # positions that are always selected, at the beginning
    last: int = 64  # and at the end


STEADY = Latent(static=1.0, slow=1.0, slow_stays=0.99, fast=0.5, fast_stays=0.7, noise=0.15)
HARD = Latent(static=1.0, slow=1.0, slow_stays=0.995, fast=0.6, fast_stays=0.6, noise=0.25)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    position_NK: Positions  # ascending
    score_NT: Floats | None  # -inf for positions that are not there yet; kept if asked for

    @property
    def overlap(self) -> float:
        """The share of a selection that was in the one before."""
        pairs = zip(self.position_NK[:-1], self.position_NK[1:], strict=True)
        kept = [len(np.intersect1d(a, b, assume_unique=True)) for a, b in pairs]
        return float(np.mean(kept) / self.position_NK.shape[1])


def make_trace(latent: Latent, *, context: int, steps: int, count: int = 2048, seed: int = 0, scores: bool = False) -> Trace:
    """Selections of one layer of one request, from a context of so many tokens on."""
    random, length = np.random.default_rng(seed), context + steps
    assert count >= latent.first + latent.last and count <= context, f"{count=} {context=}"
    static, slow, fast = _alike(random, length, latent.span), _alike(random, length, latent.span), _normal(random, length)
    position_NK = np.empty((steps, count), np.int32)
    score_NT = np.full((steps, length), -np.inf, np.float32) if scores else None
    for step in range(steps):
        score = latent.static * static + latent.slow * slow + latent.fast * fast + latent.noise * _normal(random, length)
        seen = score[: context + step + 1]
        if score_NT is not None:
            score_NT[step, : len(seen)] = seen
        seen[: latent.first] = seen[len(seen) - latent.last :] = np.inf
        position_NK[step] = np.sort(np.argpartition(seen, len(seen) - count)[len(seen) - count :])
        slow = _moved(slow, _alike(random, length, latent.span), latent.slow_stays)
        fast = _moved(fast, _normal(random, length), latent.fast_stays)
    return Trace(position_NK=position_NK, score_NT=score_NT)


def _normal(random: np.random.Generator, length: int) -> Floats:
    return random.standard_normal(length, np.float32)


def _alike(random: np.random.Generator, length: int, span: int) -> Floats:
    """Normal numbers, each the sum of what it shares with its neighbours."""
    sums = np.cumsum(random.standard_normal(length + span), dtype=np.float64)
    alike: Floats = ((sums[span:] - sums[:-span]) / np.sqrt(span)).astype(np.float32)
    return alike


def _moved(old: Floats, new: Floats, stays: float) -> Floats:
    moved: Floats = np.float32(stays) * old + np.float32(np.sqrt(1 - stays**2)) * new
    return moved


# ---- ways of replacing ------------------------------------------------------------------------------

Worth = Callable[[int, Positions, Positions], None]  # told of each step: its selection, and what was missing of it


def count_misses(trace: Trace, *, hot_rows: int, policy: str, seed: int = 0) -> npt.NDArray[np.int64]:
    """Rows that each step fetches with so many slots: by `lru`, `fifo`, `random`, `score` (needs scores) or `belady`."""
    steps, count = trace.position_NK.shape
    assert hot_rows >= count, f"{hot_rows} slots cannot hold a selection of {count}"
    worth_T = np.zeros(int(trace.position_NK.max()) + 1)
    told = _rules(trace, worth_T, seed)[policy]
    held_T, missed_N = np.zeros(len(worth_T), bool), np.zeros(steps, np.int64)
    for step, selected in enumerate(trace.position_NK):
        missing = selected[~held_T[selected]]
        told(step, selected, missing)
        _hold(held_T, selected, worth_T, hot_rows)
        missed_N[step] = len(missing)
    return missed_N


def _hold(
    held_T: npt.NDArray[np.bool_], wanted: npt.NDArray[np.integer], worth_T: npt.NDArray[np.floating], hot_rows: int
) -> None:  # fmt: skip
    """What is wanted is held from now on. Of the rest what is worth least goes, where there are too few slots."""
    over = np.count_nonzero(held_T) + np.count_nonzero(~held_T[wanted]) - hot_rows
    if over > 0:
        held_T[wanted] = False
        idle = np.flatnonzero(held_T)
        held_T[idle[np.argsort(worth_T[idle], kind="stable")[:over]]] = False
    held_T[wanted] = True


def _rules(trace: Trace, worth_T: npt.NDArray[np.float64], seed: int) -> dict[str, Worth]:
    """Each keeps `worth_T` of what is held: the lowest goes first."""
    random = np.random.default_rng(seed)

    def lru(step: int, selected: Positions, missing: Positions) -> None:
        worth_T[selected] = step

    def fifo(step: int, selected: Positions, missing: Positions) -> None:
        worth_T[missing] = step

    def anyhow(step: int, selected: Positions, missing: Positions) -> None:
        worth_T[:] = random.random(len(worth_T))

    def score(step: int, selected: Positions, missing: Positions) -> None:
        assert trace.score_NT is not None, "the trace was made without scores"
        worth_T[:] = trace.score_NT[step, : len(worth_T)]

    next_NK: list[npt.NDArray[np.int64]] = []

    def belady(step: int, selected: Positions, missing: Positions) -> None:
        if not next_NK:
            next_NK.extend(_next_uses(trace.position_NK, len(worth_T)))
        worth_T[selected] = -next_NK[step]

    return {"lru": lru, "fifo": fifo, "random": anyhow, "score": score, "belady": belady}


def _next_uses(position_NK: Positions, length: int) -> list[npt.NDArray[np.int64]]:
    """The next step that selects each position again, for every selection."""
    next_T, uses = np.full(length, len(position_NK), np.int64), []
    for step in range(len(position_NK) - 1, -1, -1):
        uses.append(next_T[position_NK[step]])
        next_T[position_NK[step]] = step
    return uses[::-1]
