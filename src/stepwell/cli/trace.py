"""`stepwell trace describe FILE`, `convert FILE OUT` and `generate KIND OUT`: traces to replay.

Prints; decides nothing. The work is in `stepwell.sim`.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from stepwell.base.units import counted
from stepwell.cli.command import Command, printable
from stepwell.sim.describe import Description, describe
from stepwell.sim.files import TraceFile, write_trace
from stepwell.sim.generate import KINDS, Shape, generate

_PIPE_WIDTH = 160  # columns when the output is no terminal: no cell is cut


def configure(parser: ArgumentParser) -> None:
    orders = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    about = orders.add_parser("describe", help="count requests, tokens and repeated blocks")
    about.add_argument("trace", type=Path, metavar="FILE", help="a trace in any known format")
    about.set_defaults(order=_describe)
    convert = orders.add_parser("convert", help="convert a trace to stepwell's format")
    convert.add_argument("trace", type=Path, metavar="FILE", help="stepwell, Mooncake, or JSONL of token ids; .gz too")
    convert.add_argument("out", type=Path, metavar="OUT", help="gzipped if its name ends in .gz")
    convert.set_defaults(order=_convert)
    make = orders.add_parser("generate", help="generate a synthetic trace")
    make.add_argument("kind", choices=tuple(KINDS), metavar="KIND", help=f"one of {', '.join(KINDS)}")
    make.add_argument("out", type=Path, metavar="OUT", help="gzipped if its name ends in .gz")
    make.add_argument("--sessions", type=int, default=100, metavar="N", help="conversations (default: 100)")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same trace (default: 0)")
    make.add_argument(
        "--duration", type=float, default=3600.0, metavar="SECONDS", help="time in which sessions begin (default: 3600)"
    )
    make.add_argument(
        "--block-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens in a block (default: 64)",
    )
    make.set_defaults(order=_generate)
    for order in (about, convert, make):
        order.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: Namespace) -> int:
    return int(args.order(args))


def _describe(args: Namespace) -> int:
    trace = TraceFile(args.trace)
    description = describe(trace, block_tokens=trace.block_tokens)
    if args.json:
        print(json.dumps({"trace": trace.name, "format": trace.format, **description.as_json()}, indent=2))
    else:
        _print_description(f"{trace.name} ({trace.format})", description)
    return 0


def _convert(args: Namespace) -> int:
    trace = TraceFile(args.trace)
    written = write_trace(args.out, trace, block_tokens=trace.block_tokens, source=trace.name)
    return _say_written(args, written)


def _generate(args: Namespace) -> int:
    shape = Shape(sessions=args.sessions, seed=args.seed, duration_s=args.duration, block_tokens=args.block_tokens)
    source = f"generated: {args.kind}, {args.sessions} sessions, seed {args.seed}"
    written = write_trace(args.out, generate(args.kind, shape), block_tokens=shape.block_tokens, source=source)
    return _say_written(args, written)


def _say_written(args: Namespace, written: int) -> int:
    if args.json:
        print(json.dumps({"out": str(args.out), "requests": written}))
    else:
        print(f"{printable(str(args.out))}: {counted(written, 'request')}")
    return 0


def _print_description(title: str, description: Description) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(printable(title)), title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in description.as_json().items():
        shown = f"{value:.1%}" if name == "repeated" else f"{value:,.0f}"
        table.add_row(name.replace("_", " "), shown)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False).print(table)


COMMAND = Command(name="trace", summary="Describe, convert and generate traces of requests.", configure=configure, run=run)
