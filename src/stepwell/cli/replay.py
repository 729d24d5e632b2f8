"""`stepwell replay TRACE...`: how much of a trace's prompts a cache of these sizes would have served, and from where.

Prints; decides nothing. Every request goes through the production cache, with hands that only count.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from stepwell.base.clock import SystemClock
from stepwell.base.config import CacheConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.presets import load_spec
from stepwell.base.units import format_bytes, parse_bytes
from stepwell.cli.command import Command
from stepwell.sim.files import TraceFile
from stepwell.sim.hardware import Hardware, hardware_from
from stepwell.sim.picture import draw
from stepwell.sim.policies import DEFAULT, POLICIES, policy_named
from stepwell.sim.replay import replay_trace
from stepwell.sim.report import Report
from stepwell.sim.setup import Setup

_PIPE_WIDTH = 160  # columns when nobody's terminal tells: no cell is cut


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="each is replayed on its own, with an empty cache")
    parser.add_argument("--spec", required=True, metavar="NAME_OR_CONFIG", help="a preset, a config.json, or its folder")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help=f"how attention rows are kept: {', '.join(KV_DTYPES)}")
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    parser.add_argument("--device", default="80GiB", metavar="SIZE", help="device memory for the cache (default: 80GiB)")
    parser.add_argument("--host", metavar="SIZE", help="host memory below it (default: none)")
    parser.add_argument("--store", metavar="SIZE", help="a store below that (default: none)")
    parser.add_argument("--write", choices=[each.value for each in WritePolicy], default=WritePolicy.THROUGH.value,
                        help="when pages go down a tier (default: through)")  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--policy", default=DEFAULT, metavar="NAME", help=f"one of {', '.join(POLICIES)} (default: {DEFAULT})")
    which.add_argument("--compare", action="store_true", help="replay with every policy in turn")
    parser.add_argument("--warm-up", type=int, default=0, metavar="N", help="requests before figures begin (default: 0)")
    parser.add_argument("--whole-blocks", action="store_true", help="cache a prompt's last block even where it is not full")
    defaults = ", ".join(f"{field.name}={getattr(Hardware(), field.name):g}" for field in fields(Hardware))
    parser.add_argument(
        "--hardware", action="append", default=[], metavar="NAME=VALUE", help=f"for times; repeat it (default: {defaults})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure; - for standard output")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw a page")


def run(args: Namespace) -> int:
    if args.warm_up < 0:
        raise ConfigError(f"--warm-up must be 0 or more, got {args.warm_up}")
    names = tuple(POLICIES) if args.compare else (args.policy,)
    setups = {name: _setup(args, name) for name in names}
    traces = [TraceFile(path) for path in args.traces]
    reports = [_watch(trace, setups[name], name, args.warm_up) for trace in traces for name in names]
    if args.json is None or str(args.json) != "-":
        _print_table(reports)
    if args.json is not None:
        _write(args.json, json.dumps(as_json(reports), indent=2) + "\n")
    if args.html is not None:
        _write(args.html, draw(reports))
    return 0


def as_json(reports: Sequence[Report]) -> dict[str, object]:
    """One replay's figures as they are; those of several under `replays`."""
    rows = [report.as_json() for report in reports]
    return rows[0] if len(rows) == 1 else {"replays": rows}


def _setup(args: Namespace, name: str) -> Setup:
    policy = policy_named(name)
    config = CacheConfig(
        device_bytes=parse_bytes(args.device),
        host_bytes=parse_bytes(args.host) if args.host is not None else None,
        write=WritePolicy(args.write),
        eviction=policy.eviction,
        placement=policy.placement,
    )
    return Setup(
        spec=load_spec(args.spec, kv_dtype=args.kv_dtype, page_tokens=args.page_tokens),
        config=config,
        store_bytes=parse_bytes(args.store) if args.store is not None else None,
        hardware=hardware_from(args.hardware),
        whole_blocks=args.whole_blocks,
    )


def _watch(trace: TraceFile, setup: Setup, policy: str, warm_up: int) -> Report:
    """Replays with a bar on stderr."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"{escape(trace.name)}, {policy}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=trace.size_bytes)
        clock = SystemClock()

        def advance() -> None:
            progress.update(task, completed=trace.read_bytes)

        return replay_trace(trace, setup, policy=policy, clock=clock, warm_up=warm_up, on_request=advance)


def _print_table(reports: Sequence[Report]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{reports[0].spec}: where prompts came from"), title_justify="left")
    table.add_column("trace")
    table.add_column("policy")
    heads = ("requests", "hit rate", "ceiling", "device", "host", "store", "computed", "written", "checkpoints", "TTFT")
    for head in heads:
        table.add_column(head, justify="right")
    table.caption = "written: to host / store; checkpoints: made / used; TTFT: p50 / p95 / p99, estimated"
    for report in reports:
        table.add_row(escape(report.trace), report.policy, *_cells(report))
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False).print(table)


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


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


COMMAND = Command(name="replay", summary="Replay a trace and count what the cache saves.", configure=configure, run=run)
