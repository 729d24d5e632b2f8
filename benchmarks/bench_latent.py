"""Latents, picked rows, index scores and DeepSeek-V4's entries on a GPU: plain torch beside the kernels, in one run.

    python benchmarks/bench_latent.py [--batch 32] [--context 16384]

Shapes are those of DeepSeek-V3.2 (128 heads, 64 index heads, 2,048 rows picked) and V4 (64 heads, window 128, 512 entries
picked). `limit` is what reading the rows once takes at 4.0 TB/s. Prints a table, and writes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from stepwell.engine.ops.compression import Entries, Index
from stepwell.engine.ops.kernels import TORCH, Kernels, choose_kernels
from stepwell.engine.passes.groups import Seen
from stepwell.engine.passes.paging import Look, Paging, Run, Sight, Singles
from stepwell.engine.passes.rows import PLAIN, Powers, RowFormat, Rows, Tiled

PAGE, LAYERS, PICKED, BYTES_PER_MS = 64, 4, 2048, 4.0e9
BF16 = torch.bfloat16


def measured(call: Callable[[], Any], rounds: int = 20) -> float:
    """Milliseconds, the median of some rounds."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[rounds // 2]


def paging_of(contexts: list[int], lengths: list[int], window: int | None, ids: np.ndarray) -> Paging:
    looks, start, at = [], 0, 0
    for before, new in zip(contexts, lengths, strict=True):
        first = 0 if window is None else max(before - window + 1, 0) // PAGE
        pages = -(-(before + new) // PAGE) - first
        looks.append(Look(start=start, stop=start + new, position=before, first=first * PAGE, pages=ids[at : at + pages]))
        start, at = start + new, at + pages
    singles = sum(new == 1 for new in lengths)
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    sight = Sight(page_tokens=PAGE, window=window, first_seen=0, device="cuda", dtype=BF16)
    together = [range(singles)] if singles else []
    return Paging(looks, sight, page_N=none, row_N=none, num_singles=singles, together=lambda: together)


def rows_of(kept: RowFormat, channels: int, pages: int, page_rows: int = PAGE) -> Rows:
    """One layer of several. All pages hold the same few rows, which no kernel minds."""
    some = torch.randn(page_rows, channels, device="cuda")
    stored = kept.encode(some) if kept is not PLAIN else some.to(BF16)
    return Rows(stored.expand(pages, LAYERS, *stored.shape).contiguous()[:, 1], kept, BF16)


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[[Kernels], Any]
    size_bytes: float  # of what is read at least


def latents(fast: Kernels, paging: Paging, pages: int) -> Iterator[Case]:
    tokens, seen = paging.looks[-1].stop, sum(look.end for look in paging.looks)
    picks = tokens * min(PICKED, max(look.end for look in paging.looks))
    query, asked = (torch.randn(tokens, *shape, device="cuda").to(BF16) for shape in ((128, 576), (64, 128)))
    weight, more = torch.randn(tokens, 64, device="cuda"), {"rank": 512, "scale": 0.05}
    for name, kept, key in (("bf16", PLAIN, PLAIN), ("fp8", Tiled(width=512, exact=64), Tiled(width=128))):
        rows, keys = rows_of(kept, 576, pages), rows_of(key, 128, pages)
        picked = fast.select(asked, weight, keys, paging, count=PICKED)
        yield Case(f"latents {name}", lambda k, r=rows: k.attend_latent(query, r, paging, **more), seen * row_bytes(rows))
        yield Case(
            f"index {name}", lambda k, r=keys: k.select(asked, weight, r, paging, count=PICKED), seen * row_bytes(keys)
        )  # fmt: skip
        yield Case(
            f"picked {name}",
            lambda k, r=rows, p=picked: k.attend_selected(query, r, paging, p, **more),
            picks * row_bytes(rows),
        )


def entries(paging: Paging, pages: int) -> Iterator[Case]:
    tokens = paging.looks[-1].stop
    query, sinks = torch.randn(tokens, 64, 512, device="cuda").to(BF16), torch.randn(64, device="cuda")
    groups: Any = SimpleNamespace(seen=tuple(seen_by(paging, part, pages) for part in paging.parts))
    for name, kept, key in (("bf16", PLAIN, PLAIN), ("fp8", Powers(width=448, exact=64), Tiled(width=128))):
        rows, keys, far = rows_of(kept, 512, pages), rows_of(key, 128, pages, 16), rows_of(kept, 512, pages, 16)
        asked, weight = torch.randn(tokens, 64, 128, device="cuda").to(BF16), torch.randn(tokens, 64, device="cuda")
        index = Index(query_NID=asked, weight_NI=weight, keys=keys, count=512)
        for kind, beside, count in (("window", None, 128), ("C4", Entries(groups=groups, rows=far, index=index), 640)):
            yield Case(
                f"V4 {kind} {name}",
                lambda k, r=rows, b=beside: k.attend_shared(query, r, paging, b, scale=0.05, sinks_H=sinks),
                tokens * count * row_bytes(rows),
            )


def seen_by(paging: Paging, part: Singles | Run, pages: int) -> Seen:
    """An entry for every 4 tokens, 16 in a page."""
    looks = [look for look in paging.looks if part.start <= look.start < part.stop]
    table_SP = torch.randint(pages, (len(looks), max(-(-(look.end // 4) // 16) for look in looks)), device="cuda")
    count_ST = torch.tensor([[(at + 1) // 4 for at in range(look.position, look.end)] for look in looks], device="cuda")
    return Seen(start=part.start, stop=part.stop, table_SP=table_SP, rows=16, count_ST=count_ST)


def row_bytes(rows: Rows) -> int:
    return rows.stored_PRE.shape[2] * rows.stored_PRE.element_size()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--batch", type=int, default=32)
    asked.add_argument("--context", type=int, default=16384)
    settings = asked.parse_args()
    fast = choose_kernels("auto", "cuda", BF16)
    print(f"{'what':<28}{'torch ms':>10}{'kernels ms':>12}{'limit ms':>10}")
    for title, contexts, lengths in (
        ("decode", [settings.context] * settings.batch, [1] * settings.batch),
        ("prefill", [settings.context], [1024]),
    ):
        pages = sum(-(-(before + new) // PAGE) for before, new in zip(contexts, lengths, strict=True))
        ids = np.random.default_rng(0).permutation(pages).astype(np.int32)
        whole, window = (paging_of(contexts, lengths, each, ids) for each in (None, 128))
        for case in (*latents(fast, whole, pages), *entries(window, pages)):
            plain, kernels = measured(partial(case.call, TORCH), 5), measured(partial(case.call, fast))
            line = f"{title + ' ' + case.name:<28}{plain:>10.3f}{kernels:>12.3f}{case.size_bytes / BYTES_PER_MS:>10.3f}"
            print(line, flush=True)
    print(fast.report.lines())


if __name__ == "__main__":
    main()
