"""The bottom tier beside the disk it lies on, SGLang's file backend, one file per page, and raw Mooncake, in one run.

    make bench-tree-peer     install SGLang 0.5.23 into a venv of its own (once, about 3 GB); without it, its rows are left out
    make bench-store         measure, print the tables, write bench-store.json (about 6 minutes, up to 4 GB of disk)

Medians over rounds in which every contender has its turn, one after the other. Plain is one thread that does nothing but
move bytes, 128 values a call. Hashed is the same by as many threads as the log has, with XXH3-128 of every value: the most that
a store which verifies can reach. The log is driven as the cache drives it: one thread that seals every value before one that
writes, four readers that verify every value. The shared log is driven likewise, from a process that does not own it. `x` says
how many times as fast as a contender the log is. CPU seconds are those of the contender's process, per GiB moved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from store import many_values
from store import mooncake_network as mooncake
from store.files import Files
from store.hashed import Hashed
from store.load import Asked, Contender, Load, Took, chill, make_load, warm
from store.plain import Plain
from store.sglang_files import SglangFiles, is_installed
from store.shared_log import SharedLogClient
from store.stepwell_log import Log

ROOT = Path(__file__).parents[1]
KIB = 1024
SETS = ((64 * KIB, 32), (512 * KIB, 6), (2560 * KIB, 2))  # bytes of a value, batches of 128
MOONCAKE_SETS = ((64 * KIB, 16), (512 * KIB, 3), (2560 * KIB, 1))
PEER_BYTES = 512 * KIB  # peers of many files are measured up to this size
ASK_BYTES = 64 * KIB  # the set with 4,096 values
PLAINS, HASHED = ("plain", "plain direct"), ("plain, hashed", "plain, hashed direct")
FILES = ("file per page", "SGLang files")
MOONCAKES = ("mooncake", "mooncake, 128 each")

Key = tuple[int, str, str]  # bytes of a value, operation, contender


@dataclass(slots=True)
class Samples:
    """What was measured, and how many bytes each measurement moved."""

    took: defaultdict[Key, list[Took]] = field(default_factory=lambda: defaultdict(list))
    moved: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, took: Took, moved: int) -> None:
        self.took[key].append(took)
        self.moved[key] = moved

    def wall_s(self, key: Key) -> float:
        return statistics.median(took.wall_s for took in self.took[key])

    def rate(self, key: Key) -> float:
        """GB/s; for questions, thousands a second."""
        return self.moved[key] / self.wall_s(key) / 1e9

    def cpu_s_per_gib(self, key: Key) -> float:
        return statistics.median(took.cpu_s for took in self.took[key]) / self.moved[key] * 2**30

    def names(self, value_bytes: int, operation: str) -> list[str]:
        return [name for size, what, name in self.took if (size, what) == (value_bytes, operation)]


def contenders(load: Load, directory: Path, *, peers: bool) -> Iterator[Contender]:
    for direct in (False, True):
        plain = Plain(load, directory, direct=direct)
        yield plain
        yield Hashed(load, plain)
    yield Log(load, directory)
    yield SharedLogClient(load, directory)
    if not peers:
        return
    if load.value_bytes <= PEER_BYTES:
        yield Files(load, directory)
        if is_installed():
            yield SglangFiles(load, directory)


def measure(load: Load, where: Path, rounds: int, samples: Samples, step: Callable[[str], None], *, peers: bool) -> None:
    """All contenders with values of one size. Of every operation, the first round warms up."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=where) as directory:
        all_of_them = list(contenders(load, Path(directory), peers=peers))
        try:
            for work in (_write, _read_cold, _read_warm, _ask):
                for life in range(rounds + 1):
                    for contender in all_of_them:
                        if work is _write and contender.name in FILES and life > 2:
                            continue  # they are slow to clean up after
                        work(load, contender, life, samples if life else Samples())
                    step(f"{load.value_bytes // KIB} KiB, {work.__name__.strip('_').replace('_', ' ')}")
        finally:
            for contender in all_of_them:
                contender.close()


def _write(load: Load, contender: Contender, life: int, samples: Samples) -> None:
    chill(contender.files())
    samples.add((load.value_bytes, "write", contender.name), contender.write(life), load.total_bytes)


def _read_cold(load: Load, contender: Contender, life: int, samples: Samples) -> None:
    chill(contender.files())
    _read(load, contender, "cold read", samples)


def _read_warm(load: Load, contender: Contender, life: int, samples: Samples) -> None:
    if not life:
        warm(contender.files())
    _read(load, contender, "warm read", samples)


def _read(load: Load, contender: Contender, operation: str, samples: Samples) -> None:
    load.forget_targets()
    samples.add((load.value_bytes, operation, contender.name), contender.read(), load.total_bytes)
    if not isinstance(contender, SglangFiles):  # it has pages of its own, and checks them itself
        load.check_targets()


def _ask(load: Load, contender: Contender, life: int, samples: Samples) -> None:
    if load.value_bytes == ASK_BYTES and not isinstance(contender, (Plain, Hashed)):
        asked: Asked = contender  # type: ignore[assignment]
        samples.add((load.value_bytes, "exists, 4,096", contender.name), asked.exists(), 4096)


def measure_mooncake(rounds: int, samples: Samples, step: Callable[[str], None]) -> None:
    for row in mooncake.measured(MOONCAKE_SETS, rounds):
        key = (row["value_bytes"], f"Mooncake {row['operation']}", row["name"])
        samples.add(key, Took(wall_s=row["wall_s"], cpu_s=row["cpu_s"]), row["total_bytes"])
        step("Mooncake")


