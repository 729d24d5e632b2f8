"""The cost of a full log by the number of its values: a put of a tenant at its quota, and the choice of a segment to reclaim.

Values are small, stand on each other in chains of 64, have all three levels, and lie in segments of one size. During the puts and
the reclaims another thread asks for values of another tenant.
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

from report import Goal, Row
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
PUT, CHOICE = "put at a quota, CPU ms", "choice of a segment, CPU ms"


def measure(where: Path, say: Callable[[str], object]) -> list[Row]:
    """One row for each number of values; its goals are judged against the first."""
    rows: list[Row] = []
    first: dict[str, float] = {}
    for number in COUNTS:
        say(f"a log of {number:,} values ...")
        with (
            tempfile.TemporaryDirectory(prefix="bench-store-", dir=where) as directory,
            closing(_opened(Path(directory), number)) as log,
        ):
            written = _fill(log, number)
            figures = _puts(log) | _choices(log, written)
            what = f"{log.stat().values:,} values"
        first = first or figures
        rows.append(Row(what=what, figures=figures))
        for name in (PUT, CHOICE):
            goal = Goal(value=figures[name] / first[name], limit=GOAL, most=True)
            rows += [Row(what=f"{what}, {name}, compared with the first", goal=goal)] if number == COUNTS[-1] else []
    return rows


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


def _puts(log: LogStore) -> dict[str, float]:
    first = 10**9
    log.write_from(ALICE, _writes(ALICE, first, 2 * QUOTA_BYTES // (3 * VALUE_BYTES)))  # alice is at her quota from here on
    wall_s, cpu_s = list[float](), list[float]()
    with _asking(log) as asked_s:
        for at in range(PUTS):
            writes = _writes(ALICE, 2 * first + at, 1)
            wall, cpu = time.perf_counter(), time.thread_time()
            log.write_from(ALICE, writes)
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.thread_time() - cpu)
    return {
        PUT: statistics.median(cpu_s) * 1e3, "by the clock": statistics.median(wall_s) * 1e3,
        "longest question meanwhile": max(asked_s) * 1e3,
    }  # fmt: skip


def _choices(log: LogStore, first: int) -> dict[str, float]:
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
        CHOICE: statistics.median(took_s) * 1e3, "the longest": max(took_s) * 1e3,
        "longest question while reclaiming": max(asked_s) * 1e3,
    }  # fmt: skip


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
