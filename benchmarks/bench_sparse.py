"""Sparse decode: rows that are missing by policy, the time to find and fetch them, beside a plain gather and the bus, and what a
server gains by it.

    make bench-sparse                                      on a machine with CUDA: some minutes, writes bench-sparse.json
    make bench-sparse ARGS="--only misses"                 without one
    make bench-sparse ARGS="--only serving"                tokens a second and the largest batch, of whole engines; two minutes
    python benchmarks/bench_sparse.py --sweep              the kernels by size and number of programs
    python benchmarks/bench_sparse.py --tiny               small and in plain torch: whether it runs

Selections are a calibrated trace (`sparse/trace.py`). Rows of 656 bytes lie in pinned host pages of DeepSeek-V3.2's
shape (61 layers, 64 tokens), each request has 4,096 hot rows, and each step is of another layer. Times are of many steps in one
recorded graph, less what the same graph takes without them. `sparse/serving.py` says what `serving` does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from report import Goal, Row, goals_of, kernels_of, machine, table_of
from sparse.rig import Rig, Shape, bus_bytes_per_s
from sparse.served import TINY as TINY_SERVING
from sparse.served import Sizes
from sparse.serving import measure_serving
from sparse.trace import HARD, STEADY, Latent, count_misses, make_trace

ROOT = Path(__file__).parents[1]
TRACES = {"steady, 32K": (STEADY, 32 << 10), "hard, 32K": (HARD, 32 << 10), "steady, 128K": (STEADY, 128 << 10)}
POLICIES = ("fifo", "random", "lru", "score", "belady")
COUNT, HOT_ROWS = 2048, (2048, 4096, 6144, 8192)
PUBLISHED = {  # percent: DeepSeek-V3.2 (steps 300 to 1,000 of a figure), GLM-5.1 (a table)
    ("steady, 32K", 2048): {"lru": 21.5},
    ("steady, 32K", 4096): {"fifo": 11.5, "random": 10.0, "lru": 8.5},
    ("steady, 128K", 2048): {"lru": 30.0},
    ("steady, 128K", 4096): {"fifo": 17.2, "random": 16.1, "lru": 13.4, "belady": 8.2},
    ("steady, 128K", 8192): {"lru": 6.7},
}
MOST_OFF = 2.0  # percent of a selection, for the trace to count as calibrated
BATCHES, COLD_BATCHES = (1, 4, 16, 32, 64, 128, 256), (8, 32)
SHARE, MANY_ROWS, SPEED = 0.9, 16_384, 40.0  # of a plain gather; from so many rows on; GB/s
SWEPT_BATCHES = (1, 16, 64, 256)
SWEPT_FETCH = [
    (programs, warps, units) for warps, units in ((4, 512), (4, 256), (8, 1024)) for programs in (16, 32, 64, 128, 264)
]
SWEPT_ASSIGN = ((1024, 8), (2048, 8), (2048, 16), (4096, 16), (4096, 32))
SWEPT_CLAIM = ((128, 4), (256, 4), (512, 4), (1024, 8), (2048, 16))
TINY = Shape(layers=3, page_rows=4, row_bytes=24, count=16, hot_rows=32, context=512, host_bytes=1 << 20)


# ---- how many are missing -----------------------------------------------------------------------------


def measure_misses(*, steps: int, tiny: bool) -> Iterator[Row]:
    """Percent of a selection that is fetched in a step, over the third quarter of a trace: slots are full by then, and the best
    rule still has a future to know."""
    scale = 64 if tiny else 1
    for name, (latent, context) in TRACES.items():
        latent = Latent(static=1, slow=1, slow_stays=0.99, fast=0.5, fast_stays=0.7, noise=0.15, last=4) if tiny else latent
        trace = make_trace(latent, context=context // scale, steps=steps, count=COUNT // scale, scores=True)
        for hot_rows in HOT_ROWS:
            figures = {}
            for policy in POLICIES:
                missed = count_misses(trace, hot_rows=hot_rows // scale, policy=policy)
                figures[f"{policy}, %"] = _percent(missed, scale)
            known = PUBLISHED.get((name, hot_rows), {})
            figures |= {f"published {policy}, %": value for policy, value in known.items()}
            off = max((abs(figures[f"{policy}, %"] - value) for policy, value in known.items()), default=None)
            goal = None if off is None or tiny else Goal(value=off, limit=MOST_OFF, most=True)
            yield Row(what=f"{name}, H = {hot_rows:,}", figures=figures, goal=goal)


def _percent(rows_N: npt.NDArray[np.int64], scale: int) -> float:
    """Of a selection, over the third quarter of the steps."""
    return 100 * float(rows_N[len(rows_N) // 2 : 3 * len(rows_N) // 4].mean()) * scale / COUNT


# ---- how long it takes --------------------------------------------------------------------------------


def measure_times(shape: Shape, batches: Sequence[int], bus: float, *, cold: bool = False) -> Iterator[Row]:
    """Resolve and fetch of one layer, compared with a plain gather of as many rows."""
    for batch in batches:
        rig = Rig(shape, batch, cold=cold)
        whole_s, rows = rig.seconds(fetch=True)
        resolve_s, _ = rig.seconds(fetch=False)
        gather_s = rig.gather_seconds(round(rows))
        size, share = rows * shape.row_bytes, gather_s / whole_s
        figures = {
            "rows": rows, "resolve, us": resolve_s * 1e6, "with fetch, us": whole_s * 1e6, "gather, us": gather_s * 1e6,
            "of a gather": share, "GB/s": size / whole_s / 1e9, "gather, GB/s": size / gather_s / 1e9,
            "of the bus": size / whole_s / bus,
        }  # fmt: skip
        what = f"batch {batch}{', all missing' if cold else ''}"
        yield Row(what=f"{what}, of a gather", figures=figures, goal=None if shape.tiny else Goal(value=share, limit=SHARE))
        if rows >= MANY_ROWS:
            yield Row(what=f"{what}, GB/s", figures={}, goal=Goal(value=size / whole_s / 1e9, limit=SPEED))
        del rig


def sweep(shape: Shape) -> Iterator[Row]:
    """Microseconds of the kernels by their sizes, over batches."""
    from stepwell.sparse import triton_resolve

    rigs, cold = {batch: Rig(shape, batch) for batch in SWEPT_BATCHES}, Rig(shape, COLD_BATCHES[0], cold=True)
    resolve_s = {batch: rig.seconds(fetch=False)[0] for batch, rig in rigs.items()}
    for programs, warps, units in SWEPT_FETCH:
        sizes = {"programs": programs, "warps": warps, "units": units}
        figures = {f"batch {b}, us": (rig.seconds(fetch=True, **sizes)[0] - resolve_s[b]) * 1e6 for b, rig in rigs.items()}
        figures["batch 8, all missing, us"] = cold.seconds(fetch=True, **sizes)[0] * 1e6
        yield Row(what=f"fetch, {programs} x {warps} warps, {units} units", figures=figures)
    for name, swept in (("ASSIGN", SWEPT_ASSIGN), ("CLAIM", SWEPT_CLAIM)):
        block, warps = (f"{name}_{what}" for what in ("BLOCK", "WARPS"))
        shipped = getattr(triton_resolve, block), getattr(triton_resolve, warps)
        for sizes in swept:
            setattr(triton_resolve, block, sizes[0])
            setattr(triton_resolve, warps, sizes[1])
            figures = {f"batch {b}, us": rig.seconds(fetch=False)[0] * 1e6 for b, rig in rigs.items()}
            yield Row(what=f"resolve, {name.lower()} by {sizes[0]} x {sizes[1]} warps", figures=figures)
        setattr(triton_resolve, block, shipped[0])
        setattr(triton_resolve, warps, shipped[1])
    for batch, rig in rigs.items():
        figures = {f"{what}, us": time_s * 1e6 for what, time_s in rig.parts_seconds().items()}
        yield Row(what=f"parts of resolve, batch {batch}", figures=figures)


# ---- all of it ------------------------------------------------------------------------------------------


def parts_for(args: argparse.Namespace, device: str, say: Callable[[str], None]) -> dict[str, Callable[[], Iterator[Row]]]:
    shape = TINY if args.tiny else Shape(host_bytes=args.host_gib << 30)
    if args.sweep:
        return {"sweep": lambda: sweep(shape)}
    batches = (1, 3) if args.tiny else BATCHES[::3] if args.quick else BATCHES

    def times() -> Iterator[Row]:
        if device == "cpu" and not args.tiny:
            yield Row(what="resolve and fetch", note="no CUDA device here")
            return
        bus = bus_bytes_per_s(device, 1 << 20 if args.tiny else 512 << 20)
        yield Row(what="the bus, one large copy", figures={"GB/s": bus / 1e9})
        yield from measure_times(shape, batches, bus)
        yield from measure_times(shape, batches[:1] if args.tiny else COLD_BATCHES, bus, cold=True)

    def serving() -> Iterator[Row]:
        if device == "cpu" and not args.tiny:
            yield Row(what="tokens a second and the largest batch", note="no CUDA device here")
            return
        sizes = TINY_SERVING if args.tiny else Sizes(contexts=(64 << 10,)) if args.quick else Sizes()
        yield from measure_serving(sizes, device, say)

    steps = 24 if args.tiny else 120 if args.quick else 400
    parts = {"misses": lambda: measure_misses(steps=steps, tiny=args.tiny), "times": times, "serving": serving}
    return {name: part for name, part in parts.items() if args.only in (None, name)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("misses", "times", "serving"))
    parser.add_argument("--quick", action="store_true", help="fewer batches, shorter traces, and one length of contexts")
    parser.add_argument("--tiny", action="store_true", help="a small shape in plain torch, also without CUDA: whether it runs")
    parser.add_argument("--sweep", action="store_true", help="the kernels by size instead")
    parser.add_argument("--host-gib", type=int, default=8, help="pinned host memory to fetch from (default: 8)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-sparse.json", help="(default: bench-sparse.json)")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    started, console, found = time.monotonic(), Console(width=None if os.isatty(1) else 200), {}
    for name, part in parts_for(args, device, lambda text: console.print(f"  {text}", highlight=False)).items():
        found[name] = list(part())
        console.print(table_of(name, [row for row in found[name] if row.figures or row.note]))
        if (kernels := kernels_of(found[name])) is not None:
            console.print(kernels)
    console.print(goals_of(found))
    written: dict[str, Any] = {name: [row.as_json() for row in rows] for name, rows in found.items()}
    args.json.write_text(json.dumps({"machine": machine(device), "tiny": args.tiny, "parts": written}, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
