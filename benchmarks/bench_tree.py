"""Prefix trees: Stepwell's compared with SGLang's Rust and Python cores, on one machine in one run.

    make bench-tree-peer     install SGLang 0.5.23 into a venv of its own (once, about 3 GB)
    make bench-tree          measure, print the table, write bench-tree.json (14 minutes)

Without SGLang it measures Stepwell alone and says so. Every figure is in microseconds, from a process of its own: medians, except
Stepwell's single evictions, which are a mean, and full garbage collections, the longest of five.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from report import ROOT, Goal, Row, goals_of, machine, table_of, write

HERE = Path(__file__).parent
PEER_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
OURS, RUST, PYTHON = "stepwell", "rust", "python"
MODELS, NODES, LENGTHS, PAGE, REPEATS = ("full", "window", "point"), (1000, 100_000), (1024, 8192, 65536, 262144), 64, 20
MEMORY_PAGES = 1_000_000
OPERATIONS = ("lookup_us", "commit_new_us", "commit_known_us", "evict_page_us", "evict_many_us_per_page")
LONG = LENGTHS[2:]
MOST_PAUSE_MS, MOST_BYTES = 20, 700  # all threads stand still for a collection; bytes of bookkeeping of a page

Found = dict[tuple[str, str, int, int], dict[str, Any]]  # by core, model, nodes and length


def command(core: str, model: str, nodes: int) -> list[str]:
    script = [sys.executable, str(HERE / "stepwell_tree.py")]
    if core != OURS:
        script = [str(PEER_PYTHON), str(HERE / "peers" / "sglang_tree.py"), "--core", core]
    sizes = ["--nodes", str(nodes), "--lens", *map(str, LENGTHS), "--page", str(PAGE), "--reps", str(REPEATS)]
    return [*script, "--comps", model, *sizes]


def run(command: list[str]) -> list[dict[str, Any]]:
    """The JSON lines that a process prints; its other output is shown only when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure(console: Console, cores: Sequence[str]) -> Found:
    found: Found = {}
    for nodes in NODES:
        for model in MODELS:
            for core in cores:
                began_s = time.monotonic()
                found |= {(core, model, nodes, row["length"]): row for row in run(command(core, model, nodes))}
                console.print(f"{core}, {model}, {nodes:,} nodes: {time.monotonic() - began_s:.0f} s")
    return found


def rows_of(found: Found, cores: Sequence[str]) -> Iterator[Row]:
    for nodes in NODES:
        for model in MODELS:
            for length in LENGTHS:
                for operation in OPERATIONS:
                    figures = {core: found[core, model, nodes, length][operation] for core in cores}
                    figures |= {f"x {core}": figures[core] / figures[OURS] for core in cores[1:]}
                    yield Row(
                        what=f"{model}, {nodes:,} nodes, {length:,} tokens, {operation.removesuffix('_us')}", figures=figures
                    )


def goals(found: Found, memory: dict[str, Any], *, compared: bool) -> Iterator[Row]:
    """Each goal by its worst case."""
    few, many = min(NODES), max(NODES)
    if compared:
        for operation in ("lookup_us", "commit_new_us", "commit_known_us"):
            for core, factor in ((RUST, 1.0), (PYTHON, 5.0)):
                worst = min(_ratio(found, core, m, n, length, operation) for m in MODELS for n in NODES for length in LONG)
                what = f"{operation[:-3]} at 64K and 256K, compared with the {core} core"
                yield Row(what=what, goal=Goal(value=worst, limit=factor))
        worst = min(_ratio(found, RUST, m, many, length, "evict_page_us") for m in MODELS for length in LENGTHS)
        yield Row(what=f"evict a page of {many:,} nodes, compared with the rust core", goal=Goal(value=worst, limit=50))
        name = "evict_many_us_per_page"
        growth = max(found[OURS, m, many, at][name] / found[OURS, m, few, at][name] for m in MODELS for at in LENGTHS)
        what = f"an evicted page of {many:,} nodes, compared with {few:,}"
        yield Row(what=what, goal=Goal(value=growth, limit=1.5, most=True))
    pause_ms = max(found[OURS, model, many, length]["collection_ms"] for model in MODELS for length in LENGTHS)
    yield Row(what=f"a garbage collection at {many:,} nodes, ms", goal=Goal(value=pause_ms, limit=MOST_PAUSE_MS, most=True))
    yield Row(what="bytes of bookkeeping of a page", goal=Goal(value=memory["bytes_per_page"], limit=MOST_BYTES, most=True))


def _ratio(found: Found, core: str, model: str, nodes: int, length: int, operation: str) -> float:
    return float(found[core, model, nodes, length][operation] / found[OURS, model, nodes, length][operation])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    cores = (OURS, RUST, PYTHON) if PEER_PYTHON.exists() else (OURS,)
    if cores == (OURS,):
        console.print("SGLang is not installed here, so there is nothing to compare with: run `make bench-tree-peer` first.")
    found = measure(console, cores)
    console.print(table_of("microseconds, pages of 64 tokens; lower is better", list(rows_of(found, cores))))
    (memory,) = run([sys.executable, str(HERE / "stepwell_tree.py"), "--memory", str(MEMORY_PAGES)])
    console.print(goals_of({"tree": list(goals(found, memory, compared=len(cores) > 1))}))
    write(ROOT / "bench-tree.json", {"machine": machine(), "rows": list(found.values()), "memory": memory})
    console.print("written to bench-tree.json")


if __name__ == "__main__":
    main()