def table(samples: Samples) -> Table:
    out = Table(
        title="GB/s, medians; x: how many times as fast as that contender Stepwell is; CPU seconds per GiB",
        caption="plain: one thread, pwritev or preadv of 128 values a call, fdatasync after each write, no checksums. log: "
        "driven as the cache does, one writer behind one that seals, 128 values or 64 MiB each, and four readers that verify, 8 "
        "MiB each. hashed: plain, by as many threads as the log, and every value hashed. "
        "Files are not synced.",
    )
    for column in ("value", "operation", "contender", "GB/s", "x", "CPU s/GiB"):
        out.add_column(column, justify="left" if column in ("operation", "contender") else "right")
    seen = dict.fromkeys((size, operation) for size, operation, _ in samples.took)
    for size, operation in seen:
        ours = "mooncake" if operation.startswith("Mooncake") else "log"
        for name in samples.names(size, operation):
            key = (size, operation, name)
            ratio = "" if name == ours else f"{samples.wall_s(key) / samples.wall_s((size, operation, ours)):.2f}"
            asked = operation.startswith("exists")
            speed = f"{samples.wall_s(key) * 1e3:.2f} ms" if asked else f"{samples.rate(key):.2f}"
            out.add_row(
                f"{size // KIB:,} KiB", operation, name, speed, ratio, "" if asked else f"{samples.cpu_s_per_gib(key):.2f}"
            )
        out.add_section()
    return out


def goals(samples: Samples) -> list[tuple[str, bool, str]]:
    """What we set out to reach, and by how much each goal was met or missed."""
    found = []

    def ratio(size: int, operation: str, theirs: str, ours: str = "log") -> float:
        return samples.wall_s((size, operation, theirs)) / samples.wall_s((size, operation, ours))

    for size, _ in SETS:
        for operation in ("write", "cold read", "warm read"):
            best = PLAINS if operation != "warm read" else PLAINS[:1]  # what goes past the page cache has no warm
            worst = min(ratio(size, operation, name) for name in best)
            through = ratio(size, operation, "plain")
            limit = min(ratio(size, operation, name) for name in HASHED[: len(best)])
            detail = f"{worst:.2f} of the faster plain, {through:.2f} of the page cache's, {limit:.2f} of the limit with hashing"
            found.append((f"{operation}, {size // KIB:,} KiB: 0.9 of plain", worst >= 0.9, detail))
    for name in samples.names(PEER_BYTES, "cold read"):
        if name in FILES:
            for operation in ("cold read", "warm read"):
                times = ratio(PEER_BYTES, operation, name)
                found.append((f"{operation}, 512 KiB: 5x {name}", times >= 5, f"{times:.1f}x"))
            times = ratio(ASK_BYTES, "exists, 4,096", name)
            found.append((f"existence of 4,096 keys: 5x {name}", times >= 5, f"{times:.1f}x"))
    for size, _ in MOONCAKE_SETS:
        if samples.names(size, "Mooncake read"):
            usual, whole = (ratio(size, "Mooncake read", "raw Mooncake", ours) for ours in MOONCAKES)
            detail = f"{whole:.2f} with 128 values to a reader as raw has it, {usual:.2f} with the cache's 64 MiB"
            found.append((f"Mooncake read, {size // KIB:,} KiB: 0.9 of batch_get_into", whole >= 0.9, detail))
    return found


def machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def rows(samples: Samples) -> list[dict[str, Any]]:
    return [
        {
            "value_bytes": size, "operation": operation, "contender": name, "moved": samples.moved[size, operation, name],
            "wall_s": [took.wall_s for took in all_took], "cpu_s": [took.cpu_s for took in all_took],
        }
        for (size, operation, name), all_took in samples.took.items()
    ]  # fmt: skip


def absent() -> Sequence[str]:
    """Who cannot be measured here, and why."""
    found = []
    if not is_installed():
        found.append("SGLang files: not installed here, run `make bench-tree-peer` first")
    if why := mooncake.why_not():
        found.append(f"Mooncake: {why}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="on the disk to measure (default build)")
    parser.add_argument("--ours", action="store_true", help="leave out what others made: only the disk and our logs")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-store.json")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    samples, before, started_s = Samples(), machine(), time.monotonic()
    left_out = ["all that others made (--ours)"] if args.ours else absent()
    has_mooncake = not args.ours and not mooncake.why_not()
    with Progress(console=Console(stderr=True)) as progress:
        steps = len(many_values.COUNTS) + len(SETS) * 4 * (args.rounds + 1) + has_mooncake * len(MOONCAKE_SETS) * 6 * args.rounds
        task = progress.add_task("measuring", total=steps)

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for value_bytes, batches in SETS:
            measure(make_load(value_bytes, batches), args.directory, args.rounds, samples, step, peers=not args.ours)
        if has_mooncake:
            measure_mooncake(args.rounds, samples, step)
        by_values = many_values.measure(args.directory, step)
    console.print(table(samples))
    console.print(many_values.table(by_values))
    for why in left_out:
        console.print(f"left out  {why}")
    for name, met, detail in (*goals(samples), *many_values.goals(by_values)):
        console.print(f"{'met   ' if met else 'MISSED'}  {name}: {detail}")
    took_s, after = time.monotonic() - started_s, os.getloadavg()
    content = {"machine": before, "load_average_after": after, "took_s": took_s, "left_out": left_out, "rows": rows(samples)}
    content["by_values"] = by_values
    args.output.write_text(json.dumps(content) + "\n")
    if before["load_average"][0] > 1:
        console.print(
            f"This machine was busy (load {before['load_average'][0]:.1f} on {os.cpu_count()} cores before): measure again."
        )
    console.print(f"{took_s:.0f} s; written to {args.output.name}")


if __name__ == "__main__":
    main()
