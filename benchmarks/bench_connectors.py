"""Prompts resumed under other engines, by a process that did not compute them, beside computing them again.

    make bench-connectors       about 40 minutes on 2 cores; prints tables, writes bench-connectors.json

Random weights in the shapes of three families. Transformers: "alone" is the model without a prompt cache, "torch.load" what
people do without one: the whole cache object in a file, unverified, for this very prompt. Bits are those of the first process.
vLLM and SGLang: beside the engine alone and beside its own offloading to files, where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from connectors import engine_rows

ROOT = Path(__file__).parents[1]
LIFE = Path(__file__).with_name("connectors") / "transformers_life.py"
FAMILIES = ("llama", "gemma3", "falcon_h1")
ENGINES = ("transformers", *engine_rows.ENGINES)
LIMIT_S = 1800
HEADS = ("model", "tokens", "MiB", "alone", "first, saved too", "from host", "from disk", "x", "torch.load", "bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192], help="lengths of prompts (default: %(default)s)")
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES, help="(default: all)")
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES, help="(default: all; on CUDA the first)")
    parser.add_argument("--prompts", type=int, default=3, help="of each length under vLLM and SGLang (default: %(default)s)")
    args = parser.parse_args()
    console, started = Console(width=150), time.monotonic()
    found: dict[str, Any] = {"machine": _machine(args.device)}
    for name in args.engines if args.device == "cpu" else [each for each in args.engines if each == "transformers"]:
        measure = _transformers if name == "transformers" else partial(_engine, engine_rows.ENGINES[name])
        found[name] = measure(console, args)
    found["machine"]["load_after"] = os.getloadavg()
    (ROOT / "bench-connectors.json").write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to bench-connectors.json")


def _machine(device: str) -> dict[str, Any]:
    """Loads tell whether others used the machine too."""
    known = {"machine": platform.machine(), "python": platform.python_version(), "cores": os.cpu_count()}
    return {"device": device, **known, "load_before": os.getloadavg()}


def _transformers(console: Console, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for family in args.families:
        for tokens in args.tokens:
            console.print(f"Transformers, {family}, {tokens:,} tokens: cold, then again by another process ...")
            rows.append({"family": family, "tokens": tokens, **_lives(family, args.device, tokens)})
    console.print(_table(rows))
    return rows


def _engine(engine: engine_rows.Engine, console: Console, args: argparse.Namespace) -> list[dict[str, Any]]:
    if not engine.python.exists():
        console.print(f"{engine.name} is not installed in {engine.venv}, and left out: `{engine.install}` installs it")
        return []
    rows = []
    for family in [each for each in engine.families if each in args.families]:
        for tokens in args.tokens:
            console.print(f"{engine.name}, {family}, {tokens:,} tokens: {engine.num_lives} engines, one after the other ...")
            rows.append(engine_rows.row(engine, family, tokens, args.prompts))
            console.print(engine_rows.table(engine, rows[-1]))
    return rows


def _lives(family: str, device: str, tokens: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="bench-connectors-") as directory:
        order = json.dumps({"family": family, "device": device, "tokens": tokens, "directory": directory})
        return {"cold": _life(order), "resumed": _life(order)}


def _life(order: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(LIFE), order], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{order} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="A prompt under Transformers, seconds", title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("model", "bits") else "right")
    for row in rows:
        cold, resumed = row["cold"], row["resumed"]
        same = cold["digest"] == resumed["digest"] and resumed["cached"] == cold["cached_in_memory"] > 0
        seconds = [f"{cold['alone_s']:.2f}", f"{cold['first_s']:.2f}", f"{cold['host_s']:.3f}", f"{resumed['first_s']:.3f}"]
        sooner = f"{cold['alone_s'] / resumed['first_s']:.0f}"
        size = f"{cold['bytes'] / 2**20:.1f}"
        bits = "the same" if same else "DIFFERENT"
        table.add_row(row["family"], f"{row['tokens']:,}", size, *seconds, sooner, f"{resumed['peer_s']:.3f}", bits)
    return table


if __name__ == "__main__":
    main()
