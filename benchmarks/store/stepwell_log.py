"""The log store as the cache drives it: operations for a `ThreadStoreExecutor` with four readers and one
writer, over `StoreWorker`.

A write is operations of 128 values, as plain's calls have them, but of no more bytes than the cache sends in one; sealed and
synced, one sealed while another is written. A read is what a prefetch of it is: operations of what suits the store, all handed
in at once, each value verified. Existence is one question to the store worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from stepwell.base.config import StoreConfig
from stepwell.base.ids import JobId
from stepwell.base.meters import SystemClock
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.tasks import FetchPages, FindItems, ItemStatus, PutPages, StoreOp, Task
from stepwell.jobs.executors import ThreadStoreExecutor
from stepwell.store.api import Store
from stepwell.store.log.opening import open_directory
from stepwell.store.log.writing.upkeep import Direct
from stepwell.store_tier.backup import CHUNK_BYTES
from stepwell.transfer.store_worker import StoreWorker
from store.load import BATCH, Load, Took, timed

ASKED = 4096
SEGMENT_BYTES = 256 << 20
NAMESPACE = Namespace(model="bench", layout="bench")


class Driver:
    """A store behind the cache's own worker and threads."""

    def __init__(self, store: Store, load: Load, *, chunk_bytes: int | None = None) -> None:
        self.store, self._load = store, load
        self.worker = StoreWorker(store, load.memory)
        self.space = self.worker.space(NAMESPACE)
        self._config = StoreConfig()
        self._store_executor = ThreadStoreExecutor(
            [self.worker], SystemClock(), readers=self._config.readers, writers=self._config.writers
        )
        self._chunk_bytes = chunk_bytes or store.traits.turn_bytes
        self._jobs = count(1)

    def write(self, life: int) -> None:
        keys = self._load.keys(life)
        ids = np.arange(self._load.count, dtype=np.int32)
        step = max(min(BATCH, CHUNK_BYTES // self._load.value_bytes), 1)
        starts = range(0, len(keys), step)
        self._run(
            [
                PutPages(parent=keys[at - 1] if at else None, first=at, keys=keys[at : at + step], ids=ids[at : at + step])
                for at in starts
            ]
        )

    def read(self, life: int) -> None:
        keys = self._load.keys(life)
        ids = np.arange(len(keys), 2 * len(keys), dtype=np.int32)
        step = max(self._chunk_bytes // self._load.value_bytes, 1)
        starts = range(0, len(keys), step)
        self._run([FetchPages(keys=keys[at : at + step], ids=ids[at : at + step]) for at in starts])

    def close(self) -> None:
        self._store_executor.close()
        self.store.close()

    def _run(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._store_executor.submit(StoreOp(job=JobId(next(self._jobs)), namespace=NAMESPACE, task=task))
        self._store_executor.drain(600)
        replies = self._store_executor.answers()
        assert len(replies) == len(tasks), f"{len(replies)} of {len(tasks)} operations came home"
        for reply in replies:
            bad = {status for status in reply.outcome.statuses if status is not ItemStatus.OK}
            assert not bad, f"{bad} {reply.outcome.error}"


class Log:
    """Opened as anybody opens it, with a small budget; every segment was written before, as plain's file was."""

    name = "log"

    def __init__(self, load: Load, directory: Path, *, direct: Direct = Direct.AUTO) -> None:
        self._load, self._directory = load, directory / "log"
        budget_bytes = load.total_bytes + 5 * SEGMENT_BYTES
        self.log = open_directory(
            self._directory, clock=SystemClock(), budget_bytes=budget_bytes, segment_bytes=SEGMENT_BYTES, direct=direct
        )
        self._driver = Driver(self.log, load)
        self._life = 0
        for life in range(-budget_bytes // load.total_bytes - 1, 0):
            self.write(life)

    def write(self, life: int) -> Took:
        self.log.clear(self._driver.space.digest)
        self._life = life
        self._load.keys(life)
        return timed(lambda: self._driver.write(life))

    def read(self) -> Took:
        return timed(lambda: self._driver.read(self._life))

    def exists(self) -> Took:
        return ask_all(self._driver, self._load.keys(self._life))

    def files(self) -> list[Path]:
        return sorted(self._directory.glob("*.seg"))

    def close(self) -> None:
        self._driver.close()


def ask_all(driver: Driver, keys: Sequence[PageKey]) -> Took:
    """One question for many keys, all of them there."""
    ask = FindItems(pages=tuple(keys[:ASKED]), boundaries=())

    def work() -> None:
        assert all(status is ItemStatus.OK for status in driver.worker.run(NAMESPACE, ask, _never).statuses)

    return timed(work)


def _never() -> bool:
    return False
