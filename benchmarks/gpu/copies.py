"""Page copies between host and device, compared with one large copy of pinned memory in the same run, and passes during copies.

Pages lie in random order, so that no two of them are neighbours. Passes during copies are compared with the same passes alone, in
turns. Plain copies of torch show how much of the slowdown the hardware causes: they take memory bandwidth from a pass too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from threading import Barrier, BrokenBarrierError, Event, Thread

import numpy as np
import numpy.typing as npt
import torch

from gpu.bench import Bench
from gpu.requests import Steady, prefill_s, warm_up
from gpu.shapes import QWEN
from report import Goal, Row
from stepwell import CacheConfig, Kind, ModelSpec, Prefix, StateSpec, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from stepwell.engine import Engine
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory, pinned_bytes

PAGE_TOKENS, KIB, MIB = 64, 1 << 10, 1 << 20
PAGES_KIB, COUNTS = (36, 64, 128, 256, 512, 1024, 2560, 9216), (1, 8, 32, 128, 512)
SMALL_KIB, MANY = 64, 2048  # this many pages are copied too where they are small
LARGE_BYTES, GOAL = 32 * MIB, 0.90  # the goal counts from this size on
LIMIT_BYTES, REPEATS = 512 * MIB, 5
UP, DOWN, BOTH = "up", "down", "both"
WAYS = {UP: (Tier.HOST, Tier.DEVICE, Purpose.LOAD), DOWN: (Tier.DEVICE, Tier.HOST, Purpose.SAVE)}

BATCH, CONTEXT, STEPS, ROUNDS = 8, 8192, 30, 3
MOST_SLOWER = 0.03
COPIED_BYTES, SMALL_PAGE_BYTES = 2 << 30, 36 << 10  # each way, repeatedly; small pages take another route
PLAN_BYTES = 256 << 20

Copies = Sequence[tuple[Callable[[], object], int]]  # copies and waits for the end; bytes moved


def _copy_engine(page_bytes: int, num_pages: int, device: str) -> TorchCopyEngine:
    kv = StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=page_bytes // PAGE_TOKENS, dtype="u8")
    spec = ModelSpec(name="copies", states=(kv,), page_tokens=PAGE_TOKENS)
    layouts = layouts_for(spec, CacheConfig(device_bytes=num_pages * page_bytes, host_bytes=num_pages * page_bytes))
    memories = {tier: TorchMemory(spec, layout, device if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()}
    return TorchCopyEngine(memories)


def _shuffled(first: int, num_pages: int) -> npt.NDArray[np.int32]:
    return (first + np.random.default_rng(1).permutation(num_pages)).astype(np.int32)


def _plan(way: str, ids: npt.NDArray[np.int32]) -> Plan:
    """These pages, the same on both sides."""
    source, target, purpose = WAYS[way]
    copy = Copy(source=Span(tier=source, kind=Kind.PREFIX, ids=ids), target=Span(tier=target, kind=Kind.PREFIX, ids=ids))
    return Plan(job=JobId(int(ids[0])), purpose=purpose, copies=(copy,))


# ---- copies alone ---------------------------------------------------------------------------------


def measure_copies(bench: Bench) -> list[Row]:
    """1 to many pages of several sizes, one way and both ways at once."""
    limit = _limits(bench.device, MIB if bench.tiny else LIMIT_BYTES)
    rows = [Row(what="limit", figures={f"{way}, GB/s": speed / 1e9 for way, speed in limit.items()})]
    for kib in (36, 256) if bench.tiny else PAGES_KIB:
        counts = (1, 8) if bench.tiny else (*COUNTS, *((MANY,) if kib <= SMALL_KIB else ()))
        rows += bench.guarded(f"{kib} KiB", lambda kib=kib, counts=counts: list(_pages(kib, counts, bench.device, limit)))  # type: ignore[misc]
    return rows


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """After one call to warm up."""
    samples = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def _at_once_s(works: Sequence[Callable[[], object]], repeats: int) -> float:
    """One round of all of them, each on its thread, from a common start until the last has ended."""
    barrier = Barrier(len(works) + 1)

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()
        for _ in range(repeats):
            work()

    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(run, work) for work in works]
        with suppress(BrokenBarrierError):  # the thread that broke it raises below
            barrier.wait()
        started = time.perf_counter()
        for each in running:
            each.result()
        return (time.perf_counter() - started) / repeats


def _limits(device: str, size: int) -> dict[str, float]:
    """Bytes a second of one large copy: up, down, and both at once together."""
    up, down = (_plain_copy(size, device, up=way) for way in (True, False))
    both_s = _at_once_s([up, down], REPEATS)
    return {UP: size / _median_s(up, REPEATS), DOWN: size / _median_s(down, REPEATS), BOTH: 2 * size / both_s}


def _plain_copy(size: int, device: str, *, up: bool) -> Callable[[], None]:
    cuda = device != "cpu"
    host = pinned_bytes(size) if cuda else torch.zeros(size, dtype=torch.uint8)
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream() if cuda else None

    def copy() -> None:
        with torch.cuda.stream(stream):
            there.copy_(host, non_blocking=True) if up else host.copy_(there, non_blocking=True)
        if stream is not None:
            stream.synchronize()

    return copy


def _pages(kib: int, counts: tuple[int, ...], device: str, limit: dict[str, float]) -> Iterator[Row]:
    most = max(counts)
    copy_engine = _copy_engine(kib * KIB, 2 * most, device)  # the halves go different ways
    for count in counts:
        size = count * kib * KIB
        plans = _plan(UP, _shuffled(0, count)), _plan(DOWN, _shuffled(most, count))
        works = [lambda plan=plan: copy_engine.begin(plan)() for plan in plans]
        rounds = max(REPEATS, min(LIMIT_BYTES // size, 50))
        speeds = {way: size / _median_s(work, rounds) for way, work in zip(WAYS, works, strict=True)}
        speeds[BOTH] = 2 * size / _at_once_s(works, rounds)
        share = {way: speed / limit[way] for way, speed in speeds.items()}
        figures = {f"{way}, GB/s": speed / 1e9 for way, speed in speeds.items()}
        figures |= {f"{way}, of limit": each for way, each in share.items()}
        goal = Goal(value=min(share.values()), limit=GOAL) if size >= LARGE_BYTES else None
        yield Row(what=f"{kib} KiB x {count}", figures=figures, goal=goal)


# ---- passes during copies -------------------------------------------------------------------------


class Traffic:
    """Copies both ways, repeatedly, on two threads and in memory of its own."""

    def __init__(self, what: str, ways: Mapping[str, Copies], device: str) -> None:
        self.what = what
        self._ways = ways
        self._device = device
        self._stop = Event()
        self._bytes = dict.fromkeys(WAYS, 0)
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

    def take_bytes_per_s(self) -> list[float]:
        """Up and down since the last call, over the time it ran."""
        speeds = [moved / max(self._seconds, 1e-9) for moved in self._bytes.values()]
        self._bytes, self._seconds = dict.fromkeys(WAYS, 0), 0.0
        return speeds

    def _copy(self, way: str) -> None:
        # A stream of its own: copies must not wait for the passes that run at the same time.
        own_stream = torch.cuda.stream(torch.cuda.Stream()) if self._device != "cpu" else nullcontext()
        try:
            with own_stream:
                while True:
                    for copy, size in self._ways[way]:
                        if self._stop.is_set():
                            return
                        copy()
                        self._bytes[way] += size
        except BaseException as error:  # raised by `running`
            self._failed.append(error)


def page_traffic(page_bytes: int, size_bytes: int, device: str) -> Traffic:
    """Between the halves of a host and a device tier: the first half goes up, the second one down."""
    half, pages_a_plan = max(size_bytes // page_bytes, 8), max(PLAN_BYTES // page_bytes, 1)
    copy_engine = _copy_engine(page_bytes, 2 * half, device)

    def copies(way: str, start: int) -> Copies:
        ids = _shuffled(start, half)
        parts = [ids[at : at + pages_a_plan] for at in range(0, half, pages_a_plan)]
        plans = [(_plan(way, part), len(part) * page_bytes) for part in parts]
        return [(lambda plan=plan: copy_engine.begin(plan)(), size) for plan, size in plans]

    return Traffic(f"pages of {page_bytes / 1024:,.0f} KiB", {UP: copies(UP, 0), DOWN: copies(DOWN, half)}, device)


def plain_traffic(size_bytes: int, device: str) -> Traffic:
    """One large copy of pinned memory each way at a time: the least that any cache needs."""
    size = min(size_bytes, PLAN_BYTES)
    ways = {way: [(_plain_copy(size, device, up=way == UP), size)] for way in WAYS}
    return Traffic("plain copies", ways, device)


def measure_passes(bench: Bench) -> list[Row]:
    made, context = bench.make(QWEN), bench.tokens(CONTEXT)
    page_bytes = bench.spec(made).object_bytes(Kind.PREFIX)
    engine = bench.engine(made, device_bytes=bench.bytes_of(made, (BATCH + 2) * (context + 1024)))
    del made
    bench.clean()
    rows: list[Row] = []
    try:
        warm_up(bench, engine)
        prompts = bench.prompts(BATCH, context, engine.vocab_size)
        prefill_s(bench, engine, prompts)
        size, device = MIB if bench.tiny else COPIED_BYTES, bench.device
        for page in (None, page_bytes, SMALL_PAGE_BYTES):
            traffic = plain_traffic(size, device) if page is None else page_traffic(page, size, device)
            rows += bench.guarded(traffic.what, lambda traffic=traffic, goal=page is not None: [  # type: ignore[misc]
                _decode(bench, engine, traffic, prompts, goal), _prefill(bench, engine, traffic, context, goal)
            ])  # fmt: skip
    finally:
        engine.close()
    return rows


def _decode(bench: Bench, engine: Engine, traffic: Traffic, prompts: list[list[int]], goal: bool) -> Row:
    alone: list[float] = []
    copying: list[float] = []
    with Steady(bench, engine, prompts, steps=2 * ROUNDS * STEPS) as steady:
        for _ in range(ROUNDS):
            alone += steady.times(bench.steps(STEPS))
            with traffic.running():
                copying += steady.times(bench.steps(STEPS))
    return _row(f"decode, {len(prompts)} x {len(prompts[0]):,}", alone, copying, traffic, goal)


def _prefill(bench: Bench, engine: Engine, traffic: Traffic, context: int, goal: bool) -> Row:
    alone: list[float] = []
    copying: list[float] = []
    for _ in range(ROUNDS):
        alone.append(prefill_s(bench, engine, bench.prompts(1, context, engine.vocab_size)))
        with traffic.running():
            copying.append(prefill_s(bench, engine, bench.prompts(1, context, engine.vocab_size)))
    return _row(f"prefill, 1 x {context:,}", alone, copying, traffic, goal)


def _row(what: str, alone: list[float], copying: list[float], traffic: Traffic, goal: bool) -> Row:
    slower = statistics.median(copying) / statistics.median(alone) - 1
    up, down = traffic.take_bytes_per_s()
    figures = {
        "alone, ms": statistics.median(alone) * 1e3, "while copying, ms": statistics.median(copying) * 1e3,
        "slower by, %": slower * 100, "up, GB/s": up / 1e9, "down, GB/s": down / 1e9,
    }  # fmt: skip
    aim = Goal(value=slower, limit=MOST_SLOWER, most=True) if goal else None
    return Row(what=f"{what}, {traffic.what}", figures=figures, goal=aim)
