"""The arguments that `replay`, `plan` and `explain` share: traces, a model, tiers, a policy, a machine; and their output.

Turns arguments into cases and figures into tables; replays nothing.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.meters import Clock, SystemClock
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.narrow import CHECKPOINT_DTYPES
from stepwell.base.units import parse_tier
from stepwell.cli.command import printable
from stepwell.cli.engine_options import add_write_policy, write_policy
from stepwell.sim.case import Case
from stepwell.sim.files import TraceFile
from stepwell.sim.hardware import Hardware, hardware_from
from stepwell.sim.policies import DEFAULT, POLICIES
from stepwell.sim.trace import Trace

LINE_S = 15.0  # between two lines


class ProgressLines:
    """Prints nothing on a terminal, and nothing in the first seconds. One thread."""

    def __init__(self, *, clock: Clock | None = None, stream: TextIO | None = None) -> None:
        self._clock = clock or SystemClock()
        self._stream = stream or sys.stderr
        self._began_s = self._said_s = self._clock.now()

    def report(self, what: str, done: int, total: int) -> None:
        """Reports that `done` of `total` of `what` are done."""
        now = self._clock.now()
        if self._stream.isatty() or now - self._said_s < LINE_S or not 0 < done <= total:
            return
        self._said_s = now
        left_s = (now - self._began_s) * (total - done) / done
        print(f"{what}: {done / total:.0%} done, about {span(left_s)} to go", file=self._stream, flush=True)


def span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


PIPE_WIDTH = 120  # columns if the output is not a terminal
_SIZES = {
    Tier.DEVICE: ("device_memory", "80GiB", "memory of the device tier"),
    Tier.HOST: ("host_memory", "512GiB", "memory of the host tier; 0 or none for no host tier"),
    Tier.STORE: ("store_budget", "4TiB", "size of the store; 0 or none for no store"),
}


def add_arguments(parser: ArgumentParser, *, compares: bool = False) -> None:
    """With `compares` there is `--compare` as an alternative to `--policy`."""
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="trace files; each is replayed on its own, with an empty cache"
    )
    parser.add_argument(
        "--spec", required=True, metavar="NAME_OR_CONFIG", help="the model: a preset, a config.json, or its folder"
    )
    parser.add_argument("--kv-dtype", metavar="DTYPE", help=f"dtype of attention rows: {', '.join(KV_DTYPES)}")
    parser.add_argument(
        "--checkpoint-dtype", choices=CHECKPOINT_DTYPES, help="keep checkpoints in eight bits below the device (default: exact)"
    )
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens in a page (default: the model's)")
    tiers = parser.add_argument_group("tiers and store")
    for name, size, what in _SIZES.values():
        tiers.add_argument(f"--{name.replace('_', '-')}", default=size, metavar="SIZE", help=f"{what} (default: {size})")
    add_write_policy(tiers)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--policy", default=DEFAULT, metavar="NAME", help=f"what is evicted: {', '.join(POLICIES)} (default: {DEFAULT})"
    )
    if compares:
        which.add_argument("--compare", action="store_true", help="replay with every policy")
    names = ", ".join(field.name for field in fields(Hardware))
    parser.add_argument(
        "--hardware",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"an assumed speed, as often as needed: {names}",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="replay the first N requests of each trace (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON; - for standard output")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page")


def cases_of(args: Namespace) -> list[Case]:
    """A checked case for each trace, so that mistakes are found before the first replay. Raises StepwellError."""
    _must_be_writable(args.json, "--json")
    _must_be_writable(args.html, "--html")
    given = {tier: parse_tier(getattr(args, name), name) for tier, (name, _, _) in _SIZES.items()}
    sizes = {tier: size for tier, size in given.items() if size is not None}
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
            write=write_policy(args),
            durable=args.durable,
        )
        for path in args.traces
    ]
    for case in cases:
        case.setup()
        case.open_trace()
    return cases


def _must_be_writable(path: Path | None, flag: str) -> None:
    """Checked before a long replay. Raises ConfigError."""
    if path is None or str(path) == "-":
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a directory: name a file")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: permission denied")


@contextmanager
def watched(case: Case, label: str) -> Iterator[tuple[Trace, Callable[[], None]]]:
    """A case's trace, and a function that advances a bar on stderr by one request. Raises TraceError."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    file, served = TraceFile(case.trace), 0
    columns = (TextColumn(escape(label)), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = case.requests or file.size_bytes
        task, lines = progress.add_task("replaying", total=total), ProgressLines()

        def advance() -> None:
            nonlocal served
            served += 1
            done = served if case.requests else file.read_bytes
            progress.update(task, completed=done)
            lines.report(label, done, total)

        yield case.part_of(file), advance


def one_or_all(rows: Sequence[dict[str, object]], name: str) -> dict[str, object]:
    """The figures of one trace alone; those of several under `name`."""
    return rows[0] if len(rows) == 1 else {name: rows}


def wants_tables(args: Namespace) -> bool:
    """Whether standard output is for tables."""
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

    table = Table(title=escape(printable(title)), title_justify="left", caption=caption)
    for at, head in enumerate(heads):
        table.add_column(escape(head), justify="left" if at < words else "right", no_wrap=at < words, overflow="fold")
    for row in rows:
        table.add_row(*[escape(printable(cell)) for cell in row])
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)
