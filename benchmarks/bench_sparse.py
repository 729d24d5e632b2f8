"""Sparse decode in a server: tokens a second and the largest batch, with all rows on the device and with some on the host alone.

    make bench-sparse        on a machine with CUDA, about two minutes; prints tables, writes bench-sparse.json

DeepSeek-V3.2's widths with a few layers, a few experts and random weights; rows of 656 bytes, 2,048 of them selected. Both have
the same cap of device memory: what 60 GB would be for all 61 layers. Contexts are not computed: pages of random rows are put into
each cache. Selections are those of a trace, while the index is scored all the same (`sparse/traced.py`). Everything else is what
a server does (`sparse/served.py`). `--tiny` runs the script on a small model, anywhere.

    largest    requests that run at once when no more are admitted, each with its context and what it has answered so far
    missing    rows that were selected and neither in a page of the device nor hot
    fetch      time of the kernels that copy them over the bus, by a profile of some steps after those that are timed
    kernels    the twelve that took longest in a step, of every case, by the same profile

Both engines hold weights of their own, which no cap counts. Fixed sizes, such as a scratch for the longest prompt's rows of one
layer, weigh ten times as much in 6 layers as in 61.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from gpu.shapes import make
from report import ROOT, Goal, Row, goals_of, kernels_of, machine, table_of, write
from sparse.served import TINY, Measured, Served, Sizes, Unsteady
from sparse.traced import Traces, traces

MODEL = "deepseek-v3.2-shaped"
FULL, HIERARCHICAL = "all on the device", "some on the host"
BATCHES_GOAL, BATCHES_AT, SPEED_GOAL, LOSS_GOAL = 4.5, 64 << 10, 3.0, 0.02


def measure(sizes: Sizes, device: str, say: Callable[[str], None]) -> Iterator[Row]:
    """Figures of both engines for each context and batch, and goals."""
    made, engines = make(MODEL, device, tiny=sizes.tiny), dict[str, Served]()
    with ThreadPoolExecutor() as pool, ExitStack() as opened:
        count = made.config.index_topk
        followed = {
            context: pool.submit(traces, sizes.latent, context=context, steps=sizes.trace, count=count)
            for context in sizes.contexts
        }
        for name in (FULL, HIERARCHICAL):
            began = time.monotonic()
            engines[name] = Served(made, sizes, device, spills=name is HIERARCHICAL)
            opened.callback(engines[name].engine.close)
            say(f"{name}: made in {time.monotonic() - began:.1f} s")
        del made
        for context in sizes.contexts:
            yield from _guarded(context, partial(_context, engines, sizes, context, followed[context].result(), say))
        for name, served in engines.items():
            failed = [f"{what}: {by}" for what, by in served.engine.kernels.items() if "failed" in by]
            if failed:
                yield Row(what=f"kernels, {name}", note="; ".join(failed))


def _guarded(context: int, measure: Callable[[], list[Row]]) -> list[Row]:
    """A context that fails does not end the others."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return [Row(what=_what(context), note=f"failed: {type(error).__name__}: {error}"[:300])]


def _context(engines: dict[str, Served], sizes: Sizes, context: int, followed: Traces, say: Callable[[str], None]) -> list[Row]:
    began = time.monotonic()
    for served in engines.values():
        served.put(context, followed)
    say(f"{_what(context)}: contexts put in place in {time.monotonic() - began:.1f} s")
    found: dict[str, dict[int | None, Measured]] = {name: {} for name in engines}
    rows = []
    for batch in (*sizes.batches, None):  # engines take turns, so that both are measured under alike conditions
        for name, served in engines.items():
            what = f"{_what(context)}, {name}, {'largest' if batch is None else batch}"
            try:
                measured = found[name][batch] = served.run(batch)
            except Unsteady as error:
                rows.append(Row(what=what, note=str(error)[:200]))
                continue
            note = "all that were asked for" if measured.batch == served.asked[context] else ""
            rows.append(Row(what=what, figures=measured.figures(served.count), note=note, kernels=measured.longest))
            say(f"{what}: {measured.batch} requests, {measured.step_s * 1e3:.2f} ms a step, {measured.speed:,.0f} tokens/s")
    return rows + ([] if sizes.tiny else list(_goals(context, found[FULL], found[HIERARCHICAL])))


def _goals(context: int, full: dict[int | None, Measured], other: dict[int | None, Measured]) -> Iterator[Row]:
    for batch in (batch for batch in full if batch is not None and batch in other):
        loss = 1 - other[batch].speed / full[batch].speed
        yield Row(what=f"{_what(context)}, loss at batch {batch}", goal=Goal(value=loss, limit=LOSS_GOAL, most=True))
    if None not in full or None not in other:
        return
    largest = other[None]
    batches, speed = largest.batch / full[None].batch, largest.speed / full[None].speed
    goal = Goal(value=batches, limit=BATCHES_GOAL) if context == BATCHES_AT else None
    yield Row(what=f"{_what(context)}, times the batch", figures={"times": batches}, goal=goal)
    yield Row(what=f"{_what(context)}, times the tokens/s", figures={"times": speed}, goal=Goal(value=speed, limit=SPEED_GOAL))


def _what(context: int) -> str:
    return f"{context >> 10}K" if context >= 1024 else f"{context} tokens"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model in plain torch, also without CUDA")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-sparse.json", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    console, began_s = Console(width=None if os.isatty(1) else 200), time.monotonic()
    if not args.tiny and not torch.cuda.is_available():
        console.print("bench-sparse: no CUDA here, nothing was measured (--tiny runs the script on a small model)")
        return 0
    device = "cpu" if args.tiny else "cuda"
    rows = list(measure(TINY if args.tiny else Sizes(), device, lambda text: console.print(f"  {text}", highlight=False)))
    console.print(table_of("Sparse decode in a server", [row for row in rows if row.figures or row.note]))
    if (kernels := kernels_of(rows)) is not None:
        console.print(kernels)
    console.print(goals_of({"serving": rows}))
    parts = {"serving": [row.as_json() for row in rows]}
    write(args.json, {"machine": machine(device), "tiny": args.tiny, "parts": parts})
    console.print(f"{time.monotonic() - began_s:.0f} s; written to {args.json.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
