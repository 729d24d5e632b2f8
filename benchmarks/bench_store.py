"""The log and the shared log, compared with the disk they lie on in one run; and what a full log costs by its number of values.

    make bench-store         prints tables, writes bench-store.json (some minutes, up to 4 GB of disk)

Medians over rounds in which every contender has its turn, one after the other. Plain is one thread that only moves bytes, 128
values a call. The log is driven as the cache drives it: one thread seals every value before another writes it, and four readers
verify every value. The shared log is driven the same way, from a process that does not own it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from report import ROOT, Goal, Row, goals_of, machine, table_of, write
from store import many_values
from store.contenders import Contender, Load, Log, Plain, SharedLogClient, Took
from store.page_cache import chill, warm

KIB = 1024
SETS = ((64 * KIB, 32), (512 * KIB, 6), (2560 * KIB, 2))  # bytes of a value, batches of 128
SHARE = 0.9  # of the faster plain transfer

Times = defaultdict[str, defaultdict[str, list[Took]]]  # by operation and contender


def measure(load: Load, directory: Path, rounds: int) -> Iterator[Row]:
    """All contenders with values of one size. The first round of every operation warms up."""
    found: Times = defaultdict(lambda: defaultdict(list))
    contenders: list[Contender] = [Plain(load, directory, direct=False), Plain(load, directory, direct=True)]
    try:
        contenders += [Log(load, directory), SharedLogClient(load, directory)]
        for operation in ("write", "cold read", "warm read"):
            for life in range(rounds + 1):
                for each in contenders:
                    took = _once(operation, load, each, life)
                    found[operation][each.name] += [took] if life else []
    finally:
        for each in contenders:
            each.close()
    for operation, by_name in found.items():
        what = f"{load.value_bytes // KIB:,} KiB, {operation}"
        yield from _rows(what, load.total_bytes, by_name, cold=operation != "warm read")


def _once(operation: str, load: Load, contender: Contender, life: int) -> Took:
    if operation == "write":
        chill(contender.files())
        return contender.write(life)
    if operation == "cold read":
        chill(contender.files())
    elif not life:
        warm(contender.files())
    load.clear_targets()
    took = contender.read()
    load.check_targets()
    return took


def _rows(what: str, moved: int, by_name: dict[str, list[Took]], *, cold: bool) -> Iterator[Row]:
    """What goes past the page cache cannot be warm, so warm reads are compared with plain ones through it."""
    wall_s = {name: statistics.median(each.wall_s for each in took) for name, took in by_name.items()}
    plain_s = min(wall_s[name] for name in (("plain", "plain direct") if cold else ("plain",)))
    for name, took in by_name.items():
        share = plain_s / wall_s[name]
        cpu_s = statistics.median(each.cpu_s for each in took)
        figures = {"GB/s": moved / wall_s[name] / 1e9, "of the faster plain": share, "CPU s/GiB": cpu_s / moved * 2**30}
        yield Row(what=f"{what}, {name}", figures=figures, goal=Goal(value=share, limit=SHARE) if name == "log" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the disk to measure (default: build)")
    args = parser.parse_args()
    console, before, began_s = Console(width=None if sys.stdout.isatty() else 140), machine(), time.monotonic()
    args.directory.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {"transfers": [], "a full log": []}
    for value_bytes, batches in SETS:
        console.print(f"values of {value_bytes // KIB:,} KiB ...")
        with tempfile.TemporaryDirectory(prefix="bench-store-", dir=args.directory) as directory:
            rows["transfers"] += measure(Load(value_bytes, batches), Path(directory), args.rounds)
    rows["a full log"] += many_values.measure(args.directory, console.print)
    for title, found in rows.items():
        console.print(table_of(title, found))
    console.print(goals_of(rows))
    parts = {name: [row.as_json() for row in each] for name, each in rows.items()}
    write(ROOT / "bench-store.json", {"machine": before, "parts": parts})
    console.print(f"{time.monotonic() - began_s:.0f} s; written to bench-store.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
