"""What a full log costs by the number of its values: a put of a tenant at its quota, and the choice of a segment to reclaim.

Values are small and stand on each other in chains of 64, of all three levels, in segments of the same size at any number of
values. While the puts and the reclaims go on, another thread asks for values of another tenant.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from stepwell.base.ids import Level
from stepwell.base.meters import SystemClock
from stepwell.store.api import NO_PARENT, Space, Write
from stepwell.store.log.opening import open_directory
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.store.seal import seal

COUNTS = (2_000, 100_000, 1_000_000)
SEGMENT_BYTES = 128 << 10  # some 600 values
QUOTA_BYTES = 128 << 10
VALUE_BYTES, CHAIN, BATCH = 64, 64, 500
DISK_BYTES = 640  # of a value: its place in a segment, in a snapshot and in the next one
BOB, ALICE = Space(digest=b"b" * 32, tenant="bob"), Space(digest=b"a" * 32, tenant="alice")
PUTS, RECLAIMED = 200, 40
GOAL = 2.0  # times the cost at the smallest number of values

Row = dict[str, Any]


def measure(where: Path, step: Callable[[str], None]) -> list[Row]:
    """One row for each number of values."""
    where.mkdir(parents=True, exist_ok=True)
    rows = []
    for count in COUNTS:
        with (
            tempfile.TemporaryDirectory(prefix="bench-store-", dir=where) as directory,
            closing(_opened(Path(directory), count)) as log,
        ):
            written = _fill(log, count)
            rows.append({"values": log.stat().values, **_puts(log), **_choices(log, written)})
        step(f"{count:,} values")
    return rows


def table(rows: list[Row]) -> Table:
    out = Table(title="A full log by the number of its values, ms", caption="CPU time of the writer; waits are the longest, wall")
    for column in (
        "values",
        "put at a quota",
        "longest question meanwhile",
        "choice of a segment",
        "longest",
        "longest question",
    ):
        out.add_column(column, justify="right")
    columns = ("put_ms", "put_asked_ms", "choice_ms", "choice_most_ms", "reclaim_asked_ms")
    for row in rows:
        out.add_row(f"{row['values']:,}", *(f"{row[column]:.2f}" for column in columns))
    return out


def goals(rows: list[Row]) -> list[tuple[str, bool, str]]:
    first, last = rows[0], rows[-1]
    found = []
    for what, name in (("put_ms", "a put at its quota"), ("choice_ms", "the choice of a segment")):
        times = last[what] / first[what]
        found.append(
            (f"{name}, {last['values']:,} values: within {GOAL:.0f}x", times <= GOAL, f"{times:.2f}x of {first['values']:,}")
        )
    return found


def _opened(directory: Path, count: int) -> LogStore:
    return open_directory(
        directory, budget_bytes=max(count * DISK_BYTES, 8 * SEGMENT_BYTES) + QUOTA_BYTES, segment_bytes=SEGMENT_BYTES,
        direct=Direct.OFF, quotas={"alice": QUOTA_BYTES}, clock=SystemClock(),
    )  # fmt: skip


def _writes(space: Space, first: int, count: int) -> list[Write]:
    writes: list[Write] = []
    for at in range(count):
        key = hashlib.blake2b(b"%d" % (first + at), digest_size=32).digest()
        data = memoryview(key * 2)[:VALUE_BYTES]
        parent = writes[-1].key if at % CHAIN else NO_PARENT
        level = Level((first + at) * 7 % 10 // 4)  # 40, 40 and 20 of a hundred
        writes.append(Write(key=key, data=data, stamp=seal(space, key, data), parent=parent, depth=at % CHAIN, level=level))
    return writes


def _fill(log: LogStore, count: int) -> int:
    """Writes values of bob until there are as many, or the log is full; returns how many were written."""
    written = 0
    while log.stat().values < count and not log.counters["dropped_values"]:
        log.write_from(BOB, _writes(BOB, written, BATCH))
        written += BATCH
    return written


def _puts(log: LogStore) -> Row:
    first = 10**9
    log.write_from(ALICE, _writes(ALICE, first, 2 * QUOTA_BYTES // (3 * VALUE_BYTES)))  # alice has all she may have from here on
    wall_s, cpu_s = list[float](), list[float]()
    with _asking(log) as asked_s:
        for at in range(PUTS):
            writes = _writes(ALICE, 2 * first + at, 1)
            wall, cpu = time.perf_counter(), time.thread_time()
            log.write_from(ALICE, writes)
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.thread_time() - cpu)
    return {
        "put_ms": statistics.median(cpu_s) * 1e3,
        "put_wall_ms": statistics.median(wall_s) * 1e3,
        "put_asked_ms": max(asked_s) * 1e3,
    }


def _choices(log: LogStore, first: int) -> Row:
    reclaim, took_s = log._writer.reclaim, list[float]()
    plan = reclaim._plan

    def timed() -> Any:
        started = time.thread_time()
        try:
            return plan()
        finally:
            took_s.append(time.thread_time() - started)

    reclaim._plan = timed  # type: ignore[method-assign]
    with _asking(log) as asked_s:
        while len(took_s) < RECLAIMED:
            log.write_from(BOB, _writes(BOB, first, BATCH))
            first += BATCH
    return {
        "choice_ms": statistics.median(took_s) * 1e3,
        "choice_most_ms": max(took_s) * 1e3,
        "reclaim_asked_ms": max(asked_s) * 1e3,
    }


@contextmanager
def _asking(log: LogStore) -> Iterator[list[float]]:
    """How long each of a second thread's questions took, asked one after the other."""
    took_s, ended, keys = [0.0], threading.Event(), [write.key for write in _writes(BOB, 0, 16)]

    def ask() -> None:
        while not ended.wait(0.001):
            started = time.perf_counter()
            log.contains(BOB, keys)
            took_s.append(time.perf_counter() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took_s
    finally:
        ended.set()
        thread.join()
