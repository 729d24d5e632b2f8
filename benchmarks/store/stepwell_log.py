"""The log store as the cache drives it: errands for a `ThreadPorter` with four readers and one writer, over `StoreHands`.

A write is an errand for each batch of 128 (the hands cut it at 32 MiB), sealed and synced. A read is what a prefetch of the whole
set is: errands of 8 MiB, all handed in at once, each value verified. Existence is one question to the hands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
from store.load import BATCH, Load, Took, timed

from stepwell.base.clock import SystemClock
from stepwell.base.config import StoreConfig
from stepwell.base.errand import Ask, Errand, Fate, FetchPages, PutPages, Task
from stepwell.base.ids import JobId
from stepwell.base.keys import Namespace
from stepwell.cache.porter import ThreadPorter
from stepwell.store.api import Store
from stepwell.store.log.opening import open_directory
from stepwell.store.log.probe import Direct
from stepwell.transfer.store_hands import StoreHands

ASKED = 4096
NAMESPACE = Namespace(model="bench", layout="bench")


class Driver:
    """A store behind the cache's own hands and threads."""

    def __init__(self, store: Store, load: Load) -> None:
        self.store, self._load = store, load
        self.hands = StoreHands(store, load.memory)
        self.space = self.hands.space(NAMESPACE)
        self._config = StoreConfig()
        self._porter = ThreadPorter([self.hands], SystemClock(), readers=self._config.readers, writers=self._config.writers)
        self._jobs = count(1)

    def write(self, life: int) -> None:
        keys = self._load.keys(life)
        ids = np.arange(self._load.count, dtype=np.int32)
        starts = range(0, len(keys), BATCH)
        self._run(
            [
                PutPages(parent=keys[at - 1] if at else None, first=at, keys=keys[at : at + BATCH], ids=ids[at : at + BATCH])
                for at in starts
            ]
        )

    def read(self, life: int) -> None:
        keys = self._load.keys(life)
        ids = np.arange(len(keys), 2 * len(keys), dtype=np.int32)
        step = max(self._config.fetch_chunk_bytes // self._load.value_bytes, 1)
        starts = range(0, len(keys), step)
        self._run([FetchPages(keys=keys[at : at + step], ids=ids[at : at + step]) for at in starts])

    def close(self) -> None:
        self._porter.close()
        self.store.close()

    def _run(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._porter.submit(Errand(job=JobId(next(self._jobs)), namespace=NAMESPACE, task=task, cancelled=_never))
        self._porter.drain(600)
        replies = self._porter.replies()
        assert len(replies) == len(tasks), f"{len(replies)} of {len(tasks)} errands came home"
        for reply in replies:
            bad = {fate for fate in reply.outcome.fates if fate is not Fate.OK}
            assert not bad, f"{bad} {reply.outcome.error}"


class Log:
    name = "log"

    def __init__(self, load: Load, directory: Path, *, direct: Direct = Direct.AUTO) -> None:
        self._load, self._directory = load, directory / "log"
        segment = 256 << 20
        need = -(-load.total_bytes // segment) + 1  # a set, and what is left of the last
        store = open_directory(
            self._directory, clock=SystemClock(), budget_bytes=(2 * need + 3) * segment, segment_bytes=segment, direct=direct
        )
        self.log = store
        self._driver = Driver(store, load)
        self._life = 0

    def write(self, life: int) -> Took:
        self.log.clear(self._driver.space.digest)  # the next set goes over blocks that were written before, as plain's does
        self._life = life
        self._load.keys(life)
        return timed(lambda: self._driver.write(life))

    def read(self) -> Took:
        return timed(lambda: self._driver.read(self._life))

    def exists(self) -> Took:
        return timed(self.asking(self._load.keys(self._life)))

    def asking(self, keys: Sequence[bytes]) -> Callable[[], None]:
        pages = tuple(keys)[:ASKED]

        def work() -> None:
            outcome = self._driver.hands.run(NAMESPACE, Ask(pages=pages, boundaries=()), _never)  # type: ignore[arg-type]
            assert all(fate is Fate.OK for fate in outcome.fates)

        return work

    def files(self) -> list[Path]:
        return sorted(self._directory.glob("*.seg"))

    def close(self) -> None:
        self._driver.close()


def _never() -> bool:
    return False
