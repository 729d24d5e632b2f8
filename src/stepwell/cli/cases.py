"""What `replay`, `plan` and `explain` are all asked: traces, a model, tiers, a policy, a machine; and where their answers go.

Turns arguments into cases and figures into tables; replays nothing.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from stepwell.base.config import WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.narrow import CHECKPOINT_DTYPES
from stepwell.base.units import parse_bytes
from stepwell.policy.write_choice import AUTO
from stepwell.sim.case import TIERS, Case
from stepwell.sim.files import TraceFile
from stepwell.sim.hardware import Hardware, hardware_from
from stepwell.sim.policies import DEFAULT, POLICIES
from stepwell.sim.trace import Trace

PIPE_WIDTH = 160  # columns when nobody's terminal tells: no cell is cut
NONE = "none"
SIZES = {Tier.DEVICE: "80GiB", Tier.HOST: "512GiB", Tier.STORE: "4TiB"}
PLACES = {
    Tier.DEVICE: "device memory for the cache",
    Tier.HOST: f"host memory below it, or {NONE}",
    Tier.STORE: f"a store below that, or {NONE}",
}


def add_arguments(parser: ArgumentParser, *, sizes: Mapping[Tier, str] = SIZES, compares: bool = False) -> None:
    """`sizes` are those of tiers that are not named; with `compares` there is a `--compare` to say in place of a policy."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="each is replayed on its own, with an empty cache")
    parser.add_argument("--spec", required=True, metavar="NAME_OR_CONFIG", help="a preset, a config.json, or its folder")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help=f"how attention rows are kept: {', '.join(KV_DTYPES)}")
    parser.add_argument(
        "--checkpoint-dtype", choices=CHECKPOINT_DTYPES, help="checkpoints in eight bits below the device (default: exact)"
    )
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    for tier, size in sizes.items():
        parser.add_argument(f"--{tier.label}", default=size, metavar="SIZE", help=f"{PLACES[tier]} (default: {size})")
    parser.add_argument(
        "--write-policy", choices=[AUTO, *(each.value for each in WritePolicy)], default=AUTO,
        help="when pages go down a tier (default: auto, by the sizes of the tiers)",
    )  # fmt: skip
    parser.add_argument(
        "--no-durable", dest="durable", action="store_false",
        help="the store gets what leaves memory, and not sooner (default: it soon gets what is cached, as in `stepwell serve`)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--policy", default=DEFAULT, metavar="NAME", help=f"one of {', '.join(POLICIES)} (default: {DEFAULT})")
    if compares:
        which.add_argument("--compare", action="store_true", help="replay with every policy in turn")
    defaults = ", ".join(f"{field.name}={getattr(Hardware(), field.name):g}" for field in fields(Hardware))
    parser.add_argument(
        "--hardware", action="append", default=[], metavar="NAME=VALUE", help=f"for times; repeat it (default: {defaults})"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of each trace (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure; - for standard output")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw a page")


def cases_of(args: Namespace) -> list[Case]:
    """A case for each trace, checked: what cannot be replayed is refused before anything is. Raises StepwellError."""
    sizes = {tier: parse_bytes(size) for tier in TIERS if (size := getattr(args, tier.label)).lower() != NONE}
    cases = [
        Case(
            trace=path,
            spec=args.spec,
            sizes=sizes,
            policy=args.policy,
            hardware=hardware_from(args.hardware),
            kv_dtype=args.kv_dtype,
            checkpoint_dtype=args.checkpoint_dtype,
            page_tokens=args.page_tokens,
            requests=args.requests,
            write=None if args.write_policy == AUTO else WritePolicy(args.write_policy),
            durable=args.durable,
        )
        for path in args.traces
    ]
    for case in cases:
        case.setup()
        case.open_trace()
    return cases


@contextmanager
def watched(case: Case, label: str) -> Iterator[tuple[Trace, Callable[[], None]]]:
    """A case's trace, and what to call after each of its requests to move a bar on stderr. Raises TraceError."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    file, served = TraceFile(case.trace), 0
    columns = (TextColumn(escape(label)), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=case.requests or file.size_bytes)

        def advance() -> None:
            nonlocal served
            served += 1
            progress.update(task, completed=served if case.requests else file.read_bytes)

        yield case.part_of(file), advance


def one_or_all(rows: Sequence[dict[str, object]], name: str) -> dict[str, object]:
    """One trace's figures as they are; those of several under `name`."""
    return rows[0] if len(rows) == 1 else {name: rows}


def wants_tables(args: Namespace) -> bool:
    """Whether standard output is for people."""
    return args.json is None or str(args.json) != "-"


def write(path: Path, text: str) -> None:
    """To a file, or to standard output for `-`. Raises ConfigError."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def print_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, caption: str | None = None
) -> None:
    """Plain text to standard output; the first `words` columns hold words, the others figures."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", caption=caption)
    for at, head in enumerate(heads):
        table.add_column(escape(head), justify="left" if at < words else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)
