"""What `bench_store.py` compares: the logs as the cache drives them, and one file that is written and read plainly.

Every contender moves the same values from and into the same host pages, in batches of 128, and is timed for a whole set at once.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from stepwell import CacheConfig, Kind, ModelSpec, Prefix, StateSpec, Tier
from stepwell.base.config import StoreConfig
from stepwell.base.ids import JobId
from stepwell.base.meters import SystemClock
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.tasks import FetchPages, ItemStatus, PutPages, StoreOp, Task
from stepwell.cache.build import layouts_for
from stepwell.jobs.children import start_child
from stepwell.jobs.executors import ThreadStoreExecutor
from stepwell.store.api import Store
from stepwell.store.log.opening import open_directory
from stepwell.store.registry import open_store
from stepwell.store_tier.backup import CHUNK_BYTES
from stepwell.transfer.copy_engine import PageMemory
from stepwell.transfer.store_worker import StoreWorker

BATCH, PAGE_TOKENS = 128, 64
SEGMENT_BYTES = 256 << 20
NAMESPACE = Namespace(model="bench", layout="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Wall time, and CPU time of this process with all its threads."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], None]) -> Took:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work()
    return Took(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s)


class Load:
    """Values of one size. Host pages `0 .. count-1` hold them, pages `count .. 2*count-1` are what they are read into."""

    def __init__(self, value_bytes: int, batches: int) -> None:
        self.value_bytes, self.batches, self.count = value_bytes, batches, batches * BATCH
        self.total_bytes = self.count * value_bytes
        kv = StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=value_bytes // PAGE_TOKENS, dtype="u8")
        spec = ModelSpec(name="bench-store", states=(kv,), page_tokens=PAGE_TOKENS)
        size = 2 * self.total_bytes
        self.memory = PageMemory(spec, layouts_for(spec, CacheConfig(device_bytes=size, host_bytes=size))[Tier.HOST])
        self._rows = self.memory.rows(Kind.PREFIX)
        rng = np.random.default_rng(value_bytes)
        for at in range(self.count):
            self._rows[at] = np.frombuffer(rng.bytes(value_bytes), np.uint8)

    def views(self, batch: int, *, target: bool) -> list[memoryview]:
        first = batch * BATCH + (self.count if target else 0)
        return [self.memory.view(Kind.PREFIX, at) for at in range(first, first + BATCH)]

    def keys(self, life: int) -> tuple[PageKey, ...]:
        """Names of the values in one of their lives: a value is written once in each."""
        return _named(f"{self.value_bytes}/{life}", self.count)

    def clear_targets(self) -> None:
        self._rows[self.count : 2 * self.count] = 0

    def check_targets(self) -> None:
        sources, targets = self._rows[: self.count], self._rows[self.count : 2 * self.count]
        assert np.array_equal(sources, targets), "a contender read other bytes"


@cache
def _named(what: str, number: int) -> tuple[PageKey, ...]:
    return tuple(PageKey(hashlib.blake2b(f"{what}/{at}".encode(), digest_size=32).digest()) for at in range(number))


class Contender(Protocol):
    """Keeps one set of values at a time."""

    name: str

    def write(self, life: int) -> Took:
        """Keeps the values of a life in place of those of the last."""
        ...

    def read(self) -> Took:
        """Reads all values of the last life into their target pages."""
        ...

    def files(self) -> list[Path]: ...

    def close(self) -> None: ...


class Plain:
    """The yardstick: one file, one thread, one `pwritev` or `preadv` a batch, one `fdatasync` after each write. No checksums."""

    def __init__(self, load: Load, directory: Path, *, direct: bool) -> None:
        self.name = "plain direct" if direct else "plain"
        self._load = load
        self._path = directory / f"{self.name}.bin"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, load.total_bytes)
        self._fd = os.open(self._path, os.O_RDWR | os.O_DIRECT) if direct else fd
        if direct:
            os.close(fd)

    def write(self, life: int) -> Took:
        return timed(lambda: self._move(os.pwritev, target=False))

    def read(self) -> Took:
        return timed(lambda: self._move(os.preadv, target=True))

    def _move(self, call: Callable[[int, list[memoryview], int], int], *, target: bool) -> None:
        size = BATCH * self._load.value_bytes
        for batch in range(self._load.batches):
            moved = call(self._fd, self._load.views(batch, target=target), batch * size)
            assert moved == size, f"{moved=}"
            if not target:
                os.fdatasync(self._fd)

    def files(self) -> list[Path]:
        return [self._path]

    def close(self) -> None:
        os.close(self._fd)


class Driver:
    """A store behind the cache's own worker and threads: four readers and one writer.

    A write is operations of 128 values, but of no more bytes than the cache sends in one; one is sealed while another is written
    and synced. A read is operations of the size that suits the store, submitted all at once, each value verified.
    """

    def __init__(self, store: Store, load: Load) -> None:
        self.store, self._load = store, load
        worker, config = StoreWorker(store, load.memory), StoreConfig()
        self.space = worker.space(NAMESPACE)
        self._executor = ThreadStoreExecutor([worker], SystemClock(), readers=config.readers, writers=config.writers)
        self._jobs = count(1)

    def write(self, life: int) -> None:
        keys, ids = self._load.keys(life), np.arange(self._load.count, dtype=np.int32)
        step = max(min(BATCH, CHUNK_BYTES // self._load.value_bytes), 1)
        self._run([
            PutPages(parent=keys[at - 1] if at else None, first=at, keys=keys[at : at + step], ids=ids[at : at + step])
            for at in range(0, len(keys), step)
        ])  # fmt: skip

    def read(self, life: int) -> None:
        keys, ids = self._load.keys(life), np.arange(self._load.count, 2 * self._load.count, dtype=np.int32)
        step = max(self.store.traits.turn_bytes // self._load.value_bytes, 1)
        self._run([FetchPages(keys=keys[at : at + step], ids=ids[at : at + step]) for at in range(0, len(keys), step)])

    def close(self) -> None:
        self._executor.close()
        self.store.close()

    def _run(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._executor.submit(StoreOp(job=JobId(next(self._jobs)), namespace=NAMESPACE, task=task))
        self._executor.drain(600)
        replies = self._executor.answers()
        assert len(replies) == len(tasks), f"{len(replies)} of {len(tasks)} operations were answered"
        for reply in replies:
            bad = {status for status in reply.outcome.statuses if status is not ItemStatus.OK}
            assert not bad, f"{bad} {reply.outcome.error}"


class Log:
    """Opened with a small budget. Every segment was written before, as the file of `Plain` was."""

    name = "log"

    def __init__(self, load: Load, directory: Path) -> None:
        self._load, self._directory, self._life = load, directory / "log", 0
        budget_bytes = load.total_bytes + 5 * SEGMENT_BYTES
        self._log = open_directory(self._directory, clock=SystemClock(), budget_bytes=budget_bytes, segment_bytes=SEGMENT_BYTES)
        self._driver = Driver(self._log, load)
        for life in range(-budget_bytes // load.total_bytes - 1, 0):
            self.write(life)

    def write(self, life: int) -> Took:
        self._log.clear(self._driver.space.digest)
        self._life = life
        self._load.keys(life)
        return timed(lambda: self._driver.write(life))

    def read(self) -> Took:
        return timed(lambda: self._driver.read(self._life))

    def files(self) -> list[Path]:
        return sorted(self._directory.glob("*.seg"))

    def close(self) -> None:
        self._driver.close()


OWNER = """
import sys
from stepwell.store.registry import open_store
store = open_store(sys.argv[1], options={"budget": sys.argv[2], "segment": sys.argv[3]})
assert store.owns
print("open", flush=True)
sys.stdin.read()
store.close()
"""


class SharedLogClient:
    """The shared log from a process that does not own it. CPU time is of this process alone."""

    name = "shared log, client"

    def __init__(self, load: Load, directory: Path) -> None:
        self._load, self._directory, self._life = load, directory / "shared", 0
        where, budget_bytes = f"shared-log:{self._directory}", load.total_bytes + 5 * SEGMENT_BYTES
        command = [sys.executable, "-c", OWNER, where, str(budget_bytes), str(SEGMENT_BYTES)]
        self._owner = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._owner.stdout is not None and self._owner.stdout.readline() == b"open\n"
        self._driver = Driver(open_store(where), load)
        for life in range(-budget_bytes // load.total_bytes - 1, 0):
            self.write(life)

    def write(self, life: int) -> Took:
        self._driver.store.delete(self._driver.space, list(self._load.keys(self._life)))
        self._life = life
        self._load.keys(life)
        return timed(lambda: self._driver.write(life))

    def read(self) -> Took:
        return timed(lambda: self._driver.read(self._life))

    def files(self) -> list[Path]:
        return sorted(self._directory.glob("*.seg"))

    def close(self) -> None:
        self._driver.close()
        self._owner.communicate()
