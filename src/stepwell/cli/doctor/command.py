"""`stepwell doctor`: runs the checks and prints what they found. Changes nothing."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence

from stepwell.base.meters import Clock, SystemClock
from stepwell.cli.command import Command
from stepwell.cli.doctor import libraries, machine, stores
from stepwell.cli.doctor.finding import Finding, Health

EXIT_BROKEN = 1
_MARKS = {Health.FINE: "ok", Health.SLOW: "--", Health.BROKEN: "!!"}
_STATUSES = "exit status: 0 when a server can run here; 1 when something is broken; 2 when a check could not be made"


def configure(parser: ArgumentParser) -> None:
    parser.epilog = _STATUSES
    parser.add_argument(
        "--store", metavar="STORE", help="also check this one, as `stepwell serve` takes it: log:DIR, mooncake:[FILE] ..."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: Namespace) -> int:
    findings = list(examine(args.store, os.environ, SystemClock()))
    if args.json:
        print(json.dumps({"broken": _broken(findings), "findings": [_row(each) for each in findings]}, indent=2))
    else:
        for each in findings:
            print(f"{_MARKS[each.health]}  {each.check:<14}  {each.found}")
            if each.change:
                print(f"    {'':<14}  change: {each.change}")
    return EXIT_BROKEN if _broken(findings) else 0


def examine(store: str | None, environment: Mapping[str, str], clock: Clock) -> Iterator[Finding]:
    """All findings, in the order in which people look for trouble. Raises ConfigError for a store that is not known."""
    if store is not None:
        yield from stores.store(store, environment, clock)
    yield machine.memory()
    yield machine.group_limit()
    yield machine.huge_pages()
    yield from libraries.gpu()
    yield from libraries.packages()


def _broken(findings: Sequence[Finding]) -> bool:
    return any(each.health is Health.BROKEN for each in findings)


def _row(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "health": finding.health.name.lower(), "found": finding.found, "change": finding.change}


COMMAND = Command(name="doctor", summary="Check this machine, and say what to change.", configure=configure, run=run)
