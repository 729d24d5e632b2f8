"""A question set played cold, and again by another process on the store the first one left: same answers, and how much sooner.

    make bench-restart       about 3 minutes; prints the tables, writes bench-restart.json

The model is shaped like DeepSeek-V3.2 in small (latents, an index that selects, experts), of random weights. Questions of a
subject share their worked examples, so the cold run reuses those too; what the second saves is everything but the last page of
each prompt. Stores: the log on a disk, and Mooncake over TCP in a private network, with its memory in a process of its own.

Then bytes: a prompt of DeepSeek-V4-Flash's shape in fp8 goes through a cache to a log, and what its values take there is counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from restart.lives import LIMIT_S, live
from restart.model import save_model
from restart.stored import GOAL_BYTES, stored_bytes
from stepwell.cli.demo_cluster.private_network import inside, why_not

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--subjects", type=int, default=6, help="with worked examples of their own (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=4, help="a subject (default: %(default)s)")
    parser.add_argument("--shots", type=int, default=8, help="worked examples a subject (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["log", "mooncake", "bytes"], help="parts to leave out")
    args = parser.parse_args()
    console, started = Console(width=130), time.monotonic()
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="bench-restart-") as directory:
        order = {name: vars(args)[name] for name in ("device", "subjects", "questions", "shots", "answer")}
        order |= {"model": f"{directory}/model"}
        save_model(Path(order["model"]))
        for store in ("log", "mooncake"):
            if store not in args.skip:
                console.print(f"{store}: cold, then again after a restart ...")
                results[store] = _lives(console, store, order, directory)
        if any(results.values()):
            console.print(_table(results))
            some = next(runs[0] for runs in results.values() if runs)
            console.print(
                f"bytes per token: {some['bytes_per_token']:,.0f} in the arena, {some['spec_bytes_per_token']:,.0f} by the spec"
            )
        if "bytes" not in args.skip:
            results["bytes"] = _bytes(console, Path(directory))
    (ROOT / "bench-restart.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to bench-restart.json")


def _lives(console: Console, store: str, order: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    if store == "log":
        order = order | {"store": f"log:{directory}/log", "options": {"budget": "2GiB"}}
        return [live(order), live(order)]
    if why_not():
        console.print(f"  left out: {why_not()}")
        return []
    script = Path(__file__).with_name("restart") / "in_mooncake.py"
    command = inside([sys.executable, str(script), json.dumps(order)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(said) != 2:
        raise RuntimeError(f"the run in a private network ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return said


def _table(results: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title="A question set, cold and after a restart", title_justify="left")
    heads = ("store", "run", "prompt tokens", "computed", "memory", "store", "seconds", "tokens/s", "first token", "x", "answers")
    for head in heads:
        table.add_column(head, justify="left" if head in ("run", "answers") else "right")
    for store, runs in results.items():
        for run, name in zip(runs, ("cold", "restarted"), strict=False):
            cold, sources = runs[0], run["sources"]
            table.add_row(
                store, name, f"{run['prompt_tokens']:,}", f"{sources['computed']:,}", f"{sources['device'] + sources['host']:,}",
                f"{sources['store']:,}", f"{run['seconds']:.2f}", f"{run['prompt_tokens'] / run['seconds']:,.0f}",
                f"{run['first_token_s']:.2f} s", f"{cold['seconds'] / run['seconds']:.1f}",
                "-" if run is cold else "the same" if run["answers"] == cold["answers"] else "DIFFERENT",
            )  # fmt: skip
    return table


def _bytes(console: Console, directory: Path) -> list[dict[str, Any]]:
    console.print("bytes of a long prompt of DeepSeek-V4-Flash's shape ...")
    table = Table(title="DeepSeek-V4-Flash in fp8, a checkpoint every 8,192 tokens", title_justify="left")
    for head in (
        "layers",
        "tokens",
        "B/token, arena",
        "B/token, spec",
        "checkpoint, arena",
        "checkpoint, spec",
        "GB stored per M",
    ):
        table.add_column(head, justify="right")
    rows = stored_bytes(directory)
    for row in rows:
        table.add_row(
            row["layers"], f"{row['tokens']:,}", f"{row['bytes_per_token']:,.1f}", f"{row['spec_bytes_per_token']:,.1f}",
            f"{row['checkpoint_bytes']:,}", f"{row['spec_checkpoint_bytes']:,}", f"{row['stored_per_million'] / 1e9:.2f}",
        )  # fmt: skip
    console.print(table)
    for row in rows:
        met = row["stored_per_million"] <= GOAL_BYTES
        console.print(f"{'met    ' if met else 'MISSED '} {row['layers']}: {row['stored_per_million'] / 1e9:.2f} GB stored per "
                      f"million tokens (goal: at most {GOAL_BYTES / 1e9:g})")  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
