"""Several servers and ranks: messages, transfers, first tokens, hits behind a router, each beside what it is measured against.

    make bench-cluster ARGS="--trace FILE"      prints tables, and writes them into benchmarks/results/cluster-NAME.json,
                                                where parts that were left out keep what they had

Everything runs in a network of its own, since transfer engines listen on all interfaces. What compares two things takes them in
turns in the same run, so ratios hold on a busy machine, and times do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster import constants, first_token, routed, transfer
from stepwell.cli.demo_cluster.parts import find_smg
from stepwell.cli.demo_cluster.private_network import inside, why_not

ROOT = Path(__file__).parents[1]
INSIDE = "--inside"
Part = Callable[[Namespace], dict[str, Any]]
GOALS = {
    ("messages", "8,192 tokens each: p50 ms"): ("at most", 0.3),
    ("transfer", "lowest share of raw"): ("at least", 0.9),
}


def _messages(args: Namespace) -> dict[str, Any]:
    """Of a scheduler to its ranks, where that part is there."""
    if find_spec("cluster.messages") is None:
        return {"left out": "no benchmarks/cluster/messages.py"}
    return dict(import_module("cluster.messages").run())


def _transfer(args: Namespace) -> dict[str, Any]:
    return transfer.run()


def _first_token(args: Namespace) -> dict[str, Any]:
    return first_token.run(model=args.model, tokens=args.tokens, rounds=args.rounds)


def _routed(args: Namespace) -> dict[str, Any]:
    if args.trace is None:
        return {"left out": "no --trace"}
    return routed.run(trace=args.trace, requests=args.requests, smg=find_smg(args.router))


def _constants(args: Namespace) -> dict[str, Any]:
    return constants.run(smg=find_smg(args.router))


PARTS: dict[str, Part] = {
    "messages": _messages, "transfer": _transfer, "first_token": _first_token, "routed": _routed, "constants": _constants,
}  # fmt: skip


def main() -> int:
    args = _arguments()
    if not args.inside:
        if why_not():
            sys.exit(f"no private network: {why_not()}")
        return subprocess.run(inside([sys.executable, __file__, *sys.argv[1:], INSIDE]), check=False).returncode
    console, started = Console(width=120), time.monotonic()
    results: dict[str, Any] = {}
    for name in args.only:
        console.print(f"{name} ...")
        results[name] = PARTS[name](args) | {"machine": _machine()}
        console.print(_table(name, results[name]))
    _say_goals(console, results)
    out = ROOT / "benchmarks" / "results" / f"cluster-{args.name}.json"
    earlier = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps(earlier | results, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to {out.relative_to(ROOT)}")
    return 0


def _arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--name", default="cpu", help="of the file of results (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="for routed: a trace that `stepwell trace` can read")
    parser.add_argument("--requests", type=int, default=150, help="for routed: of the trace (default: %(default)s)")
    parser.add_argument("--router", help="for routed: the program smg (default: the one on the path)")
    parser.add_argument(
        "--model", default="random-hybrid", help=f"for first_token; also {first_token.WIDE_ROWS} (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="for first_token: of a prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="for first_token (default: %(default)s)")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.only) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    return args


def _flat(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if name == "machine":
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}: ")
        else:
            yield f"{above}{name}", value


def _table(part: str, found: Mapping[str, Any]) -> Table:
    table = Table(title=part, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _flat(found):
        table.add_row(
            name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        )
    return table


def _say_goals(console: Console, results: Mapping[str, Mapping[str, Any]]) -> None:
    for (part, name), (relation, goal) in GOALS.items():
        value = dict(_flat(results.get(part, {}))).get(name)
        if value is not None:
            met = value >= goal if relation == "at least" else value <= goal
            console.print(f"{'met    ' if met else 'MISSED '} {part}, {name}: {value:.2f} ({relation} {goal:g})")


def _machine() -> dict[str, Any]:
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}


if __name__ == "__main__":
    sys.exit(main())
