"""Prefix trees side by side: Stepwell beside SGLang's Rust and Python cores, on one machine in one run.

    make bench-tree-peer     install SGLang 0.5.23 into a venv of its own (once, about 3 GB)
    make bench-tree          measure, print the table, write bench-tree.json

Without the peer it measures Stepwell alone and says so. Every figure is in microseconds, from a process of its own: medians,
except Stepwell's single evictions, which are a mean, and full garbage collections, the longest of five. `x rust` says how many
times faster Stepwell is than SGLang's Rust core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent
PEER_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
COMPS = ("full", "window", "point")
OPERATIONS = ("lookup_us", "commit_new_us", "commit_known_us", "evict_page_us", "evict_many_us_per_page")
LONG = (65536, 262144)
MOST_PAUSE_MS = 20  # all threads stand still for it

Row = dict[str, Any]
Key = tuple[str, str, int, int]  # core, comps, nodes, length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process to run: one core, one kind of model, one size of tree."""

    core: str
    comps: str
    nodes: int

    def command(self, args: argparse.Namespace) -> list[str]:
        script = [sys.executable, str(HERE / "stepwell_tree.py")]
        if self.core != "stepwell":
            script = [str(PEER_PYTHON), str(HERE / "peers" / "sglang_tree.py"), "--core", self.core, "--json"]
        sizes = ["--nodes", str(self.nodes), "--lens", *map(str, args.lens), "--page", "64", "--reps", str(args.reps)]
        return [*script, "--comps", self.comps, *sizes]


def run(command: list[str]) -> list[Row]:
    """The JSON lines a benchmark process prints; what it says beside them is shown only when it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure(args: argparse.Namespace, cores: list[str]) -> dict[Key, Row]:
    jobs = [Job(core=core, comps=comps, nodes=nodes) for nodes in args.nodes for comps in COMPS for core in cores]
    rows: dict[Key, Row] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for job in jobs:
            name, start_s = f"{job.core}, {job.comps}, {job.nodes:,} nodes", time.monotonic()
            progress.update(task, description=name)
            for row in run(job.command(args)):
                rows[job.core, job.comps, job.nodes, row["length"]] = row
            progress.advance(task)
            progress.console.print(f"{name}: {time.monotonic() - start_s:.0f} s")
    return rows


def table(rows: dict[Key, Row], cores: list[str], args: argparse.Namespace) -> Table:
    out = Table(title="microseconds, page 64; lower is better")
    for column in ("model", "nodes", "tokens", "operation", *cores, "x rust", "x python"):
        out.add_column(column, justify="left" if column in ("model", "operation") else "right")
    for nodes in args.nodes:
        for comps in COMPS:
            for length in args.lens:
                for operation in OPERATIONS:
                    mine = rows["stepwell", comps, nodes, length][operation]
                    theirs = [rows[core, comps, nodes, length][operation] for core in cores[1:]]
                    cells = [f"{value:,.1f}" for value in (mine, *theirs)] + [f"{value / mine:.1f}" for value in theirs]
                    out.add_row(comps, f"{nodes:,}", f"{length:,}", operation.replace("_us", ""), *cells)
                out.add_section()
            pause_us = 1e3 * collection_ms(rows, comps, nodes, args)
            out.add_row(comps, f"{nodes:,}", "", "full garbage collection", f"{pause_us:,.0f}")
            out.add_section()
    return out


def collection_ms(rows: dict[Key, Row], comps: str, nodes: int, args: argparse.Namespace) -> float:
    """The longest full collection of Stepwell's process."""
    return max(rows["stepwell", comps, nodes, length]["collection_ms"] for length in args.lens)


def goals(rows: dict[Key, Row], args: argparse.Namespace) -> list[tuple[str, bool, str]]:
    """What we set out to reach, and by how much each goal was met or missed in its worst case."""
    few, many = min(args.nodes), max(args.nodes)
    found = []
    for operation in ("lookup_us", "commit_new_us", "commit_known_us"):
        for core, factor in (("rust", 1.0), ("python", 5.0)):
            ratios = [_ratio(rows, core, c, n, length, operation) for c in COMPS for n in args.nodes for length in LONG]
            worst = min(ratios)
            found.append(
                (f"{operation[:-3]} at 64K and 256K: {factor:g}x the {core} core", worst >= factor, f"worst {worst:.1f}x")
            )
    ratios = [_ratio(rows, "rust", c, many, length, "evict_page_us") for c in COMPS for length in args.lens]
    found.append((f"evict a page of {many:,} nodes: 50x the rust core", min(ratios) >= 50, f"worst {min(ratios):.0f}x"))
    growth = [
        rows["stepwell", c, many, length]["evict_many_us_per_page"] / rows["stepwell", c, few, length]["evict_many_us_per_page"]
        for c in COMPS
        for length in args.lens
    ]
    worst = max(growth)
    found.append((f"cost per evicted page at {many:,} nodes within 1.5x of {few:,}", worst <= 1.5, f"worst {worst:.2f}x"))
    return found


def _ratio(rows: dict[Key, Row], core: str, comps: str, nodes: int, length: int, operation: str) -> float:
    theirs, mine = rows[core, comps, nodes, length][operation], rows["stepwell", comps, nodes, length][operation]
    return float(theirs / mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--lens", type=int, nargs="+", default=[1024, 8192, *LONG])
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--memory-pages", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=ROOT / "bench-tree.json")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    cores = ["stepwell", "rust", "python"] if PEER_PYTHON.exists() else ["stepwell"]
    if len(cores) == 1:
        console.print("SGLang is not installed here, so there is nothing to compare with: run `make bench-tree-peer` first.")
    rows = measure(args, cores)
    console.print(table(rows, cores, args))
    memory = run([sys.executable, str(HERE / "stepwell_tree.py"), "--memory", str(args.memory_pages)])[0]
    results = goals(rows, args) if len(cores) > 1 else []
    pause_ms = max(collection_ms(rows, comps, max(args.nodes), args) for comps in COMPS)
    pause = f"a full garbage collection at {max(args.nodes):,} nodes under {MOST_PAUSE_MS} ms"
    results.append((pause, pause_ms < MOST_PAUSE_MS, f"worst {pause_ms} ms"))
    in_budget = memory["bytes_per_page"] <= 700
    results.append(
        (f"at most 700 bytes a page at {memory['memory_pages']:,} pages", in_budget, f"{memory['bytes_per_page']} bytes")
    )
    for name, met, detail in results:
        console.print(f"{'met   ' if met else 'MISSED'}  {name}: {detail}")
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "system": platform.system(),
    }
    args.output.write_text(json.dumps({"machine": machine, "rows": list(rows.values()), "memory": memory}, indent=1) + "\n")
    console.print(f"written to {args.output.name}")


if __name__ == "__main__":
    main()
