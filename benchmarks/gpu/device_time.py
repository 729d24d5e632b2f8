"""How long the device takes for something, launched as it is or played from a recording; and which kernels it spends that on."""

from __future__ import annotations

import statistics
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from report import KernelTime

COPIES = ("Memcpy", "Memset")
MOST_KERNELS = 12


def median_us(compute: Callable[[], object], *, rounds: int, parts: int) -> float:
    """Microseconds of one of the equal `parts` of `compute`."""
    compute()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        compute()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / parts)
    return statistics.median(times)


def replayed_us(compute: Callable[[], object], *, rounds: int, parts: int) -> float:
    """The same from a CUDA graph of all parts."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return median_us(graph.replay, rounds=rounds, parts=parts)


# ---- which kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One kernel, in microseconds."""

    name: str
    start: float
    stop: float


def profiled(work: Callable[[], object]) -> list[Span]:
    """The kernels of some work. Empty where the profiler sees none, or there is none: then it says so."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            work()
            torch.cuda.synchronize()
    except RuntimeError:  # a machine without a profiler has the other figures
        traceback.print_exc()
        return []
    return [
        Span(name=event.name, start=event.time_range.start, stop=event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(COPIES)
    ]


def longest(spans: Sequence[Span], *, steps: int, most: int = MOST_KERNELS) -> tuple[KernelTime, ...]:
    """The kernels that took longest in one of `steps` steps, by name, all calls together."""
    took: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        took[span.name].append(span.stop - span.start)
    made = [KernelTime(name=name, calls=len(each) / steps, us=sum(each) / steps) for name, each in took.items()]
    return tuple(sorted(made, key=lambda kernel: -kernel.us)[:most])
