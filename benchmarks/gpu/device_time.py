"""How long the device takes for something, launched as it is or played from a recording."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_us(compute: Callable[[], object], *, rounds: int, parts: int) -> float:
    """Of one of the equal `parts` that `compute` is made of."""
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


def played_us(compute: Callable[[], object], *, rounds: int, parts: int) -> float:
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
