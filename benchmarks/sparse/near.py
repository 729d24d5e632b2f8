"""What a step waits for, and how long, when the step before has fetched rows that it nearly selected.

    step       resolve and fetch of what is missing: a pass waits for it
    near       best of the scores, resolve and fetch of what is near: beside the pass (`engine/passes/near.py`), here behind it

Both are recordings of their own, played by turns behind a kernel that waits until all are queued, so that no launch is timed.
What else runs beside a fetch, and how much longer it takes then, is measured by whole engines (`served.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from report import Row
from sparse.rig import REPEATS, STEPS, WARM, Rig, Shape, kernels_of
from stepwell.engine.ops.kernels import choose_kernels
from stepwell.engine.passes.near import nearly
from stepwell.sparse.counts import FETCHED, NEAR, NEAR_USED

QUEUED = 20_000_000  # cycles in which all recordings of a round are queued: some milliseconds


def measure_near(shape: Shape, batches: Sequence[int], nears: Sequence[int]) -> Iterator[Row]:
    """Rows that a step waits for and the time it takes, by how many near ones were fetched before. The first of `nears` is what
    the others are compared with.
    """
    for batch in batches:
        first: dict[str, float] = {}
        for near in nears:
            found = Turns(Rig(shape, batch, near=near)).figures()
            first = first or found
            found["of the first, %"] = 100 * found["waited, us"] / first["waited, us"]
            yield Row(what=f"batch {batch}, {near} near rows", figures=found)


class Turns:
    """Steps of a rig, and what is near behind each of them."""

    def __init__(self, rig: Rig) -> None:
        self._rig, self._cuda = rig, rig.device.type == "cuda"
        self._best = choose_kernels("auto", rig.device, torch.bfloat16 if self._cuda else torch.float32).best_beside
        works = [partial(work, step) for step in range(STEPS) for work in (self._own, self._near)]
        self._plays: Sequence[Callable[[], None]] = works
        if self._cuda:
            pool = torch.cuda.graph_pool_handle()  # one for all: they are played one after the other
            self._plays = [_recorded(work, pool) for work in works]

    def figures(self) -> dict[str, float]:
        """Of one step."""
        for _ in range(WARM):
            self._rig.move_on()
            self._round()
        before, times = self._tally(), []
        for _ in range(REPEATS):
            self._rig.move_on()
            times.append(self._round())
        rows = (self._tally() - before) / (REPEATS * STEPS)
        own_us, near_us = (statistics.median(each[turn] for each in times) / STEPS * 1e6 for turn in (0, 1))
        return {
            "rows waited for": float(rows[FETCHED]), "near rows": float(rows[NEAR]), "used": float(rows[NEAR_USED]),
            "waited, us": own_us, "near, us": near_us if self._rig.near else 0.0,
        }  # fmt: skip

    def _own(self, step: int) -> None:
        rig = self._rig
        rig.tick()
        rig.resolve(rig.wanted[step])
        kernels_of(rig.shape)[1](rig.places, step % rig.shape.layers, rig.plan)

    def _near(self, step: int) -> None:
        rig = self._rig
        if rig.near:
            rig.resolve(nearly(rig.wanted[step], rig.shape.count + rig.near, self._best))
            kernels_of(rig.shape)[1](rig.places, step % rig.shape.layers, rig.plan)
        else:
            rig.places.worth_S[:1].zero_()  # a recording must have something in it

    def _round(self) -> tuple[float, float]:
        """Seconds of all steps, and of what is behind them."""
        if not self._cuda:
            took = [0.0, 0.0]
            for number, play in enumerate(self._plays):
                began = time.perf_counter()
                play()
                took[number % 2] += time.perf_counter() - began
            return took[0], took[1]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(self._plays) + 1)]
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUED)
        events[0].record()
        for play, event in zip(self._plays, events[1:], strict=True):
            play()
            event.record()
        torch.cuda.synchronize()
        spans = [one.elapsed_time(other) / 1e3 for one, other in pairwise(events)]
        return sum(spans[::2]), sum(spans[1::2])

    def _tally(self) -> torch.Tensor:
        return self._rig.places.counts.tally_GBC.sum(dim=(0, 1)).double().cpu()


def _recorded(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    work()  # builds kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay
