"""Every policy beside fixed rules and an offline reference, over traces, models and sizes: who wins where, and by how much.

    make policy-report                              generated traces, one of each kind
    make policy-report TRACES="a.jsonl.gz b.jsonl"  real ones; JOBS=4 at a time, ARGS="--requests 5000" the beginning of each

Prints a table for each model and trace, and whether ours (`value`) meets its goals; writes every cell to JSON as soon as it is
done, so that a run that was stopped goes on where it was, and a page with the curves.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from policies.gaps import rows_of, summary_of
from policies.grid import BUDGETS, ONE_TIER, REFERENCES, SPECS, Cell, WorkingSet, WorkingSets, cells_of
from policies.page import cells_of_row, draw, heads_of, said
from policies.results import Results
from stepwell.base.errors import StepwellError
from stepwell.sim.files import write_trace
from stepwell.sim.generate import Shape, generate
from stepwell.sim.policies import POLICIES
from stepwell.sim.pool import run_all

ROOT = Path(__file__).parents[1]
GENERATED = {"chat": 400, "agents": 80, "rag": 1500}  # sessions: some thousand requests of each kind


def main() -> int:
    args = _arguments()
    console, started = Console(width=220 if not sys.stdout.isatty() else None, highlight=False), time.monotonic()
    try:
        with TemporaryDirectory(prefix="policy-report-") as directory:
            traces = args.traces or _generated(Path(directory))
            _report(console, args, traces)
    except (StepwellError, ValueError) as error:
        console.print(f"policy-report: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print(f"stopped; {args.json} has what was done, and the same command goes on from there")
        return 130
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json} and {args.html}", markup=False)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    everyone = [*POLICIES, *REFERENCES]
    parser.add_argument("--traces", nargs="*", type=Path, default=[], help="files (default: generated ones)")
    parser.add_argument("--specs", nargs="+", default=list(SPECS), metavar="NAME[:KV_DTYPE]", help="(default: %(default)s)")
    parser.add_argument("--budgets", nargs="+", type=_percentage, default=list(BUDGETS), metavar="PERCENT",
                        help="of the working set (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--policies", nargs="+", choices=everyone, default=everyone, metavar="NAME", help=f"of {', '.join(everyone)}"
    )
    parser.add_argument("--tiers", nargs="*", type=_percentage, default=None, metavar="PERCENT",
                        help="of a budget on device, host, store; alone: 10 30 60 (default: all on the device)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="replays at a time (default: %(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of each trace (default: all)")
    parser.add_argument("--again", nargs="*", default=[], metavar="POLICY", help="forget what the JSON has of these first")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-policies.json", help="(default: %(default)s)")
    parser.add_argument("--html", type=Path, default=ROOT / "build" / "policy-report.html", help="(default: %(default)s)")
    args = parser.parse_args()
    args.tiers = ONE_TIER if args.tiers is None else tuple(args.tiers) or (10.0, 30.0, 60.0)
    if len(args.tiers) > 3 or not 99.9 < sum(args.tiers) < 100.1:
        parser.error("--tiers must be up to three shares that add up to 100")
    if args.jobs < 1:
        parser.error("--jobs must be 1 or more")
    if len({path.name for path in args.traces}) < len(args.traces):
        parser.error("two traces have one name: results are kept by name")
    return args


def _percentage(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100, got {text}")
    return value


def _generated(directory: Path) -> list[Path]:
    paths = []
    for kind, sessions in GENERATED.items():
        shape = Shape(sessions=sessions, duration_s=4 * 3600)
        paths.append(directory / f"generated-{kind}.jsonl.gz")
        write_trace(paths[-1], generate(kind, shape), block_tokens=shape.block_tokens, source=f"generated {kind}")
    return paths


def _report(console: Console, args: argparse.Namespace, traces: Sequence[Path]) -> None:
    results, sets = Results(args.json), WorkingSets(args.requests)
    results.forget(args.again)
    console.print(f"reading {len(traces)} traces ...")
    cells = list(
        cells_of(traces, args.specs, sets, budgets=args.budgets, tiers=args.tiers, policies=args.policies, requests=args.requests)
    )
    found = {(cell.trace.name, cell.spec): sets.of(cell.trace, cell.spec) for cell in cells}
    missing = results.missing(cells)
    console.print(f"{len(cells)} cells, {len(cells) - len(missing)} of them done before")
    _run(results, missing, found, args.jobs)
    results.write(asked=cells)
    rows = rows_of(results.of(cells))
    for (trace, spec), group in groupby(rows, key=lambda row: (row.trace, row.spec)):
        title = f"{spec} on {trace}: {found[trace, spec].requests:,} requests, ceiling {found[trace, spec].ceiling:.1%}"
        console.print(_table(title, heads_of(args.policies), [cells_of_row(row, args.policies) for row in group]))
    for line in _warnings(results.of(cells)):
        console.print(line, markup=False)
    for line in said(summary_of(rows)):
        console.print(line, markup=False)
    args.html.parent.mkdir(parents=True, exist_ok=True)
    args.html.write_text(draw(rows, args.policies, {key: each.ceiling for key, each in found.items()}))


def _warnings(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the tables do not show: sizes at which there was no cache, or one that some prompts could not use."""
    refused = {f"{cell['spec']}, {cell['trace']}, {cell['budget']:g}%: {cell['error']}" for cell in cells if "error" in cell}
    yield from (f"not replayed: {line}" for line in sorted(refused))
    large: dict[str, int] = {}
    for cell in cells:
        if cell.get("too_large"):
            large[f"{cell['spec']}, {cell['trace']}, {cell['budget']:g}%"] = cell["too_large"]
    yield from (f"larger than the device, and never cached: {count:,} prompts of {where}" for where, count in large.items())


def _run(results: Results, missing: Sequence[Cell], found: dict[tuple[str, str], WorkingSet], jobs: int) -> None:
    """Replays what is missing, with one bar on stderr."""
    total = sum(found[cell.trace.name, cell.spec].requests for cell in missing)
    columns = (
        TextColumn("{task.fields[cells]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, done = progress.add_task("replaying", total=total, cells=f"0 of {len(missing)} cells"), 0

        def take(place: int, result: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            results.add(result)
            progress.update(task, cells=f"{done} of {len(missing)} cells")

        run_all(Cell.run, missing, jobs=jobs, on_result=take, on_progress=lambda served: progress.update(task, completed=served))


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
