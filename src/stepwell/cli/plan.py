"""`stepwell plan TRACE...`: what memory of each tier buys on a trace, its knees, and where the next gigabyte should go.

Prints; decides nothing. Every point is a replay through the production cache, in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.meters import SystemClock
from stepwell.base.units import counted
from stepwell.cli.cases import ProgressLines, add_arguments, cases_of, one_or_all, print_table, span, wants_tables, write
from stepwell.cli.command import Command
from stepwell.sim.case import TIERS, Case
from stepwell.sim.plan import Plan, Prices, plan_of
from stepwell.sim.plan_chart import short_bytes
from stepwell.sim.plan_page import (
    POINT_HEADS,
    draw_plans,
    point_cells,
    said_knee,
    said_next,
    said_sessions,
    session_rows,
    step_rows,
)
from stepwell.sim.plan_sessions import Sessions, sessions_of
from stepwell.sim.plan_sweep import Sweep, sweep
from stepwell.sim.pool import run_all
from stepwell.sim.replay import replay_trace
from stepwell.sim.report import Report


def configure(parser: ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--jobs", type=int, default=_cores(), metavar="N", help="replays at a time (default: one per core)")
    parser.add_argument(
        "--price",
        metavar="TIER=PRICE,...",
        help="prices of a GiB, as in device=8,host=1,store=0.05, to weigh the next gigabyte by money",
    )


def run(args: Namespace) -> int:
    if args.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, got {args.jobs}")  # before a long trace is read
    cases = cases_of(args)
    prices = prices_from(args.price, cases[0])
    sweeps = [sweep(case) for case in cases]
    _say_too_small(sweeps[0])  # they differ in their traces only
    sessions = [_sessions(case) for case in cases]
    reports = _replay(sweeps, sessions, args.jobs)
    plans = [plan_of(each, found, about, prices) for each, found, about in zip(sweeps, reports, sessions, strict=True)]
    if wants_tables(args):
        for plan in plans:
            _print(plan)
    if args.json is not None:
        write(args.json, json.dumps(one_or_all([plan.as_json() for plan in plans], "plans"), indent=2) + "\n")
    if args.html is not None:
        write(args.html, draw_plans(plans))
    return 0


def prices_from(text: str | None, case: Case) -> Prices:
    """Prices of a GiB of every tier, from `device=8,host=1,store=0.05`. Raises ConfigError."""
    if text is None:
        return {}
    tiers = {tier.label: tier for tier in TIERS}
    prices: dict[Tier, float] = {}
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if name.strip() not in tiers:
            raise ConfigError(f"--price knows device, host and store, not {name!r:.40}")
        try:
            price = float(value)
        except ValueError:
            raise ConfigError(f"the price of {name} must be a number, got {value!r:.40}") from None
        if not 0 < price < float("inf"):
            raise ConfigError(f"the price of {name} must be more than 0, got {value}")
        prices[tiers[name.strip()]] = price
    missing = [tier.label for tier in case.sizes if tier not in prices]
    if missing:
        raise ConfigError(f"--price must name every tier: {', '.join(missing)} is missing")
    return prices


def _sessions(case: Case) -> Sessions:
    trace = case.open_trace()
    sessions = sessions_of(trace, case.setup().spec, block_tokens=trace.block_tokens)
    if not sessions.requests:
        raise ConfigError(f"{case.trace} has no requests to plan for")
    return sessions


def _say_too_small(found: Sweep) -> None:
    for tier, sizes in found.too_small.items():
        print(f"left out because it cannot hold a page: {tier.label} {', '.join(map(short_bytes, sizes))}", file=sys.stderr)


def _replay(sweeps: Sequence[Sweep], sessions: Sequence[Sessions], jobs: int) -> list[list[Report]]:
    """Replays the cases of all sweeps with one bar on stderr, and a line with the expected time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    cases = [case for each in sweeps for case in each.cases]
    total = sum(about.requests * len(each.cases) for each, about in zip(sweeps, sessions, strict=True))
    columns = (TextColumn("{task.fields[points]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=total, points=f"0 of {len(cases)} points")
        clock = SystemClock()
        started_s, said = clock.now(), False
        found: dict[int, Report] = {}
        lines = ProgressLines(clock=clock)

        def advance(served: int) -> None:
            nonlocal said
            finished = len(found)
            progress.update(task, completed=served, points=f"{finished} of {len(cases)} points")
            lines.report(f"{finished} of {counted(len(cases), 'point')} replayed", served, total)
            if finished and not said and finished < len(cases):
                said = True
                left_s = (clock.now() - started_s) * (total - served) / max(served, 1)
                progress.console.print(
                    f"{finished} of {len(cases)} points replayed; about {span(left_s)} to go, {min(jobs, len(cases))} at a time "
                    "(--requests N takes the first N of each trace)",
                    highlight=False,
                    soft_wrap=True,
                )

        run_all(_report, cases, jobs=jobs, on_result=found.__setitem__, on_progress=advance)
    reports = (found[place] for place in range(len(cases)))
    return [[next(reports) for _ in each.cases] for each in sweeps]


def _report(case: Case, on_request: Callable[[], None]) -> Report:
    return replay_trace(case.open_trace(), case.setup(), policy=case.policy, clock=SystemClock(), on_request=on_request)


def _print(plan: Plan) -> None:
    base = plan.base
    title = f"{base.trace}, {base.spec}: {base.requests:,} requests, ceiling {base.ceiling:.1%}"
    print_table(title, POINT_HEADS, [(tier.label, *point_cells(each)) for tier, curve in plan.curves.items() for each in curve])
    knees = [(tier.label, *map(said_knee, plan.knees(tier).values())) for tier in plan.curves]
    print_table("knees", ("tier", "of the hit rate", "of the speed-up"), knees, words=3)
    money = ("per unit of money",) if plan.prices else ()
    print_table("where the next gigabyte should go", ("tier", "added", "saves", "per GiB", *money), step_rows(plan))
    print_table("sessions at a time", ("tier", "size", "median ones", "95th percentile"), session_rows(plan))
    print(said_sessions(plan.sessions))
    print(said_next(plan))


def _cores() -> int:
    """Cores this process may use."""
    return os.cpu_count() or 1


COMMAND = Command(name="plan", summary="Report what memory of each tier buys on a trace.", configure=configure, run=run)
