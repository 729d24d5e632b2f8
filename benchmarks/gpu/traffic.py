"""Bytes that go up and down all the time, on two threads: pages through the cache's copy engine, or plain copies of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import Event, Thread

import numpy as np
import torch

from bench_copies import copy_engine_for
from stepwell import Kind, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span

PLAN_BYTES = 256 << 20


Copies = Sequence[tuple[Callable[[], None], int]]  # what copies and waits for it, and how many bytes it moves


class Traffic:
    """Copies both ways, over and over, in memory of its own."""

    def __init__(self, what: str, ways: Mapping[str, Copies], device: str) -> None:
        self.what = what
        self._ways = ways
        self._device = device
        self._stop = Event()
        self._bytes = {"up": 0, "down": 0}
        self._seconds = 0.0
        self._failed: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copies both ways until the end of the `with`. Raises what a copy raised."""
        self._stop.clear()
        threads = [Thread(target=self._copy, args=(way,), daemon=True) for way in self._ways]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            self._seconds += time.perf_counter() - started
        if self._failed:
            raise self._failed[0]

    def take_bytes_per_s(self) -> tuple[float, float]:
        """Up and down since last asked, over the time it ran."""
        speeds = self._bytes["up"] / max(self._seconds, 1e-9), self._bytes["down"] / max(self._seconds, 1e-9)
        self._bytes, self._seconds = {"up": 0, "down": 0}, 0.0
        return speeds

    def _copy(self, way: str) -> None:
        # A stream of its own: copies must not wait for the passes that they are measured beside.
        aside = torch.cuda.stream(torch.cuda.Stream()) if self._device != "cpu" else nullcontext()
        try:
            with aside:
                while True:
                    for copy, size in self._ways[way]:
                        if self._stop.is_set():
                            return
                        copy()
                        self._bytes[way] += size
        except BaseException as error:  # told by `running`
            self._failed.append(error)


def page_traffic(page_bytes: int, size_bytes: int, device: str) -> Traffic:
    """Between the halves of a host and a device tier: the first half goes up, the second one down."""
    half, pages_a_plan = max(size_bytes // page_bytes, 8), max(PLAN_BYTES // page_bytes, 1)
    copy_engine = copy_engine_for(page_bytes, 2 * half, device)
    plans = {
        "up": _plans(Tier.HOST, Tier.DEVICE, Purpose.LOAD, range(half), pages_a_plan),
        "down": _plans(Tier.DEVICE, Tier.HOST, Purpose.SAVE, range(half, 2 * half), pages_a_plan),
    }

    def copies(plan: Plan) -> tuple[Callable[[], None], int]:
        return lambda: copy_engine.begin(plan)(), sum(len(copy.source.ids) for copy in plan.copies) * page_bytes

    ways = {way: [copies(plan) for plan in each] for way, each in plans.items()}
    return Traffic(f"pages of {page_bytes / 1024:,.0f} KiB", ways, device)


def plain_traffic(size_bytes: int, device: str) -> Traffic:
    """One large copy of pinned memory each way at a time: what no cache could do without."""
    size = min(size_bytes, PLAN_BYTES)

    def copies(up: bool) -> Copies:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")
        there = torch.empty(size, dtype=torch.uint8, device=device)

        def copy() -> None:
            there.copy_(host, non_blocking=True) if up else host.copy_(there, non_blocking=True)
            if device != "cpu":
                torch.cuda.current_stream().synchronize()

        return [(copy, size)]

    return Traffic("plain copies", {"up": copies(True), "down": copies(False)}, device)


def _plans(source: Tier, target: Tier, purpose: Purpose, pages: range, pages_a_plan: int) -> list[Plan]:
    """Pages in no order, as a busy arena has them: neighbours would be copied as one."""
    plans, shuffled = [], np.random.default_rng(1).permutation(np.array(pages, np.int32))
    for start in range(0, len(pages), pages_a_plan):
        ids = shuffled[start : start + pages_a_plan]
        spans = [Span(tier=tier, kind=Kind.PREFIX, ids=ids) for tier in (source, target)]
        plans.append(Plan(job=JobId(start), purpose=purpose, copies=(Copy(source=spans[0], target=spans[1]),)))
    return plans
