"""The engine on a GPU beside what the hardware and transformers do, in one run: a table for each part, and one of all goals.

    make bench-gpu           about 10 minutes on an H200, after `make build-kernels`; writes bench-gpu.json and .txt

Random weights of well-known shapes, made on the GPU. Each part stops when its time is over and says what it left out.
`--tiny` runs every part on small models, anywhere: it shows that the script works, and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpu import copies, cost, decode, disk, guided, host, hybrids, prefill, room, sampling
from gpu.bench import TINY_CHUNK, Bench, Budget
from report import Row, goals_of, kernels_of, machine, table_of

ROOT = Path(__file__).parents[1]
CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    title: str
    seconds: float  # after which nothing more is begun
    measure: Callable[[Bench], list[Row]]


PARTS = {
    "prefill": Part(title="Prompts computed, beside transformers with sdpa", seconds=140, measure=prefill.measure),
    "decode": Part(title="Decode steps, beside memory bandwidth", seconds=110, measure=decode.measure),
    "hybrids": Part(title="Decode steps of hybrid and sparse models", seconds=200, measure=hybrids.measure),
    "sampling": Part(title="Tokens chosen from logits", seconds=20, measure=sampling.measure),
    "guided": Part(title="Answers that follow a grammar", seconds=40, measure=guided.measure),
    "copies": Part(title="Page copies, compared with the bus", seconds=40, measure=copies.measure_copies),
    "traffic": Part(title="Passes while pages are copied both ways", seconds=20, measure=copies.measure_passes),
    "host": Part(title="First token from the host", seconds=80, measure=host.measure),
    "hidden": Part(title="Load behind new tokens", seconds=25, measure=host.measure_hidden),
    "disk": Part(title="First token from the disk", seconds=35, measure=disk.measure),
    "room": Part(title="First token on a full device", seconds=60, measure=room.measure),
    "cost": Part(title="What tiers cost without reuse", seconds=30, measure=cost.measure),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console(width=args.width)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("stepwell.store").setLevel(logging.INFO)  # how a log reads its disk
    if not args.tiny and not torch.cuda.is_available():
        console.print("bench-gpu: no CUDA here, nothing was measured (--tiny runs the script on small models)")
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    with TemporaryDirectory(dir=args.dir, prefix="bench-gpu-") as directory:
        chunk = TINY_CHUNK if args.tiny else args.chunk
        bench = Bench(device=device, tiny=args.tiny, directory=Path(directory), console=console,
                      chunk_tokens=chunk, kernels=args.kernels)  # fmt: skip
        for name in args.only:
            began = time.monotonic()
            found[name] = _measured(bench, name, PARTS[name].seconds * args.time)
            seconds[name] = time.monotonic() - began
            console.print(_table(name, found[name], seconds[name]))
            if (kernels := kernels_of(found[name])) is not None:
                console.print(kernels)
            _write(args, device, found, seconds)
            _write_tables(args, found, seconds)
    console.print("tiny: no figure means anything" if args.tiny else goals_of(found))
    console.print(f"{sum(seconds.values()):.0f} s; written to {args.json} and {args.json.with_suffix('.txt').name}")
    return 0


def _measured(bench: Bench, name: str, seconds: float) -> list[Row]:
    """A part's rows. One that fails says so, and the others go on."""
    bench.budget = Budget(seconds)
    bench.console.print(f"{name}: {PARTS[name].title} ...")
    try:
        return bench.guarded(name, lambda: PARTS[name].measure(bench))
    finally:
        bench.clean()


def _write(args: argparse.Namespace, device: str, found: dict[str, list[Row]], seconds: dict[str, float]) -> None:
    """After each part. Parts that an earlier run left in the file, and this one does not measure, stay."""
    described = {**machine(device), "memory": _memory(device), "packages": _packages()}
    results: dict[str, Any] = {"machine": described, "tiny": args.tiny, "kernels": args.kernels, "chunk_tokens": args.chunk}
    before = json.loads(args.json.read_text()) if args.json.exists() else {}
    parts = before.get("parts", {})
    for name, rows in found.items():
        parts[name] = {"seconds": seconds[name], "rows": [row.as_json() for row in rows]}
    args.json.write_text(json.dumps(results | {"parts": parts}, indent=1) + "\n")


def _table(name: str, rows: list[Row], seconds: float) -> Table:
    return table_of(f"{PARTS[name].title} ({name}, {seconds:.0f} s)", rows)


def _write_tables(args: argparse.Namespace, found: dict[str, list[Row]], seconds: dict[str, float]) -> None:
    """Of the parts of this run, beside the results."""
    with args.json.with_suffix(".txt").open("w", encoding="utf-8") as file:
        console = Console(width=args.width, file=file)
        for name, rows in found.items():
            console.print(_table(name, rows, seconds[name]))
        if not args.tiny:
            console.print(goals_of(found))


def _memory(device: str) -> dict[str, int]:
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"host_bytes": host_bytes, "device_bytes": torch.cuda.mem_get_info()[1] if device == "cuda" else 0}


def _packages() -> dict[str, str]:
    """Those that kernels come from, and what they are measured beside."""
    found = {}
    for name in ("transformers", "triton", "flashinfer-python", "fla-core", "stepwell"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-gpu.json", help="results, added to (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models and lengths, also without a GPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cuda where there is one; cpu is for --tiny")
    parser.add_argument("--time", type=float, default=1.0, help="so many times the seconds of each part (default: %(default)s)")
    parser.add_argument("--kernels", default="auto", help="auto, torch or flashinfer, where the engine has a choice")
    parser.add_argument("--chunk", type=int, default=CHUNK_TOKENS, help="tokens of a pass (default: %(default)s)")
    parser.add_argument("--dir", default=os.environ.get("TMPDIR"), help="on the disk that is measured (default: TMPDIR)")
    parser.add_argument("--width", type=int, default=160, help="of the tables (default: %(default)s)")
    args = parser.parse_args(argv)
    if unknown := sorted({*args.only} - PARTS.keys()):
        parser.error(f"unknown part(s) {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
