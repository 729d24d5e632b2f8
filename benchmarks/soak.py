"""Two real servers over one log, asked at random while things go wrong: is every answer right, memory flat, every audit clean?

    make soak                            30 minutes; prints its seed and what it found, writes soak.json
    make soak ARGS="--minutes 2 --seed 7"

Requests are drawn from prompts whose greedy answers an engine without any cache has given before; tokens and logprobs are
compared. Clients leave in the middle. Meanwhile caches are flushed, bits of the log are flipped, stores are detached and
attached, one of the servers is stopped, paused, killed and started again, also while it owns the log that both use. At the end
the log is checked and repaired, and a new server answers every prompt from it. The seed draws prompts, requests and troubles;
what meets what depends on the machine too. Exit status 0: nothing was wrong. What the servers wrote into their logs is kept in
any case, in soak-logs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from report import machine
from soaking.servers_said import keep
from soaking.soaked import Plan, Verdict, logs_in, soak
from stepwell.base.units import format_bytes

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="that clients ask (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="of everything that is drawn (default: a new one, which is printed)")
    parser.add_argument("--clients", type=int, default=6, help="that ask at once (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that servers compute on (default: %(default)s)")
    parser.add_argument("--logs", type=Path, default=ROOT / "soak-logs", help="where logs of servers go (default: soak-logs)")
    parser.add_argument("--json", type=Path, default=ROOT / "soak.json", help="where figures go (default: soak.json)")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    os.environ["MALLOC_ARENA_MAX"] = "2"  # as servers run under deploy/: memory that was freed does not pile up
    os.environ["PYTHONFAULTHANDLER"] = "1"  # an aborted server prints what its threads do
    seed = args.seed if args.seed is not None else secrets.randbelow(10**6)
    console.print(f"seed {seed}: the same again with --seed {seed}")
    plan = Plan(seed=seed, seconds=60 * args.minutes, device=args.device, clients=args.clients)
    with TemporaryDirectory(prefix="stepwell-soak-") as directory:
        try:
            verdict = _watched(console, plan, Path(directory))
        finally:  # also of one that did not come to its end
            keep(logs_in(Path(directory)), args.logs)
            console.print(f"the logs of its servers are in {args.logs}", soft_wrap=True)
    _show(console, verdict)
    found = {
        "right": verdict.right, "seed": plan.seed, "minutes": args.minutes, "clients": plan.clients, "took_s": verdict.took_s,
        "outcomes": verdict.tally.outcomes, "tokens": verdict.tally.tokens, "troubles": verdict.troubles,
        "growth": None if verdict.growth is None else asdict(verdict.growth), "counters": verdict.counters,
        "damaged": verdict.damaged, "answered_after": verdict.answered_after, "warned": verdict.warned,
        "faults": verdict.faults, "machine": machine(plan.device),
    }  # fmt: skip
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"{verdict.took_s:.0f} s; written to {args.json.name}")
    return 0 if verdict.right else 1


def _watched(console: Console, plan: Plan, directory: Path) -> Verdict:
    """With a bar on a terminal, and a line for each step elsewhere."""
    if not console.is_terminal:
        began = time.monotonic()
        return asyncio.run(soak(plan, directory, lambda what: print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, began = progress.add_task("", total=plan.seconds), time.monotonic()

        def say(what: str) -> None:
            progress.update(task, description=what, completed=time.monotonic() - began)

        return asyncio.run(soak(plan, directory, say))


def _show(console: Console, verdict: Verdict) -> None:
    table = Table(title=f"A soak of {verdict.plan.seconds / 60:g} minutes, seed {verdict.plan.seed}", title_justify="left")
    table.add_column("what")
    table.add_column("found", justify="right")
    outcomes = verdict.tally.outcomes
    table.add_row("answers that were right to the end", f"{outcomes['right']:,}")
    table.add_row("clients that left, having heard nothing wrong", f"{outcomes['left']:,}")
    table.add_row("answers cut off, since their server was ended", f"{outcomes['cut']:,}")
    table.add_row("prompt tokens by source", ", ".join(f"{name} {count:,}" for name, count in verdict.tally.tokens.items()))
    for kind, count in sorted(verdict.troubles.items()):
        table.add_row(kind, f"{count:,}")
    table.add_row("values found damaged in the end, and dropped", f"{verdict.damaged:,}")
    table.add_row("prompts answered from what was left", f"{verdict.answered_after:,} of {verdict.plan.shape.count:,}")
    grown = verdict.growth
    if grown is not None:
        memory = f"{format_bytes(int(grown.first_bytes))} → {format_bytes(int(grown.last_bytes))}"
        table.add_row(f"memory of the steady server, last {grown.watched_s:.0f} s", memory)
        table.add_row("... its slope", f"{grown.slope_bytes_per_s * 3600 / (1 << 20):+.1f} MiB an hour")
        table.add_row("... files and threads", f"{grown.files:+} and {grown.threads:+}")
    console.print(table)
    for said, count in sorted(verdict.warned.items()):
        console.print(f"{count:5,}x {said}", markup=False, highlight=False)
    for fault in verdict.faults:
        console.print(f"FAULT {fault}", markup=False, highlight=False)
    console.print(verdict.says)


if __name__ == "__main__":
    sys.exit(main())
