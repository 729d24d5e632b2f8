"""Seconds to open a log of a million values: after an orderly end, and after `kill -9` with much written since a snapshot.

    make bench-opening       about 2 minutes, 5 GB of disk; prints the table, writes bench-opening.json

Every opening is a process of its own; the one that is killed has written batches of a few values until the next snapshot was due.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from report import ROOT, Goal, Row, goals_of, machine, table_of, write
from stepwell.store.api import Space, Store, Write
from stepwell.store.registry import open_store
from stepwell.store.seal import seal

SPACE = Space(digest=b"bench-opening".ljust(32, b"."), label="bench")
VALUES, ROUNDS = 1_000_000, 3  # in the log; openings of each kind
VALUE_BYTES, BATCH = 4096, 128
LIVES = (("an orderly end", 0, 0, 2.0), ("kill -9, batches of 8", 8, 100_000, 10.0), ("kill -9, batches of 1", 1, 20_000, 10.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the disk to measure (default: build)")
    parser.add_argument("--life", nargs=3, metavar=("LOG", "BATCH", "VALUES"), help=argparse.SUPPRESS)  # of a process of its own
    args = parser.parse_args()
    if args.life:
        _live(args.life[0], int(args.life[1]), int(args.life[2]))
        return
    console, rows = Console(width=100), []
    args.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-opening-", dir=args.directory) as directory:
        console.print(f"writing {VALUES:,} values of 4 KiB ...")
        _fill(directory, VALUES)
        for name, batch, values, goal_s in LIVES:
            took = []
            for _ in range(ROUNDS):
                if batch:
                    _child(directory, batch, values)
                took.append(_child(directory, 0, 0))
            figures = {"seconds": statistics.median(took), "of each round": " ".join(f"{each:.2f}" for each in took)}
            rows.append(Row(what=name, figures=figures, goal=Goal(value=statistics.median(took), limit=goal_s, most=True)))
    console.print(table_of(f"Opening a log of {VALUES:,} values", rows), goals_of({"opening": rows}))
    write(ROOT / "bench-opening.json", {"machine": machine(), "rows": [row.as_json() for row in rows]})


def _fill(directory: str, values: int) -> None:
    store = open_store(f"log:{directory}", options={"budget": "24GiB"})
    _write(store, values, BATCH)
    store.close()


def _write(store: Store, values: int, batch: int) -> None:
    data = memoryview(os.urandom(VALUE_BYTES))
    for _ in range(0, values, batch):
        keys = [os.urandom(32) for _ in range(batch)]
        store.write_from(SPACE, [Write(key=key, data=data, stamp=seal(SPACE, key, data)) for key in keys])


def _child(directory: str, batch: int, values: int) -> float:
    """Opens the log in another process, which writes, and is killed if it wrote; returns what opening took."""
    command = [sys.executable, __file__, "--life", directory, str(batch), str(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != (-signal.SIGKILL if batch else 0):
        raise RuntimeError(f"a process over the log ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[0])


def _live(directory: str, batch: int, values: int) -> None:
    started = time.perf_counter()
    store = open_store(f"log:{directory}")
    print(time.perf_counter() - started, flush=True)
    if batch:
        _write(store, values, batch)
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


if __name__ == "__main__":
    main()
