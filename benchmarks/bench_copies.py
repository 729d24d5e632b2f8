"""Page copies between host and device beside the bus: one way, both ways at once, and what they cost a large product.

    make bench-copies                                      on a machine with CUDA: about a minute, writes bench-copies.json
    python benchmarks/bench_copies.py --sweep              the copy kernel by number of programs, beside the copy engines

Pages lie in random order, so none are neighbours. The limit is one large copy of pinned memory, measured in the same run, each
way and both ways at once. Without CUDA pages are copied from host to host, and it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from stepwell import CacheConfig, Kind, ModelSpec, Prefix, StateSpec, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from stepwell.transfer.page_copier import Route, Routes
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory, pinned_bytes

ROOT = Path(__file__).parents[1]
PAGE_TOKENS = 64
KIB, MIB = 1 << 10, 1 << 20
PAGES_KIB = (36, 64, 128, 256, 512, 1024, 2560, 9216)
COUNTS = (1, 8, 32, 128, 512)
SMALL_KIB, MANY = 64, 2048  # so many small pages are copied too: else they never come to what is large
LARGE_BYTES = 32 * MIB  # from here on the goals count
GOAL, MOST_SLOWER = 0.90, 0.03
LIMIT_BYTES = 512 * MIB
SWEPT_KIB, SWEPT_PROGRAMS, SWEPT_WARPS = (36, 256, 1024), (1, 2, 3, 4, 8, 16), (16, 32)
BESIDE_KIB = (36, 256, 2560)
UP, DOWN, BOTH = "up", "down", "both"
WAYS = {UP: (Tier.HOST, Tier.DEVICE, Purpose.LOAD), DOWN: (Tier.DEVICE, Tier.HOST, Purpose.SAVE)}

Found = dict[str, Any]  # what, figures, and where there is a goal: value, limit, most


def copy_engine_for(page_bytes: int, num_pages: int, device: str, routes: Routes | None = None) -> TorchCopyEngine:
    kv = StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=page_bytes // PAGE_TOKENS, dtype="u8")
    spec = ModelSpec(name="copies", states=(kv,), page_tokens=PAGE_TOKENS)
    layouts = layouts_for(spec, CacheConfig(device_bytes=num_pages * page_bytes, host_bytes=num_pages * page_bytes))
    memories = {tier: TorchMemory(spec, layout, device if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()}
    return TorchCopyEngine(memories, routes=routes)


def plan_for(way: str, first: int, num_pages: int) -> Plan:
    """Pages from `first` on, in random order; the same on both sides."""
    source, target, purpose = WAYS[way]
    ids = (first + np.random.default_rng(1).permutation(num_pages)).astype(np.int32)
    copy = Copy(source=Span(tier=source, kind=Kind.PREFIX, ids=ids), target=Span(tier=target, kind=Kind.PREFIX, ids=ids))
    return Plan(job=JobId(first), purpose=purpose, copies=(copy,))


# ---- one way and both -----------------------------------------------------------------------------


def median_s(work: Callable[[], object], repeats: int) -> float:
    """After one to warm up."""
    samples = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def at_once_s(works: list[Callable[[], object]], repeats: int) -> float:
    """One round of all of them, each on its thread again and again, from a common start until the last has ended."""
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
        with suppress(BrokenBarrierError):  # whoever broke it raises below
            barrier.wait()
        started = time.perf_counter()
        for each in running:
            each.result()
        return (time.perf_counter() - started) / repeats


def limits(device: str, size: int, repeats: int) -> dict[str, float]:
    """Bytes a second of one large copy: up, down, and both at once together."""
    cuda = device != "cpu"
    hosts = [pinned_bytes(size) if cuda else torch.zeros(size, dtype=torch.uint8) for _ in WAYS]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in WAYS]

    def copier(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        stream = torch.cuda.Stream() if cuda else None

        def copy() -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            if stream is not None:
                stream.synchronize()

        return copy

    up, down = copier(there[0], hosts[0]), copier(hosts[1], there[1])
    both_s = at_once_s([up, down], repeats)
    return {UP: size / median_s(up, repeats), DOWN: size / median_s(down, repeats), BOTH: 2 * size / both_s}


def measure_pages(kib: int, counts: tuple[int, ...], device: str, limit: dict[str, float], repeats: int) -> Iterator[Found]:
    """One size of pages, 1 to many of them."""
    most = max(counts)
    copy_engine = copy_engine_for(kib * KIB, 2 * most, device)  # the halves go different ways
    for count in counts:
        size = count * kib * KIB
        works = [lambda plan=plan: copy_engine.begin(plan)() for plan in (plan_for(UP, 0, count), plan_for(DOWN, most, count))]
        rounds = max(repeats, min(LIMIT_BYTES // size, 50))
        speeds = {way: size / median_s(work, rounds) for way, work in zip(WAYS, works, strict=True)}
        speeds[BOTH] = 2 * size / at_once_s(works, rounds)  # type: ignore[arg-type]
        share = {way: speed / limit[way] for way, speed in speeds.items()}
        figures = {f"{way}, GB/s": speed / 1e9 for way, speed in speeds.items()} | {
            f"{way}, of limit": share[way] for way in share
        }
        found: Found = {"what": f"{kib} KiB x {count}", "bytes": size, "figures": figures}
        if size >= LARGE_BYTES:
            found |= {"value": min(share.values()), "limit": GOAL}
        yield found


# ---- beside a product -----------------------------------------------------------------------------


@contextmanager
def copying(copy_engine: TorchCopyEngine, plans: list[Plan]) -> Iterator[None]:
    """Each plan again and again, on a thread and behind a stream of its own."""
    stop = Event()

    def copy(plan: Plan) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # copies must not wait for the products that they run beside
            while not stop.is_set():
                copy_engine.begin(plan)()

    with ThreadPoolExecutor(len(plans)) as threads:
        running = [threads.submit(copy, plan) for plan in plans]
        try:
            yield
        finally:
            stop.set()
        for each in running:
            each.result()  # raises what a copy raised


def recorded_products(rows: int, times: int, width: int = 8192) -> Callable[[int], float]:
    """Products of `[rows, width] x [width, width]` in bf16, recorded as an engine records its steps: no launch of theirs waits
    for a thread that copies. What it gives says how long so many replays of `times` products take on the device.
    """
    a, b = (torch.randn(size, width, dtype=torch.bfloat16, device="cuda") for size in (rows, width))
    a @ b
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            a @ b

    def seconds(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return seconds


def measure_beside(kib: int, rounds: int = 4, routes: Routes | None = None) -> Iterator[Found]:
    """How much slower products get while pages go both ways: large ones, and ones that only read weights."""
    count = max(256 * MIB // (kib * KIB), 1)
    copy_engine = copy_engine_for(kib * KIB, 2 * count, "cuda", routes)
    plans = [plan_for(UP, 0, count), plan_for(DOWN, count, count)]
    for name, rows, times in (("prefill", 8192, 10), ("decode", 32, 200)):
        products = recorded_products(rows, times)
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(products(10))
            with copying(copy_engine, plans):
                beside.append(products(10))
        slower = statistics.median(beside) / statistics.median(alone) - 1
        figures = {"alone, ms": statistics.median(alone) * 1e3, "slower by, %": slower * 100}
        yield {
            "what": f"{name}-like product beside {kib} KiB pages both ways", "figures": figures,
            "value": slower, "limit": MOST_SLOWER, "most": True,
        }  # fmt: skip


def measure_sweep(kib: int, limit: dict[str, float], repeats: int) -> Iterator[Found]:
    """The kernel by number and size of programs, then the copy engines."""
    from stepwell.transfer import copy_kernel

    shipped = copy_kernel.WARPS
    for warps, programs in ((0, 0), *product(SWEPT_WARPS, SWEPT_PROGRAMS)):
        copy_kernel.WARPS = warps or shipped
        route = Route(crossover_bytes=(1 << 40) if programs else 0, programs=max(programs, 1))
        figures = _swept(kib, Routes(load=route, save=route), limit, repeats)
        yield {"what": f"{kib} KiB, {f'{programs} x {warps} warps' if programs else 'copy engines'}", "figures": figures}
    copy_kernel.WARPS = shipped


def _swept(kib: int, routes: Routes, limit: dict[str, float], repeats: int) -> dict[str, float]:
    count = max(128 * MIB // (kib * KIB), 1)
    copy_engine = copy_engine_for(kib * KIB, 2 * count, "cuda", routes)
    works = [lambda plan=plan: copy_engine.begin(plan)() for plan in (plan_for(UP, 0, count), plan_for(DOWN, count, count))]
    speeds = {way: count * kib * KIB / median_s(work, repeats) for way, work in zip(WAYS, works, strict=True)}
    speeds[BOTH] = 2 * count * kib * KIB / at_once_s(works, repeats)  # type: ignore[arg-type]
    slower = [found["figures"]["slower by, %"] for found in measure_beside(kib, 1, routes)]
    figures = {f"{way}, of limit": speed / limit[way] for way, speed in speeds.items()}
    return figures | {"prefill slower by, %": slower[0], "decode slower by, %": slower[1]}


# ---- all of it ------------------------------------------------------------------------------------


def run(*, quick: bool = False, sweep: bool = False) -> list[Found]:
    """Measures everything; a goal, where there is one, is `value` against `limit` (at most so much with `most`)."""
    cuda = torch.cuda.is_available()
    device, repeats = ("cuda", 5) if cuda else ("cpu", 1)
    limit = limits(device, 8 * MIB if quick else LIMIT_BYTES, repeats)
    found: list[Found] = [{"what": "limit", "figures": {f"{way}, GB/s": speed / 1e9 for way, speed in limit.items()}}]
    if sweep:
        return found + [each for kib in SWEPT_KIB for each in measure_sweep(kib, limit, repeats)]
    for kib in (36, 256) if quick else PAGES_KIB:
        counts = (1, 8) if quick else (*COUNTS, *((MANY,) if kib <= SMALL_KIB else ()))
        found += measure_pages(kib, counts, device, limit, repeats)
    if cuda and not quick:
        found += [each for kib in BESIDE_KIB for each in measure_beside(kib)]
    return found


def machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA here: host to host",
    }  # fmt: skip


def tables(found: list[Found]) -> Iterator[Table]:
    """One for each set of figures, in order."""
    table, columns = Table(), ()
    for each in found:
        if tuple(each["figures"]) != columns:
            if columns:
                yield table
            table, columns = Table(Column("", no_wrap=True), *each["figures"], "goal"), tuple(each["figures"])
        met = "" if "value" not in each else "met" if (each["value"] <= each["limit"]) == each.get("most", False) else "missed"
        table.add_row(each["what"], *(f"{figure:,.2f}" for figure in each["figures"].values()), met)
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small pages only: whether it runs")
    parser.add_argument("--sweep", action="store_true", help="the copy kernel by number of programs instead")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-copies.json", help="(default: bench-copies.json)")
    args = parser.parse_args()
    started, console = time.monotonic(), Console()
    found = run(quick=args.quick, sweep=args.sweep)
    console.print(machine()["device"])
    for table in tables(found):
        console.print(table)
    args.json.write_text(json.dumps({"machine": machine(), "results": found}, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json.name}")


if __name__ == "__main__":
    main()
