"""`stepwell store`: `stat DIR` and `check DIR` inspect a log store, `clear DIR NAMESPACE` empties a namespace, `new-key FILE`
creates a key to stamp values with.

`stat` and `check` work while another process has the store open, and report it; `check --repair` and `clear` need it closed.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.base.errors import ConfigError
from stepwell.base.meters import SystemClock
from stepwell.base.store_key import StoreKey
from stepwell.base.units import counted, format_bytes
from stepwell.cli.command import Command, printable
from stepwell.store.key_file import read_store_key, write_store_key
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.inspect import check_directory, owner, repair_directory, stat_directory
from stepwell.store.log.opening import open_directory
from stepwell.store.log.recovery.check import CheckReport, Damage
from stepwell.store.log.recovery.stat import LogStat
from stepwell.store.log.writing.upkeep import Direct

if TYPE_CHECKING:
    from rich.console import Console

EXIT_DAMAGED = 1
_STATUSES = (
    "exit status: 0 if all is sound or was repaired; 1 if values are damaged (with --repair: and could not be repaired); "
    "2 if the store could not be checked"
)
_PIPE_WIDTH = 120  # columns if the output is not a terminal
_SHOWN = 20  # damaged places in the table; JSON has them all


def configure(parser: ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    stat = commands.add_parser("stat", help="count values and bytes by namespace")
    stat.set_defaults(action=_stat)
    check = commands.add_parser("check", help="verify every byte", epilog=_STATUSES)
    check.add_argument("--repair", action="store_true", help="drop damaged values, so that the rest can be used")
    check.add_argument(
        "--store-key-file",
        metavar="FILE",
        help="also check that values in namespaces of this key were written by holders of the key",
    )
    check.set_defaults(action=_check)
    clear = commands.add_parser("clear", help="drop all values of one namespace")
    clear.set_defaults(action=_clear)
    for each in (stat, check, clear):
        each.add_argument("directory", type=Path, metavar="DIR", help="directory of a log store")
        each.add_argument("--json", action="store_true", help="print JSON instead of a table")
    clear.add_argument("namespace", metavar="NAMESPACE", help="namespace as `stat` prints it; a unique prefix is enough")
    new_key = commands.add_parser("new-key", help="create a key file for --store-key-file")
    new_key.add_argument("file", type=Path, metavar="FILE", help="file to create, readable only by you")
    new_key.set_defaults(action=_new_key)


def run(args: Namespace) -> int:
    return int(args.action(args))


# ---- stat -----------------------------------------------------------------------------------------


def _stat(args: Namespace) -> int:
    disk = Disk()
    stat, opened_by = stat_directory(args.directory, disk), owner(args.directory, disk)
    if args.json:
        print(json.dumps({**stat_json(stat), "open_in": opened_by}, indent=2))
    else:
        _print_stat(args.directory, stat, opened_by)
    return 0


def stat_json(stat: LogStat) -> dict[str, object]:
    """Every figure, unrounded, as JSON values."""
    fields = asdict(stat)
    fields["spaces"] = [{**asdict(space), "digest": space.digest.hex()} for space in stat.spaces]
    return fields


def _print_stat(directory: Path, stat: LogStat, opened_by: str | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(printable(str(directory))), title_justify="left", show_footer=True)
    table.add_column("namespace", "total")
    table.add_column("label")
    table.add_column("tenant")
    table.add_column("values", f"{stat.values:,}", justify="right")
    table.add_column("bytes", format_bytes(stat.value_bytes), justify="right")
    table.add_column("on disk", format_bytes(stat.disk_bytes), justify="right")
    for space in stat.spaces:
        sizes = (f"{space.values:,}", format_bytes(space.value_bytes), format_bytes(space.disk_bytes))
        table.add_row(space.digest.hex()[:12], escape(printable(space.label)), escape(printable(space.tenant)), *sizes)
    console = _console()
    console.print(table)
    used, budget = format_bytes(stat.directory_bytes), format_bytes(stat.budget_bytes)
    segments = f"{stat.segments} of at most {counted(stat.max_segments, 'segment')} of {format_bytes(stat.segment_bytes)}"
    console.print(f"directory   {used} of {budget}, {segments}", markup=False)
    for tenant in stat.tenants:
        amounts = f"{format_bytes(tenant.disk_bytes)} of {format_bytes(tenant.quota_bytes)}"
        console.print(f"quota       {printable(tenant.tenant)}: {amounts}", markup=False)
    if opened_by is not None:
        console.print(f"open        in {opened_by}: these figures may be out of date", markup=False)


# ---- check ----------------------------------------------------------------------------------------


def _check(args: Namespace) -> int:
    key = read_store_key(args.store_key_file) if args.store_key_file is not None else None
    report = _watch(args.directory, key, repair=args.repair)
    opened_by = None if args.repair else owner(args.directory, Disk())
    if args.json:
        print(json.dumps({**check_json(report), "repaired": args.repair, "open_in": opened_by}, indent=2))
    else:
        _print_report(args.directory, report, repaired=args.repair, opened_by=opened_by)
        _print_unproven(report, key)
    return EXIT_DAMAGED if (report.left if args.repair else report.damage) else 0


def check_json(report: CheckReport) -> dict[str, object]:
    """The report with every damaged place, as JSON values."""
    return {
        "segments": report.segments,
        "batches": report.batches,
        "values": report.values,
        "value_bytes": report.value_bytes,
        "damaged_values": report.damaged_values,
        "damaged_bytes": report.damaged_bytes,
        "unproven_values": report.unproven_values,
        "damage": [_damage_json(one) for one in report.damage],
        "left": [_damage_json(one) for one in report.left],
    }


def _damage_json(one: Damage) -> dict[str, object]:
    return {
        "file": one.file,
        "offset": one.offset,
        "bytes": one.size_bytes,
        "reason": one.reason,
        "namespace": one.space.digest.hex() if one.space else None,
        "key": one.key.hex() if one.key else None,
    }


def _watch(directory: Path, key: StoreKey | None, *, repair: bool) -> CheckReport:
    """Runs the check with a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    disk = Disk()
    total = stat_directory(directory, disk).value_bytes
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking", total=total)
        work = repair_directory if repair else check_directory
        return work(directory, disk, lambda size: progress.advance(task, size), key)


