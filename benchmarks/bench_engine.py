"""The engine with a real small model: warm against cold, what the cache costs, and decoding beside transformers, in one run.

    make bench-engine        install the weights, measure, print the tables, write bench-engine.json (about 10 minutes)

First token: a prompt of real text, computed, then resumed from the device, from the host (the device emptied), and from the disk
(both memories emptied; values verified). Cost: prompts that share nothing, all tiers on, against requests that use no cache on an
engine that has none; in turns. Decoding: steps a second at batch 8 against `generate` of transformers on the same weights, from
the difference of a long and a short answer; and how many there would be if a step were nothing but its products with weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.texts import prompt_of
from engine.timing import TIERS, answer_time, decode_times, first_token_times
from report import machine

ROOT = Path(__file__).parents[1]
GOAL_WARM, GOAL_COST, GOAL_DECODE = 5.0, 1.03, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model",
        default="gemma-3-270m",
        help="a checkpoint by path or name, random-llama-1b or random-gemma-1b (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="prompt tokens (default: 2048 8192)")
    parser.add_argument("--rounds", type=int, default=3, help="of everything but the longest cold prompts (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together (default: %(default)s)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["first", "cost", "decode"], help="parts to leave out")
    args = parser.parse_args()
    console = Console(width=100)
    results: dict[str, Any] = {"model": args.model, "device": args.device, "machine": machine(args.device)}
    started = time.monotonic()
    with TemporaryDirectory(dir=os.environ.get("TMPDIR"), prefix="bench-engine-") as directory:
        parts: dict[str, Callable[[], Any]] = {
            "first": lambda: first_tokens(console, args, Path(directory)),
            "cost": lambda: cost(console, args, Path(directory)),
            "decode": lambda: decoding(console, args),
        }
        for name, part in parts.items():
            if name not in args.skip:
                results[name] = part()
                gc.collect()
    (ROOT / "bench-engine.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to bench-engine.json")


def first_tokens(console: Console, args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    table = Table(title=f"{args.model}: seconds to the first token", title_justify="left")
    for head in ("prompt", "computed", *(f"from the {tier}" for tier in TIERS), *(f"x, {tier}" for tier in TIERS)):
        table.add_column(head, justify="right")
    rows = []
    for length in args.lengths:
        console.print(f"first token of {length:,} tokens ...")
        times = first_token_times(
            args.model, args.device, prompt_of(args.model, length), directory / str(length), rounds=args.rounds
        )
        ratios = {tier: times["cold"] / times[tier] for tier in TIERS}
        rows.append({"prompt": length, "seconds": times, "times_as_fast": ratios})
        table.add_row(
            f"{length:,}",
            f"{times['cold']:.2f}",
            *(f"{times[tier]:.3f}" for tier in TIERS),
            *(f"{ratios[tier]:.1f}" for tier in TIERS),
        )
    console.print(table)
    for tier in ("host", "disk"):
        _judge(
            console, f"first token of {rows[-1]['prompt']:,} tokens from the {tier}", rows[-1]["times_as_fast"][tier], GOAL_WARM
        )
    return rows


def cost(console: Console, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    console.print("cost of having the cache ...")
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for each in range(args.rounds + 1):
        for kind, times in seconds.items():
            took = answer_time(args.model, args.device, caching=kind == "on", directory=directory / f"cost-{each}", seed=each)
            if each:  # the first round only warms up
                times.append(took)
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    ratio = statistics.median(ratios)
    table = Table(title="No reuse at all: seconds for the same work", title_justify="left")
    for head in ("caching off", "all tiers on", "ratio", "of each round"):
        table.add_column(head, justify="right")
    table.add_row(f"{medians['off']:.2f}", f"{medians['on']:.2f}", f"{ratio:.3f}", " ".join(f"{each:.3f}" for each in ratios))
    console.print(table)
    _judge(console, "cost of the cache without reuse", ratio, GOAL_COST, most=True)
    return {"seconds": seconds, "ratio": ratio}


def decoding(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    console.print(f"decoding, batch {args.batch} ...")
    times = decode_times(args.model, args.device, batch=args.batch, rounds=args.rounds)
    rates = {name: 1 / statistics.median(each) for name, each in times.items()}
    table = Table(title=f"{args.model}: decode steps a second, batch {args.batch}", title_justify="left")
    for name in rates:
        table.add_column(name, justify="right")
    table.add_column("x", justify="right")
    ratio = rates["stepwell"] / rates["transformers"]
    table.add_row(*(f"{rate:.2f}" for rate in rates.values()), f"{ratio:.2f}")
    console.print(table)
    console.print(
        f"with products as fast as torch's and nothing else to do: x {rates['products alone'] / rates['transformers']:.2f}"
    )
    _judge(console, f"decoding at batch {args.batch} against transformers", ratio, GOAL_DECODE)
    return {"steps_per_second": rates, "ratio": ratio}


def _judge(console: Console, what: str, value: float, goal: float, *, most: bool = False) -> None:
    met = value <= goal if most else value >= goal
    console.print(f"{'met    ' if met else 'MISSED '} {what}: {value:.2f} (goal: {'at most' if most else 'at least'} {goal:g})")


if __name__ == "__main__":
    sys.exit(main())
