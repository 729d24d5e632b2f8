"""Selections like those of a sparse-attention model, without a model; and how many rows a step fetches with them.

    score of a position   static + slow + fast + noise: each normal, the middle two change from step to step; static and slow are
                          alike for neighbours, so that selections come in spans
    selected              the first few positions, the last ones, and the best of the others; one position more each step

The figures of `STEADY` were fitted to published miss counts of DeepSeek-V3.2, and with a longer context they meet those of
GLM-5.1. Needs NumPy only. Axes: N steps, K positions selected, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The parts of scores: how strong each is, and how much of it stays from one step to the next."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    position_NK: Positions  # ascending
    score_NT: Floats | None  # -inf for positions that are not there yet; kept if asked for


def make_trace(latent: Latent, *, context: int, steps: int, count: int = 2048, seed: int = 0, scores: bool = False) -> Trace:
    """Selections of one layer of one request, from `context` tokens on."""
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


# ---- rows that are missing --------------------------------------------------------------------------


def count_misses(trace: Trace, *, hot_rows: int, policy: str) -> npt.NDArray[np.int64]:
    """Rows that each step fetches with `hot_rows` slots, which replace by `lru` or by `score` (needs scores)."""
    steps, count = trace.position_NK.shape
    assert hot_rows >= count, f"{hot_rows} slots cannot hold a selection of {count}"
    assert policy == "lru" or trace.score_NT is not None, "the trace was made without scores"
    worth_T = np.zeros(int(trace.position_NK.max()) + 1)
    held_T, missed_N = np.zeros(len(worth_T), bool), np.zeros(steps, np.int64)
    for step, selected in enumerate(trace.position_NK):
        missed_N[step] = np.count_nonzero(~held_T[selected])
        if policy == "lru":
            worth_T[selected] = step
        elif trace.score_NT is not None:
            worth_T[:] = trace.score_NT[step, : len(worth_T)]
        over = np.count_nonzero(held_T) + missed_N[step] - hot_rows
        if over > 0:  # the least worth is replaced
            held_T[selected] = False
            idle = np.flatnonzero(held_T)
            held_T[idle[np.argsort(worth_T[idle], kind="stable")[:over]]] = False
        held_T[selected] = True
    return missed_N