def _print_report(directory: Path, report: CheckReport, *, repaired: bool, opened_by: str | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = _console()
    if report.damage:
        table = Table(title=f"damaged in {escape(printable(str(directory)))}", title_justify="left")
        for header in ("file", "offset", "bytes", "namespace", "key", "why"):
            table.add_column(header, justify="right" if header in ("offset", "bytes") else "left")
        for one in report.damage[:_SHOWN]:
            table.add_row(*[escape(printable(cell)) for cell in _cells(one)])
        console.print(table)
        if len(report.damage) > _SHOWN:
            console.print(f"and {len(report.damage) - _SHOWN} more; --json lists them all", markup=False)
    verdict = "all sound"
    if report.damage:
        done = "repaired: damaged values were dropped" if repaired else "run with --repair to drop them"
        if report.left:
            first = report.left[0]
            done = f"{counted(len(report.left), 'place')} could not be repaired, first {printable(first.file)}: {first.reason}"
        verdict = f"{counted(report.damaged_values, 'value')} and {format_bytes(report.damaged_bytes)} damaged; {done}"
    checked = f"{counted(report.values, 'value')}, {format_bytes(report.value_bytes)} in {counted(report.segments, 'segment')}"
    console.print(f"{checked}: {verdict}", markup=False)
    if opened_by is not None:
        console.print(f"open in {opened_by}: its latest writes were not checked", markup=False)


def _print_unproven(report: CheckReport, key: StoreKey | None) -> None:
    if not report.unproven_values:
        return
    count = f"{report.unproven_values:,} of them {'is' if report.unproven_values == 1 else 'are'}"
    if key is None:
        says = f"{count} stamped with a store key: give it with --store-key-file to check who wrote them"
    else:
        says = f"{count} not stamped with the store key {key.id.hex()}: their writer is unknown"
    _console().print(says, markup=False)


# ---- clear ----------------------------------------------------------------------------------------


def _clear(args: Namespace) -> int:
    stat_directory(args.directory, Disk())  # fails if there is no store, instead of creating one
    if not args.namespace.strip():
        raise ConfigError("NAMESPACE must not be empty: it is a prefix, and an empty one matches all")
    store = open_directory(args.directory, clock=SystemClock(), direct=Direct.OFF)
    try:
        spaces = [space for space in store.stat().spaces if space.digest.hex().startswith(args.namespace.lower())]
        if len(spaces) != 1:
            known = ", ".join(space.digest.hex()[:12] for space in store.stat().spaces) or "none"
            found = "several namespaces start" if spaces else "no namespace starts"
            raise ConfigError(f"{found} with {args.namespace!r}; there are: {known}")
        cleared = store.clear(spaces[0].digest)
    finally:
        store.close()
    name = printable(f"{spaces[0].digest.hex()[:12]} {spaces[0].label}".strip())
    print(
        json.dumps({"namespace": spaces[0].digest.hex(), "values": cleared})
        if args.json
        else f"{name}: dropped {counted(cleared, 'value')}"
    )
    return 0


# ---- new-key --------------------------------------------------------------------------------------


def _new_key(args: Namespace) -> int:
    key = write_store_key(args.file)
    use = "pass it to every server of the store with --store-key-file, and keep it secret"
    print(f"{printable(str(args.file))}: store key {key.id.hex()}; {use}")
    return 0


def _cells(one: Damage) -> list[str]:
    space = f"{one.space.digest.hex()[:12]} {one.space.label}".strip() if one.space else "-"
    return [one.file, f"{one.offset:,}", format_bytes(one.size_bytes), space, one.key.hex()[:16] if one.key else "-", one.reason]


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


COMMAND = Command(
    name="store",
    summary="Inspect, verify and clear a log store, or create a store key.",
    configure=configure,
    run=run,
)
