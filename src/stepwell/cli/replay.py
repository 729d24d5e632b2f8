"""`stepwell replay TRACE...`: which share of a trace's prompts a cache of these sizes would have served, and from where.

Prints; decides nothing. Every request goes through the production cache, with a copy engine that only counts.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace

from stepwell.base.errors import ConfigError
from stepwell.base.meters import SystemClock
from stepwell.base.units import counted, format_bytes
from stepwell.cli.cases import add_arguments, cases_of, one_or_all, print_table, wants_tables, watched, write
from stepwell.cli.command import Command
from stepwell.sim.case import Case
from stepwell.sim.picture import draw
from stepwell.sim.policies import POLICIES
from stepwell.sim.replay import replay_trace
from stepwell.sim.report import Report

HEADS = (
    "trace", "policy", "requests", "hit rate", "ceiling", "device", "host", "store", "computed", "written", "checkpoints", "TTFT",
)  # fmt: skip
CAPTION = "written: to host / store; checkpoints: made / used; TTFT: p50 / p95 / p99, estimated"


def configure(parser: ArgumentParser) -> None:
    add_arguments(parser, compares=True)
    parser.add_argument(
        "--warm-up", type=int, default=0, metavar="N", help="requests that warm the cache before figures begin (default: 0)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N",
                        help="leave out longer requests, as a server refuses them (default: none)")  # fmt: skip
    parser.add_argument("--whole-blocks", action="store_true", help="cache the last block of a prompt even if it is not full")


def run(args: Namespace) -> int:
    if args.warm_up < 0:
        raise ConfigError(f"--warm-up must be 0 or more, got {args.warm_up}")
    if args.requests is not None and 0 < args.requests <= args.warm_up:
        raise ConfigError(
            f"--warm-up {args.warm_up} leaves none to count of the {counted(args.requests, 'request')} of --requests"
        )
    names = tuple(POLICIES) if args.compare else (args.policy,)
    how = {"whole_blocks": args.whole_blocks, "max_model_len": args.max_model_len}
    cases = [replace(case, policy=name, **how) for case in cases_of(args) for name in names]
    reports = [_watch(case, args.warm_up) for case in cases]
    if wants_tables(args):
        _print(reports)
    if args.json is not None:
        write(args.json, json.dumps(one_or_all([report.as_json() for report in reports], "replays"), indent=2) + "\n")
    if args.html is not None:
        write(args.html, draw(reports))
    return 0


def _watch(case: Case, warm_up: int) -> Report:
    """Replays with a bar on stderr."""
    with watched(case, f"{case.trace.name}, {case.policy}") as (trace, advance):
        clock = SystemClock()
        return replay_trace(trace, case.setup(), policy=case.policy, clock=clock, warm_up=warm_up, on_request=advance)


def _print(reports: Sequence[Report]) -> None:
    rows = [(report.trace, report.policy, *_cells(report)) for report in reports]
    print_table(f"{reports[0].spec}: where prompts came from", HEADS, rows, words=2, caption=CAPTION)


def _cells(report: Report) -> list[str]:
    prompt = max(report.prompt_tokens, 1)
    by_source = (report.device_tokens, report.host_tokens, report.store_tokens, report.computed_tokens)
    down = " / ".join(format_bytes(figures.written_bytes) for tier, figures in report.tiers.items() if tier.label != "device")
    return [
        f"{report.requests:,}",
        f"{report.hit_rate:.1%}",
        f"{report.ceiling:.1%}",
        *(f"{tokens / prompt:.1%}" for tokens in by_source),
        down,
        f"{report.checkpoints_made:,} / {report.checkpoints_used:,}",
        f"{report.ttft_p50_s:.2f} / {report.ttft_p95_s:.2f} / {report.ttft_p99_s:.2f} s",
    ]


COMMAND = Command(name="replay", summary="Replay a trace and report what the cache saves.", configure=configure, run=run)
