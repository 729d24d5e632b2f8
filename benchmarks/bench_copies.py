"""How fast torch moves pages between host and device, for several page sizes, in random order.

make bench-copies        on a machine with CUDA; without it, host to host, and it says so
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from stepwell import CacheConfig, Kind, ModelSpec, Prefix, StateSpec, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, PageIds, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from stepwell.transfer.torch_copy_engine import TorchCopyEngine, TorchMemory

PAGE_TOKENS = 64
PAGE_KIB = (36, 256, 2560)
DIRECTIONS = ((Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST))


def copy_engine_for(page_bytes: int, num_pages: int, device: str) -> TorchCopyEngine:
    kv = StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=page_bytes // PAGE_TOKENS, dtype="u8")
    spec = ModelSpec(name="copies", states=(kv,), page_tokens=PAGE_TOKENS)
    layouts = layouts_for(spec, CacheConfig(device_bytes=num_pages * page_bytes, host_bytes=num_pages * page_bytes))
    return TorchCopyEngine(
        {tier: TorchMemory(spec, layout, device if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()}
    )


def seconds(copy_engine: TorchCopyEngine, source: Tier, target: Tier, ids: PageIds, reps: int) -> float:
    """The median time of copying these pages, after one copy to warm up."""
    copy = Copy(source=Span(tier=source, kind=Kind.PREFIX, ids=ids), target=Span(tier=target, kind=Kind.PREFIX, ids=ids))
    plan = Plan(job=JobId(1), purpose=Purpose.LOAD, copies=(copy,))
    samples = []
    for _ in range(reps + 1):
        start = time.perf_counter()
        copy_engine.begin(plan)()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="bytes moved in one copy, in MiB (default 2048)")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if cuda else "no CUDA here: host to host"
    table = Table(title=f"GB/s and microseconds a page; {where}")
    for column in ("page", "direction", "GB/s", "us a page"):
        table.add_column(column, justify="right")
    for kib in PAGE_KIB:
        num_pages = max(min(2000, args.mib * 1024 // kib), 1)
        copy_engine = copy_engine_for(kib * 1024, num_pages, "cuda" if cuda else "cpu")
        ids = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
        for source, target in DIRECTIONS:
            taken = seconds(copy_engine, source, target, ids, args.reps)
            speed = num_pages * kib * 1024 / taken / 1e9
            table.add_row(f"{kib} KiB", f"{source.label} to {target.label}", f"{speed:.1f}", f"{taken / num_pages * 1e6:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
