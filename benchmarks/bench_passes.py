"""What the host does between two passes of prompts, with and without tiers, beside a device that is only played. No GPU needed.

    make bench-passes        print the table, write bench-passes.json (about two minutes)

The device takes a fixed time for a pass of 8,192 tokens and computes nothing (`engine/device_queue.py`); pages have as many
tokens as in practice and few bytes. So what is measured is Python's share: admission, plans, the numbers of a pass, commits and
plans of saves, beside the threads that copy and store. `waited` is how long the device had nothing queued after a pass with
prompts, `host` how long the engine's thread computed for each pass (its CPU time). Prompts share nothing.

A second table has decode steps of a model with point state, of which answers leave checkpoints: copied by their passes, or by the
cache while their requests wait.
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
from stepwell.base.config import PlacementConfig
from stepwell.engine import Ask, Engine, EngineConfig, Limits, Sampling, build_engine

ROOT = Path(__file__).parents[1]
CHUNK, PAGE, ANSWER = 8192, 64, 8
CASES = {"8 x 4,096": (8, 4096), "2 x 32,768": (2, 32_768)}
TIERS = ("none", "host", "host and log")
RECURRENT, ANSWERED, STEP_S = "qwen3-next-shaped", 300, 0.02
STOPS = ((0, True), (256, False), (PAGE, False), (PAGE, True))  # tokens between checkpoints, and whether passes copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Medians over rounds, for each pass with prompts."""

    prompts: str
    tiers: str
    passes: int
    queued_before_read: int
    waited_ms: float
    host_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Decode steps, how many of them were queued before the one before was read, and how long the device waited for each."""

    requests: int
    interval_tokens: int
    passes_copy: bool
    steps: int
    queued_before_read: int
    waited_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each case (default: %(default)s)")
    parser.add_argument("--pass-ms", type=float, default=100, help="that a pass with prompts takes (default: %(default)s)")
    args = parser.parse_args()
    found = []
    with TemporaryDirectory(dir=os.environ.get("TMPDIR"), prefix="bench-passes-") as directory:
        for tiers in TIERS:
            found += list(measure(tiers, Path(directory), rounds=args.rounds, pass_s=args.pass_ms / 1e3))
    answered = [_answer(requests, *stops) for requests in (8, 32) for stops in STOPS]
    console = Console(width=100)
    console.print(_table(found))
    console.print(_answers_table(answered))
    results: dict[str, Any] = {
        "machine": machine("cpu"), "pass_ms": args.pass_ms, "rows": [asdict(each) for each in found],
        "answers": [asdict(each) for each in answered],
    }  # fmt: skip
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


def _answer(requests: int, interval_tokens: int, passes_copy: bool) -> Answered:
    """Answers to short prompts of unlike lengths, all at once."""
    config = EngineConfig(
        device="cpu", page_tokens=PAGE, device_memory="512MiB", host_memory=0, limits=Limits(max_running=64, chunk_tokens=CHUNK),
        placement=PlacementConfig(decode_interval_tokens=interval_tokens),
    )  # fmt: skip
    random = np.random.default_rng(1)
    with build_engine(held(RECURRENT, make(RECURRENT, "cpu", tiny=True).model), config) as engine:
        if not passes_copy:
            engine.cache.copy_point = lambda lease, upto: None  # type: ignore[method-assign]
        FakeDevice(engine, pass_s=5 * STEP_S, step_s=STEP_S)
        watched = Watched.over(engine)
        prompts = [random.integers(0, engine.vocab_size, 100 + 7 * at).tolist() for at in range(requests)]
        run(engine, [Ask(tokens=each, sampling=Sampling(max_tokens=ANSWERED, ignore_eos=True)) for each in prompts])
    pairs = [(one, other) for one, other in zip(watched.passes, watched.passes[1:], strict=False) if not one.prompts]
    return Answered(
        requests=requests, interval_tokens=interval_tokens, passes_copy=passes_copy, steps=len(pairs),
        queued_before_read=sum(other.queued_s < one.read_s for one, other in pairs),
        waited_ms=sum(max(other.queued_s - one.read_s, 0.0) for one, other in pairs) * 1e3 / len(pairs),
    )  # fmt: skip


def _answers_table(found: list[Answered]) -> Table:
    table = Table(title=f"decode steps of {RECURRENT}, answers of {ANSWERED} tokens", title_justify="left")
    for head in ("requests", "checkpoint every", "state copied by", "steps", "followed before read", "waited, ms a step"):
        table.add_column(head, justify="right" if head != "state copied by" else "left")
    for each in found:
        copied_by = ("the pass" if each.passes_copy else "the cache") if each.interval_tokens else ""
        table.add_row(
            str(each.requests), str(each.interval_tokens or "none"), copied_by, str(each.steps), str(each.queued_before_read),
            f"{each.waited_ms:.2f}",
        )  # fmt: skip
    return table


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
