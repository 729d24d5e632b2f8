"""What the host does between two passes of prompts, with and without tiers, beside a device that is only played. No GPU needed.

    make bench-passes        print the table, write bench-passes.json (about a minute)

The device takes a fixed time for a pass of 8,192 tokens and computes nothing (`engine/device_queue.py`); pages have as many
tokens as in practice and few bytes. So what is measured is Python's share: admission, plans, the numbers of a pass, commits and
plans of saves, beside the threads that copy and store. `waited` is how long the device had nothing queued after a pass with
prompts, `host` how long the engine's thread computed for each pass (its CPU time). Prompts share nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.device_queue import FakeDevice, Watched
from engine.driving import run, settle
from engine.machine import machine
from engine.models import held
from gpu.shapes import LLAMA, make
from stepwell.engine import Ask, Engine, EngineConfig, Limits, Sampling, build_engine

ROOT = Path(__file__).parents[1]
CHUNK, PAGE, ANSWER = 8192, 64, 8
CASES = {"8 x 4,096": (8, 4096), "2 x 32,768": (2, 32_768)}
TIERS = ("none", "host", "host and log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Medians over rounds, for each pass with prompts."""

    prompts: str
    tiers: str
    passes: int
    queued_before_read: int
    waited_ms: float
    host_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each case (default: %(default)s)")
    parser.add_argument("--pass-ms", type=float, default=100, help="that a pass with prompts takes (default: %(default)s)")
    args = parser.parse_args()
    found = []
    with TemporaryDirectory(dir=os.environ.get("TMPDIR"), prefix="bench-passes-") as directory:
        for tiers in TIERS:
            found += list(measure(tiers, Path(directory), rounds=args.rounds, pass_s=args.pass_ms / 1e3))
    Console(width=100).print(_table(found))
    results: dict[str, Any] = {"machine": machine("cpu"), "pass_ms": args.pass_ms, "rows": [asdict(each) for each in found]}
    (ROOT / "bench-passes.json").write_text(json.dumps(results, indent=1) + "\n")


def measure(tiers: str, directory: Path, *, rounds: int, pass_s: float) -> Iterator[Found]:
    random = np.random.default_rng(1)
    with _engine(tiers, directory) as engine:
        FakeDevice(engine, pass_s=pass_s, step_s=pass_s / 20)
        watched = Watched.over(engine)
        for name, (count, length) in CASES.items():
            each = [_round(engine, watched, random.integers(0, engine.vocab_size, (count, length))) for _ in range(rounds + 1)]
            passes, early, waited_ms, host_ms = (statistics.median(column) for column in zip(*each[1:], strict=True))
            yield Found(
                prompts=name, tiers=tiers, passes=int(passes), queued_before_read=int(early), waited_ms=waited_ms, host_ms=host_ms
            )


def _engine(tiers: str, directory: Path) -> Engine:
    store = {"store": f"log:{directory}", "store_options": {"budget": "4GiB"}} if tiers == "host and log" else {}
    return build_engine(
        held(LLAMA, make(LLAMA, "cpu", tiny=True).model),
        EngineConfig(
            device="cpu", page_tokens=PAGE, device_memory="512MiB", host_memory=0 if tiers == "none" else "512MiB",
            limits=Limits(max_running=64, chunk_tokens=CHUNK), **store,
        ),
    )  # fmt: skip


def _round(engine: Engine, watched: Watched, prompts: Any) -> tuple[int, int, float, float]:
    """Passes with prompts, how many of them were followed in time, and milliseconds for each: the device's, and the host's."""
    asks = [Ask(tokens=each, sampling=Sampling(max_tokens=ANSWER, ignore_eos=True)) for each in prompts.tolist()]
    settle(engine)
    watched.forget()
    began_s = time.thread_time()
    run(engine, asks)
    host_s, waits = time.thread_time() - began_s, watched.waits()
    return waits.passes, waits.queued_before_read, waits.waited_s * 1e3 / waits.passes, host_s * 1e3 / len(watched.passes)


def _table(found: list[Found]) -> Table:
    table = Table(title=f"between passes of {CHUNK:,} tokens of prompts", title_justify="left")
    for head in ("prompts", "tiers", "passes with prompts", "followed before read", "waited, ms a pass", "host, ms a pass"):
        table.add_column(head, justify="left" if head in ("prompts", "tiers") else "right")
    for each in found:
        table.add_row(
            each.prompts,
            each.tiers,
            str(each.passes),
            str(each.queued_before_read),
            f"{each.waited_ms:.2f}",
            f"{each.host_ms:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
