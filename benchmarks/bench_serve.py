"""The server as its users meet it: `stepwell serve` over HTTP, requests that do not wait for each other, clients that leave.

    make bench-serve                          some 10 minutes on 2 cores; prints tables, writes bench-serve.json
    make bench-serve ARGS="--quick"           under 2 minutes
    make bench-serve ARGS="--trace FILE"      a slice of a trace instead of made-up agents
    make bench-serve ARGS="--control"         the case without reuse twice: what rounding alone changes in answers

Three cases play the same load in the same run, part by part in turns, so that what else the machine does hits all of them:
`tiers` (device, host and a log), `device` (the same device memory alone), `none` (nothing is reused). Arrivals are open loop: a
request is sent when it is due, and its times count from then. Prompts and answers are scaled down to fit a small model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from report import machine
from serve.arrivals import Arrival, Load, from_file, made_up
from serve.figures import OUTCOMES, PERCENTILES, different, fell_behind, figures
from serve.open_loop import Played, client, play
from stepwell.cli.demo.server import serving
from stepwell.cli.main import build_parser
from stepwell.engine.building.settings import EngineConfig, device_of

ROOT = Path(__file__).parents[1]
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # by name: the server that is asked, and what every request says
    "tiers": ("tiered", {}),
    "device": ("plain", {}),
    "none": ("plain", {"use_cache": False}),
}
AGAIN = {"again": CASES["none"]}  # nothing is reused in either, so where they differ no cache had a hand in it


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    loads = {
        clients: Load(
            clients=clients, rate=args.rate, seconds=args.seconds, longest=args.longest, answer_tokens=args.answer,
            leaving=args.leaving, seed=args.seed + clients,
        )
        for clients in args.clients
    }  # fmt: skip
    arrivals = {clients: list(_arrivals(args.trace, load, at)) for at, (clients, load) in enumerate(loads.items())}
    cases = CASES | AGAIN if args.control else CASES
    started = time.monotonic()
    with TemporaryDirectory(prefix="bench-serve-") as directory, ExitStack() as stack:
        console.print("two servers start ...")
        addresses = _start(args, Path(directory), stack)
        with _progress(console) as progress:
            task = progress.add_task("", total=len(cases) * sum(map(len, arrivals.values())))
            played = {}
            for clients, asked in arrivals.items():
                progress.update(task, description=f"{clients} clients")
                level = _level(addresses, cases, asked, args.rounds, clients, lambda: progress.advance(task))
                played[clients] = asyncio.run(level)
    results = [
        {"clients": clients, "case": case, **figures(parts)} for clients, found in played.items() for case, parts in found.items()
    ]
    unlike = {clients: different({case: found[case] for case in CASES}) for clients, found in played.items()}
    controls = played if args.control else {}
    rounded = {clients: different({case: found[case] for case in ("none", *AGAIN)}) for clients, found in controls.items()}
    _show(console, args, arrivals, results, unlike, rounded)
    told = {
        "model": args.model, "trace": "made up" if args.trace is None else args.trace.name, "results": results,
        "loads": [asdict(load) for load in loads.values()], "rounds": args.rounds, "sizes": _sizes(args),
        "different_answers": unlike, "different_without_reuse": rounded, **_served_on(args),
    }  # fmt: skip
    args.json.write_text(json.dumps(told, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json.name}")
    return 1 if any(each["failed"] or each["refused"] for each in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer clients, shorter prompts, less time")
    parser.add_argument("--trace", type=Path, help="a trace as `stepwell replay` reads them (default: made-up agents and chats)")
    parser.add_argument("--model", default="random-hybrid", help="as for `stepwell serve` (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", help="levels of load (default: 1 4 16 64; quick: 1 8 64)")
    parser.add_argument("--rate", type=float, default=0.1, help="requests a second of one client (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="that a level lasts (default: 30; quick: 6)")
    parser.add_argument("--rounds", type=int, help="parts that a level is played in, in turns (default: 3; quick: 2)")
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt (default: 4000; quick: 1000)")
    parser.add_argument("--answer", type=int, help="tokens of the longest answer (default: 64; quick: 24)")
    parser.add_argument("--leaving", type=float, default=0.08, help="share of clients that leave (default: %(default)s)")
    parser.add_argument("--control", action="store_true", help="plays the case without reuse twice, and compares its answers")
    parser.add_argument("--device-memory", help="of both servers (default: 24MiB; quick: 8MiB)")
    parser.add_argument("--host-memory", default="128MiB", help="of the one with tiers (default: %(default)s)")
    parser.add_argument("--store-budget", default="1GiB", help="of its log (default: %(default)s)")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="more arguments for both servers, last of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "bench-serve.json")
    args = parser.parse_args()
    usual = {"clients": [1, 4, 16, 64], "seconds": 30.0, "rounds": 3, "longest": 4000, "answer": 64, "device_memory": "24MiB"}
    quick = {"clients": [1, 8, 64], "seconds": 6.0, "rounds": 2, "longest": 1000, "answer": 24, "device_memory": "8MiB"}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _arrivals(trace: Path | None, load: Load, at: int) -> Iterator[Arrival]:
    """Each level has requests of its own, so that every one begins cold."""
    if trace is None:
        return iter(made_up(load))
    return iter(from_file(trace, load, skip=at * load.count))


def _sizes(args: argparse.Namespace) -> dict[str, str]:
    return {name: getattr(args, name) for name in ("device_memory", "host_memory", "store_budget")}


def _common(args: argparse.Namespace) -> list[str]:
    """What both servers are started with."""
    return ["--model", args.model, "--served-model-name", "bench", "--device-memory", args.device_memory, *args.serve_args]


def _served_on(args: argparse.Namespace) -> dict[str, Any]:
    """The device that the servers found for themselves or were told, the machine with it, and what else they were told."""
    asked = build_parser().parse_args(["serve", *_common(args)])
    device = device_of(EngineConfig(device=asked.device, tensor_parallel=asked.tensor_parallel))
    return {"serve_args": args.serve_args, "device": device, "machine": machine(device)}


def _start(args: argparse.Namespace, directory: Path, stack: ExitStack) -> dict[str, str]:
    """Both servers; their addresses."""
    common = _common(args)
    tiers = ["--host-memory", args.host_memory, "--store", f"log:{directory / 'log'}", "--store-budget", args.store_budget]
    return {
        name: stack.enter_context(serving([*more, *common], directory / f"{name}.log")).address
        for name, more in {"tiered": tiers, "plain": ["--host-memory", "0"]}.items()
    }


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


async def _level(
    addresses: dict[str, str], cases: dict[str, tuple[str, dict[str, Any]]], arrivals: list[Arrival], rounds: int, clients: int,
    done: Callable[[], None],
) -> dict[str, list[Played]]:  # fmt: skip
    """One load in all cases, part by part, each time another case first."""
    found: dict[str, list[Played]] = {case: [] for case in cases}
    numbered = list(enumerate(arrivals))
    parts = [numbered[at * len(numbered) // rounds : (at + 1) * len(numbered) // rounds] for at in range(rounds)]
    async with client() as http:
        for at, part in enumerate(parts):
            turn = list(cases)[at % len(cases) :] + list(cases)[: at % len(cases)]
            for case in turn:
                server, more = cases[case]
                body = {**more, "cache_salt": f"{clients} clients"}  # so that levels share nothing
                found[case].append(await play(http, addresses[server], part, body, done))
    return found


def _show(
    console: Console, args: argparse.Namespace, arrivals: dict[int, list[Arrival]], results: list[dict[str, Any]],
    unlike: dict[int, list[int]], rounded: dict[int, list[int]],
) -> None:  # fmt: skip
    lengths = sorted(len(each.prompt) for asked in arrivals.values() for each in asked)
    console.print(
        f"{args.model}: prompts of {lengths[0]} to {lengths[-1]:,} tokens, half of them under {lengths[len(lengths) // 2]:,}; "
        f"a client asks every {1 / args.rate:g} s"
    )
    speed = Table(title="How much and how soon (milliseconds from when a request was due; p50 / p90 / p99)", title_justify="left")
    for head in ("clients", "case", "requests/s", "answer tok/s", "prompt tok/s", "first token", "between tokens"):
        speed.add_column(head, justify="left" if head == "case" else "right")
    sources = Table(title="Where prompts came from, and what became of requests", title_justify="left")
    for head in ("clients", "case", "device", "host", "store", "computed", *OUTCOMES):
        sources.add_column(head, justify="left" if head == "case" else "right")
    for each in results:
        first = each["case"] == next(iter(CASES))
        label = f"{each['clients']}" if first else ""
        speed.add_row(
            label, each["case"], f"{each['requests_per_s']:.2f}", f"{each['output_tokens_per_s']:,.1f}",
            f"{each['prompt_tokens_per_s']:,.0f}", _ms(each["first_token_s"]), _ms(each["between_tokens_s"]),
        )  # fmt: skip
        total = max(sum(each["sources"].values()), 1)
        shares = (f"{count / total:.0%}" for count in each["sources"].values())
        sources.add_row(label, each["case"], *shares, *(str(each[outcome]) for outcome in OUTCOMES))
    console.print(speed)
    console.print(sources)
    for each in results:
        late = fell_behind(each)
        if late is not None:
            says = f"THE LOAD GENERATOR FELL BEHIND: 1 of 100 requests was sent {late * 1000:.0f} ms late or later"
            console.print(f"{each['clients']} clients, {each['case']}: {says}")
        for error in each["errors"]:
            console.print(f"{each['clients']} clients, {each['case']}: {error}", markup=False)
    for clients, numbers in unlike.items():
        says = "the same in all cases" if not numbers else f"NOT the same in all cases for {len(numbers)}: {numbers[:8]}"
        console.print(f"{clients} clients: answers {says}")
        if clients in rounded:
            console.print(f"{clients} clients: without reuse, played twice, {len(rounded[clients])} answers were not the same")


def _ms(found: dict[str, float] | None) -> str:
    return "-" if found is None else " / ".join(f"{found[f'p{share}'] * 1000:,.0f}" for share in PERCENTILES)


if __name__ == "__main__":
    sys.exit(main())
