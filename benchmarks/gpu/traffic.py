"""Pages that go up and down all the time, through the cache's copy engine, on two threads; memory of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from types import TracebackType

import numpy as np
import torch

from stepwell import CacheConfig, Kind, ModelSpec, Tier
from stepwell.base.ids import JobId
from stepwell.base.plan import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from stepwell.transfer.torch_copy_engine import TorchCopyEngine, TorchMemory

PAGES_A_PLAN = 32


class Traffic:
    """Copies between the halves of a host and a device tier: the first half goes up, the second one down."""

    def __init__(self, spec: ModelSpec, device: str, size_bytes: int) -> None:
        least = 8 * spec.object_bytes(Kind.PREFIX)
        size_bytes = 2 * max(size_bytes, least)
        layouts = layouts_for(spec, CacheConfig(device_bytes=size_bytes, host_bytes=size_bytes))
        memories = {tier: TorchMemory(spec, layout, device if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()}
        self._copy_engine = TorchCopyEngine(memories)
        self._device, self._page_bytes = device, spec.object_bytes(Kind.PREFIX)
        half = min(layout.rows(Kind.PREFIX) for layout in layouts.values()) // 2
        self._ways = {
            "up": _plans(Tier.HOST, Tier.DEVICE, Purpose.LOAD, range(half)),
            "down": _plans(Tier.DEVICE, Tier.HOST, Purpose.SAVE, range(half, 2 * half)),
        }
        self._stop = Event()
        self._bytes = {"up": 0, "down": 0}
        self._seconds = 0.0
        self._failed: list[BaseException] = []

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()

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
                    for plan in self._ways[way]:
                        if self._stop.is_set():
                            return
                        self._copy_engine.begin(plan)()
                        self._bytes[way] += sum(len(copy.source.ids) for copy in plan.copies) * self._page_bytes
        except BaseException as error:  # told by `running`
            self._failed.append(error)


def _plans(source: Tier, target: Tier, purpose: Purpose, pages: range) -> list[Plan]:
    plans = []
    for start in range(0, len(pages), PAGES_A_PLAN):
        ids = np.array(pages[start : start + PAGES_A_PLAN], np.int32)
        spans = [Span(tier=tier, kind=Kind.PREFIX, ids=ids) for tier in (source, target)]
        plans.append(Plan(job=JobId(start), purpose=purpose, copies=(Copy(source=spans[0], target=spans[1]),)))
    return plans
