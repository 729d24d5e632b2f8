"""A batch of requests whose rows are on the host, and steps of their selections: on CUDA recorded as one graph.

Between two plays of a graph its steps move on along a trace, and at the trace's end backwards. Played over the same steps again
and again, every play would begin with a jump back, and fetch more rows than a request does that goes on.

Requests have prefix pages of their own. Host pages are shared among them, since no machine has a hundred gigabytes to pin for a
benchmark; rows are read at random over all of them. Hot rows of all layers lie in one layer's memory. Axes as in
`stepwell/sparse/resolve.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from sparse.trace import STEADY, Latent, Trace, make_trace
from stepwell.memory.row_pages import Changes
from stepwell.sparse import resolve as plain
from stepwell.sparse.counts import FETCHED
from stepwell.sparse.places import Places
from stepwell.sparse.resolve import Plan, Wanted
from stepwell.transfer.torch_memory import pinned_bytes

STEPS, WARM, REPEATS = 32, 2, 5  # of a graph; graphs before anything is measured; graphs that are measured
TRACED = 256  # steps of a trace
APART = 5  # steps of the trace from one request of a batch to the next
INDEX_BYTES = 132  # of a row, beside it in a host page


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """DeepSeek-V3.2."""

    layers: int = 61
    page_rows: int = 64
    row_bytes: int = 656
    count: int = 2048
    hot_rows: int = 4096
    context: int = 32 << 10
    host_bytes: int = 8 << 30

    @property
    def tiny(self) -> bool:
        return self.count < 256

    @property
    def pages(self) -> int:
        return -(-(self.context + TRACED) // self.page_rows)

    @property
    def hot_pages(self) -> int:
        return self.hot_rows // self.page_rows


def device_of(shape: Shape) -> str:
    return "cpu" if shape.tiny else "cuda"


@lru_cache(maxsize=1)
def host_rows(shape: Shape) -> torch.Tensor:
    """`[P, L, R, E]` of pages as a cache has them: rows of all layers, then index keys."""
    page_bytes = shape.layers * shape.page_rows * (shape.row_bytes + INDEX_BYTES)
    page_bytes += -page_bytes % 4096
    pages = shape.host_bytes // page_bytes
    flat = pinned_bytes(pages * page_bytes) if not shape.tiny else torch.zeros(pages * page_bytes, dtype=torch.uint8)
    used = flat.view(pages, page_bytes)[:, : shape.layers * shape.page_rows * shape.row_bytes]
    return used.unflatten(1, (shape.layers, shape.page_rows, shape.row_bytes))


@lru_cache(maxsize=1)
def trace_of(shape: Shape) -> Trace:
    latent = STEADY if not shape.tiny else Latent(**_parts(STEADY) | {"last": 4})
    return make_trace(latent, context=shape.context, steps=TRACED, count=shape.count, scores=True)


class Rig:
    def __init__(self, shape: Shape, batch: int, *, cold: bool = False) -> None:
        """`cold` requests find nothing."""
        self.shape, self.batch, self.device = shape, batch, torch.device(device_of(shape))
        self.places = self._places()
        self.plan = Plan(batch * shape.count, self.device)
        trace = trace_of(shape)
        assert trace.score_NT is not None
        self._position_NK = torch.from_numpy(trace.position_NK).to(self.device)
        self._score_NT = torch.from_numpy(trace.score_NT).to(self.device)
        self._cold, self._played = cold, 0
        self.wanted = self._wanted()
        self.recorded: dict[Any, Callable[[], None]] = {}
        for _ in range(WARM):
            self._play(("resolve", True), self._works(fetch=True))
            self.move_on()

    def _places(self) -> Places:
        shape, batch, device = self.shape, self.batch, self.device
        host_PLRE = host_rows(shape)
        pages, hot = batch * shape.pages, batch * shape.hot_pages
        rows = torch.zeros(hot, 1, shape.page_rows, shape.row_bytes, dtype=torch.uint8, device=device)
        places = Places(
            rows_PLRE=rows.expand(-1, shape.layers, -1, -1), host_PLRE=host_PLRE, numbers=hot, requests=batch,
            slot_PGR=torch.full((pages, 1, shape.page_rows), 7, dtype=torch.int32, device=device),
            header_P3=torch.zeros(pages, 3, dtype=torch.int32, device=device),
        )  # fmt: skip
        all_pages, numbers = np.arange(pages, dtype=np.int32), np.arange(hot, dtype=np.int32)
        backing = np.random.default_rng(1).integers(0, len(host_PLRE), pages)
        header_N3 = np.stack([all_pages % shape.pages, np.full(pages, -1), backing], axis=1).astype(np.int32)
        hot_pages = np.random.default_rng(2).permutation(hot).astype(np.int32)
        places.apply(Changes(new=all_pages, pages=all_pages, header_N3=header_N3, numbers=numbers, hot_pages=hot_pages))
        return places

    def _wanted(self) -> list[Wanted]:
        """Of each step of a graph, in tensors that stay where they are."""
        shape, batch = self.shape, self.batch
        table = torch.arange(batch * shape.pages, dtype=torch.int32, device=self.device).view(batch, -1)
        hot = torch.arange(batch * shape.hot_pages, dtype=torch.int32, device=self.device).view(batch, -1)
        last = torch.full((batch,), shape.context + TRACED - 1, dtype=torch.int32, device=self.device)
        random, made = np.random.default_rng(3), []
        for step in range(STEPS):
            at_B = self._traced(step)
            position = self._position_NK[at_B]
            if self._cold:
                position = torch.from_numpy(_all_new(random, shape, batch, step)).to(self.device)
            score_XT = self._score_NT[at_B]
            made.append(Wanted.of(position, last_X=last, table_BP=table, hot_BQ=hot, score_XT=score_XT))
        return made

    def _traced(self, step: int) -> torch.Tensor:
        """Which step of the trace each request is at, in a step of the graph: there and back."""
        at_B = torch.arange(self.batch, device=self.device) * APART + self._played * STEPS + step
        return TRACED - 1 - (at_B % (2 * TRACED - 2) - (TRACED - 1)).abs()

    def move_on(self) -> None:
        """All steps of a graph, by as many. Cold requests select rows of their own, which no two steps in a row share."""
        self._played += 1
        for step, wanted in enumerate(self.wanted):
            at_B = self._traced(step)
            if not self._cold:
                wanted.position_XK.copy_(self._position_NK[at_B])
            if wanted.score_XT is not None:
                wanted.score_XT.copy_(self._score_NT[at_B])

    # ---- what is measured -----------------------------------------------------------------------------

    def seconds(self, *, fetch: bool, **sizes: int) -> tuple[float, float]:
        """Of a step, and the rows that it fetches."""
        name = ("resolve", fetch, *sizes.items(), *_shipped())
        self._play(name, self._works(fetch=fetch, **sizes))
        before = self._fetched()
        took = self.median(name, self._works(fetch=fetch, **sizes), moves=True)
        rows = (self._fetched() - before) / (REPEATS * STEPS)
        return max(took - self.median("nothing", [self.tick] * STEPS), 1e-9), rows

    def gather_seconds(self, rows: int) -> float:
        """Of copying so many rows of one layer, known beforehand, back to back: those that the last step has fetched, as often as
        it takes."""
        shape, last = self.shape, self.plan.source_M[: int(self.plan.count_1)].long()
        source = last.repeat(-(-rows // max(len(last), 1)))[:rows] if len(last) else last.new_zeros(1)
        out = torch.empty(len(source), shape.row_bytes, dtype=torch.uint8, device=self.device)
        gather = _gather_plain if shape.tiny else _gather_kernel()
        works = [
            lambda layer=step % shape.layers: (self.tick(), gather(host_rows(shape)[:, layer], source, out))
            for step in range(STEPS)
        ]
        took = self.median(("gather", rows), works)
        return max(took - self.median("nothing", [self.tick] * STEPS), 1e-9)

    def parts_seconds(self) -> dict[str, float]:
        """Of resolve when nothing is missing, and when nothing is asked for."""
        still = [self.wanted[0]] * STEPS
        nobody = Wanted.of(
            torch.full_like(still[0].position_XK, -1), last_X=still[0].last_X, table_BP=still[0].table_BP, hot_BQ=still[0].hot_BQ
        )
        nothing = self.median("nothing", [self.tick] * STEPS)
        found = {}
        for name, wanted in (("all found", still), ("none asked", [nobody] * STEPS)):
            works = [lambda each=each: (self.tick(), self.resolve(each)) for each in wanted]
            self._play(("part", name), works)
            found[name] = self.median(("part", name), works) - nothing
        return found

    # ---- inside ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.places.now_1 += 1

    def resolve(self, wanted: Wanted) -> None:
        kernels_of(self.shape)[0](self.places, 0, wanted, self.plan)

    def _works(self, *, fetch: bool, **sizes: int) -> list[Callable[[], object]]:
        def work(step: int) -> None:
            self.tick()
            self.resolve(self.wanted[step])
            if fetch:
                kernels_of(self.shape)[1](self.places, step % self.shape.layers, self.plan, **sizes)

        return [lambda step=step: work(step) for step in range(STEPS)]

    def _fetched(self) -> int:
        return int(self.places.counts.tally_GBC[:, :, FETCHED].sum())

    def median(self, name: Any, works: list[Callable[[], object]], *, moves: bool = False) -> float:
        """Seconds of one work. With `moves` they are steps of the trace, and each play is of the next ones."""
        samples = []
        for _ in range(REPEATS):
            if moves:
                self.move_on()
            if self.device.type == "cpu":
                started = time.perf_counter()
                self._play(name, works)
                samples.append(time.perf_counter() - started)
            else:
                self._play(name, works, before=(events := [torch.cuda.Event(enable_timing=True) for _ in range(2)]))
                events[1].synchronize()
                samples.append(events[0].elapsed_time(events[1]) / 1e3)
        return statistics.median(samples) / len(works)

    def _play(self, name: Any, works: list[Callable[[], object]], before: list[Any] | None = None) -> None:
        if self.device.type == "cpu":
            for work in works:
                work()
            return
        if name not in self.recorded:
            works[0]()  # builds kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for work in works:
                    work()
            self.recorded[name] = graph.replay
            graph.replay()
        torch.cuda.synchronize()
        if before:
            before[0].record()
        self.recorded[name]()
        if before:
            before[1].record()


def _shipped() -> tuple[int, ...]:
    """Sizes that a recording is of."""
    try:
        from stepwell.sparse import triton_resolve as kernels
    except ImportError:
        return ()
    return kernels.ASSIGN_BLOCK, kernels.ASSIGN_WARPS, kernels.CLAIM_BLOCK, kernels.CLAIM_WARPS


def kernels_of(shape: Shape) -> tuple[Callable[..., None], Callable[..., None]]:
    if shape.tiny:
        return plain.resolve, plain.fetch
    from stepwell.sparse import triton_fetch, triton_resolve

    return triton_resolve.resolve, triton_fetch.fetch


def _parts(latent: Latent) -> dict[str, float]:
    return {name: getattr(latent, name) for name in latent.__slots__}


def _all_new(random: np.random.Generator, shape: Shape, batch: int, step: int) -> np.ndarray:
    """Positions of a part of the context that no other of the last steps selects from."""
    parts = shape.context // shape.count // 2
    first = step % parts * 2 * shape.count
    return np.stack([first + np.sort(random.permutation(2 * shape.count)[: shape.count]) for _ in range(batch)]).astype(np.int32)


def _gather_plain(host_PRE: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(host_PRE[source // host_PRE.shape[1], source % host_PRE.shape[1]])


def _gather_kernel() -> Callable[..., None]:
    from sparse.gather import gather

    return gather


def bus_bytes_per_s(device: str, size: int) -> float:
    """Of one large copy of pinned memory to the device."""
    cuda = device == "cuda"
    source = pinned_bytes(size) if cuda else torch.zeros(size, dtype=torch.uint8)
    target, samples = torch.zeros(size, dtype=torch.uint8, device=device), []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - started)
    return size / statistics.median(samples[1:])
