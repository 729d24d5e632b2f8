"""`stepwell serve` under load over HTTP: requests that do not wait for each other, and clients that leave.

    make bench-serve                          some 10 minutes on 2 cores; prints tables, writes bench-serve.json
    make bench-serve ARGS="--quick"           under 2 minutes
    make bench-serve ARGS="--control"         the case without reuse twice: how rounding alone changes answers

Three cases play the same load in the same run, part by part in turns, so that what else the machine does hits all of them:
`tiers` (device, host and a log), `device` (the same device memory alone), `none` (nothing is reused). Arrivals are open loop: a
request is sent when it is due, and its times count from then. Prompts and answers are scaled down to fit a small model.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from report import ROOT, machine, write
from serve.arrivals import Arrival, Load, made_up
from serve.figures import OUTCOMES, PERCENTILES, different, fell_behind, figures
from serve.open_loop import Played, client, play
from stepwell.cli.demo.server import serving
from stepwell.cli.main import build_parser
from stepwell.engine.building.settings import EngineConfig, device_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # by name: the server that is asked, and what every request says
    "tiers": ("tiered", {}),
    "device": ("plain", {}),
    "none": ("plain", {"use_cache": False}),
}
AGAIN = {"again": CASES["none"]}  # nothing is reused in either, so no cache causes their differences
RATE, LEAVING = 0.1, 0.08  # requests a second of one client; the share of clients that leave
HOST_MEMORY, STORE_BUDGET = "128MiB", "1GiB"  # of the server with tiers
USUAL = {"clients": [1, 4, 16, 64], "seconds": 30.0, "rounds": 3, "longest": 4000, "answer": 64, "device_memory": "24MiB"}
QUICK = {"clients": [1, 8, 64], "seconds": 6.0, "rounds": 2, "longest": 1000, "answer": 24, "device_memory": "8MiB"}


def main() -> int:
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    loads = [
        Load(
            clients=clients, rate=RATE, seconds=args.seconds, longest=args.longest, answer_tokens=args.answer, leaving=LEAVING,
            seed=clients,
        )
        for clients in args.clients
    ]  # fmt: skip
    arrivals = {
        load.clients: made_up(load) for load in loads
    }  # each level has requests of its own, so that every one begins cold
    cases = CASES | AGAIN if args.control else CASES
    started = time.monotonic()
    with TemporaryDirectory(prefix="bench-serve-") as directory, ExitStack() as stack:
        console.print("two servers start ...")
        addresses = _start(args, Path(directory), stack)
        played = {}
        for clients, asked in arrivals.items():
            console.print(f"{clients} clients, {len(asked)} requests in {len(cases)} cases ...")
            played[clients] = asyncio.run(_level(addresses, cases, asked, args.rounds, clients))
    results = [
        {"clients": clients, "case": case, **figures(parts)} for clients, found in played.items() for case, parts in found.items()
    ]
    unlike = {clients: different({case: found[case] for case in CASES}) for clients, found in played.items()}
    controls = played if args.control else {}
    rounded = {clients: different({case: found[case] for case in ("none", *AGAIN)}) for clients, found in controls.items()}
    _show(console, args, arrivals, results, unlike, rounded)
    write(args.json, {
        "model": args.model, "results": results, "loads": [asdict(load) for load in loads], "rounds": args.rounds,
        "sizes": {"device_memory": args.device_memory, "host_memory": HOST_MEMORY, "store_budget": STORE_BUDGET},
        "different_answers": unlike, "different_without_reuse": rounded, **_served_on(args),
    })  # fmt: skip
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json.name}")
    return 1 if any(each["failed"] or each["refused"] for each in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer clients, shorter prompts, less time")
    parser.add_argument("--model", default="random-hybrid", help="as for `stepwell serve` (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", help="levels of load (default: 1 4 16 64; quick: 1 8 64)")
    parser.add_argument("--control", action="store_true", help="play the case without reuse twice, and compare its answers")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="more arguments for both servers, last of all")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-serve.json", help="(default: %(default)s)")
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def _common(args: argparse.Namespace) -> list[str]:
    """Arguments of both servers."""
    return ["--model", args.model, "--served-model-name", "bench", "--device-memory", args.device_memory, *args.serve_args]


def _served_on(args: argparse.Namespace) -> dict[str, Any]:
    """The device of the servers, the machine, and their further arguments."""
    asked = build_parser().parse_args(["serve", *_common(args)])
    device = device_of(EngineConfig(device=asked.device, tensor_parallel=asked.tensor_parallel))
    return {"serve_args": args.serve_args, "device": device, "machine": machine(device)}


def _start(args: argparse.Namespace, directory: Path, stack: ExitStack) -> dict[str, str]:
    """Both servers; their addresses."""
    common = _common(args)
    tiers = ["--host-memory", HOST_MEMORY, "--store", f"log:{directory / 'log'}", "--store-budget", STORE_BUDGET]
    return {
        name: stack.enter_context(serving([*more, *common], directory / f"{name}.log")).address
        for name, more in {"tiered": tiers, "plain": ["--host-memory", "0"]}.items()
    }


async def _level(
    addresses: dict[str, str], cases: dict[str, tuple[str, dict[str, Any]]], arrivals: list[Arrival], rounds: int, clients: int
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
                found[case].append(await play(http, addresses[server], part, body))
    return found


def _show(
    console: Console, args: argparse.Namespace, arrivals: dict[int, list[Arrival]], results: list[dict[str, Any]],
    unlike: dict[int, list[int]], rounded: dict[int, list[int]],
) -> None:  # fmt: skip
    lengths = sorted(len(each.prompt) for asked in arrivals.values() for each in asked)
    console.print(
        f"{args.model}: prompts of {lengths[0]} to {lengths[-1]:,} tokens, half of them under {lengths[len(lengths) // 2]:,}; "
        f"a client asks every {1 / RATE:g} s"
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
