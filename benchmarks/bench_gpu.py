"""The engine on a GPU, compared with the hardware and transformers in one run: a table for each part, and one of all goals.

    make bench-gpu           about 10 minutes on an H200, after `make build-kernels`; writes bench-gpu.json and .txt

Random weights of well-known shapes, made on the GPU. Each part stops when its time is over and reports what it left out.
`--tiny` runs every part on small models, anywhere: it shows that the script works, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from gpu import copies, cost, decode, disk, full_device, guided, host, hybrids, prefill, sampling
from gpu.bench import Bench, Budget
from report import ROOT, Row, goals_of, kernels_of, machine, table_of, write

WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    title: str
    seconds: float  # after which nothing more is begun
    measure: Callable[[Bench], list[Row]]


PARTS = {
    "prefill": Part(title="Prompts computed, compared with transformers with sdpa", seconds=140, measure=prefill.measure),
    "decode": Part(title="Decode steps, compared with memory bandwidth", seconds=110, measure=decode.measure),
    "hybrids": Part(title="Decode steps of hybrid and sparse models", seconds=200, measure=hybrids.measure),
    "sampling": Part(title="Tokens chosen from logits", seconds=20, measure=sampling.measure),
    "guided": Part(title="Constrained decoding", seconds=40, measure=guided.measure),
    "copies": Part(title="Page copies, compared with the bus", seconds=40, measure=copies.measure_copies),
    "traffic": Part(title="Passes while pages are copied both ways", seconds=20, measure=copies.measure_passes),
    "host": Part(title="First token from the host", seconds=80, measure=host.measure),
    "hidden": Part(title="Load behind new tokens", seconds=25, measure=host.measure_hidden),
    "disk": Part(title="First token from the disk", seconds=35, measure=disk.measure),
    "full": Part(title="First token on a full device", seconds=60, measure=full_device.measure),
    "cost": Part(title="The cost of tiers without reuse", seconds=30, measure=cost.measure),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console(width=WIDTH)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("stepwell.store").setLevel(logging.INFO)  # how a log reads its disk
    if not args.tiny and not torch.cuda.is_available():
        console.print("bench-gpu: no CUDA here, nothing was measured (--tiny runs the script on small models)")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    with TemporaryDirectory(dir=args.dir, prefix="bench-gpu-") as directory:
        bench = Bench(device=device, tiny=args.tiny, directory=Path(directory), console=console)
        for name in args.only:
            began = time.monotonic()
            found[name] = _measured(bench, name)
            seconds[name] = time.monotonic() - began
            _show(console, name, found[name], seconds[name])
            _write(args, device, found, seconds)
    console.print("tiny: no figure means anything" if args.tiny else goals_of(found))
    console.print(f"{sum(seconds.values()):.0f} s; written to {args.json} and {args.json.with_suffix('.txt').name}")
    return 0


def _measured(bench: Bench, name: str) -> list[Row]:
    """A part's rows. One that fails says so, and the others go on."""
    bench.budget = Budget(PARTS[name].seconds)
    bench.console.print(f"{name}: {PARTS[name].title} ...")
    try:
        return bench.guarded(name, lambda: PARTS[name].measure(bench))
    finally:
        bench.clean()


def _show(console: Console, name: str, rows: list[Row], seconds: float) -> None:
    console.print(table_of(f"{PARTS[name].title} ({name}, {seconds:.0f} s)", rows))
    if (kernels := kernels_of(rows)) is not None:
        console.print(kernels)


def _write(args: argparse.Namespace, device: str, found: dict[str, list[Row]], seconds: dict[str, float]) -> None:
    """After each part. Parts of an earlier run that this one does not measure stay in the JSON."""
    before = json.loads(args.json.read_text()) if args.json.exists() else {}
    parts = before.get("parts", {})
    for name, rows in found.items():
        parts[name] = {"seconds": seconds[name], "rows": [row.as_json() for row in rows]}
    write(args.json, {"machine": {**machine(device), "packages": _packages()}, "tiny": args.tiny, "parts": parts})
    with args.json.with_suffix(".txt").open("w", encoding="utf-8") as file:
        console = Console(width=WIDTH, file=file)
        for name, rows in found.items():
            _show(console, name, rows, seconds[name])
        console.print("" if args.tiny else goals_of(found))


def _packages() -> dict[str, str]:
    """Those with kernels, and those that are compared."""
    found = {}
    for name in ("transformers", "triton", "flashinfer-python", "fla-core", "stepwell"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-gpu.json", help="results, added to (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models and lengths, also without a GPU")
    parser.add_argument("--dir", type=Path, help="on the disk to measure (default: the temporary directory)")
    args = parser.parse_args(argv)
    if unknown := sorted({*args.only} - PARTS.keys()):
        parser.error(f"unknown part(s) {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
