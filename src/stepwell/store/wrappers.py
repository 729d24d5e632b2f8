"""Wrappers that make a store slow or faulty, for tests and for studies of a deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from threading import Lock
from typing import cast

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.store.api import (
    ListingStore,
    Read,
    ReadOutcome,
    ReadResult,
    SizedStore,
    Space,
    SpaceSize,
    Store,
    StoreSize,
    TimedRead,
    Traits,
    Write,
    WriteOutcome,
    clear,
    never,
    register,
    relevel,
    unregister,
)

TRIED_READERS = 4  # used by stores that measure their reads when opened


class Wrapper:
    """Delegates every verb. Subclasses change one or two."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def traits(self) -> Traits:
        return self._store.traits

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        return self._store.contains(space, keys)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        return self._store.read_into(space, reads, cancelled=cancelled)

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        return self._store.write_from(space, writes)

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        return self._store.delete(space, keys)

    def flush(self) -> None:
        self._store.flush()

    def close(self) -> None:
        self._store.close()

    def register(self, memory: Sequence[memoryview]) -> None:
        register(self._store, memory)

    def unregister(self, memory: Sequence[memoryview]) -> None:
        unregister(self._store, memory)

    def clear(self, digest: bytes) -> int:
        return clear(self._store, Space(digest=digest))

    def size(self) -> StoreSize:
        return cast(SizedStore, self._store).size()

    def largest_spaces(self, most: int) -> list[SpaceSize]:
        return cast(ListingStore, self._store).largest_spaces(most)

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        return relevel(self._store, space, keys, level)


class Slow(Wrapper):
    """Adds `latency_s` to every call, and time for its bytes at `bytes_per_s`. `sleep` is injected."""

    def __init__(
        self, store: Store, *, sleep: Callable[[float], None], latency_s: float = 0.0, bytes_per_s: float = float("inf")
    ) -> None:
        super().__init__(store)
        self._sleep = sleep
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    @property
    def traits(self) -> Traits:
        traits = super().traits
        return replace(traits, reads=tuple(map(self._slower, traits.reads)))

    def _slower(self, read: TimedRead) -> TimedRead:
        threads = min(max(read.size_bytes // self._store.traits.turn_bytes, 1), TRIED_READERS)
        return TimedRead(read.size_bytes, read.seconds + self._latency_s + read.size_bytes / threads / self._bytes_per_s)

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self._sleep(self._latency_s)
        return super().contains(space, keys)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        self._sleep(self._latency_s)
        results: list[ReadResult] = []
        for read in reads:  # one at a time, so that a cancellation takes effect in the middle of a slow batch
            results += super().read_into(space, [read], cancelled=cancelled)
            if results[-1].outcome is ReadOutcome.FOUND:
                self._sleep(len(read.into) / self._bytes_per_s)
        return results

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self._sleep(self._latency_s + sum(len(write.data) for write in writes) / self._bytes_per_s)
        return super().write_from(space, writes)

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        self._sleep(self._latency_s)
        return super().delete(space, keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The probability of each fault, from 0.0 (never) to 1.0 (always)."""

    fail: float = 0.0  # a call raises
    hang: float = 0.0  # a call takes `hang_s`
    short: float = 0.0  # a read delivers half of a value and says it was found
    flip: float = 0.0  # a read returns a value with one bit flipped
    swap: float = 0.0  # a read returns another value of the batch, with that value's stamp
    lose: float = 0.0  # an acknowledged value is lost
    hang_s: float = 3600.0


class Faulty(Wrapper):
    """Injects faults as configured, reproducibly: `random` is injected."""

    def __init__(self, store: Store, faults: Faults, *, random: Random, sleep: Callable[[float], None]) -> None:
        super().__init__(store)
        self.faults = faults
        self._random = random
        self._sleep = sleep
        self._lock = Lock()

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self._stumble()
        return super().contains(space, keys)

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        self._stumble()
        results = super().read_into(space, reads, cancelled=cancelled)
        return [self._spoil(space, reads, results, index) for index in range(len(reads))]

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self._stumble()
        results = super().write_from(space, writes)
        super().delete(space, [write.key for write in writes if self._happens(self.faults.lose)])
        return results

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        self._stumble()
        return super().delete(space, keys)

    def flush(self) -> None:
        self._stumble()
        super().flush()

    def _stumble(self) -> None:
        if self._happens(self.faults.hang):
            self._sleep(self.faults.hang_s)
        if self._happens(self.faults.fail):
            raise StoreError("a fault was injected")

    def _spoil(self, space: Space, reads: Sequence[Read], results: Sequence[ReadResult], index: int) -> ReadResult:
        result, into = results[index], reads[index].into
        if result.outcome is not ReadOutcome.FOUND or not len(into):
            return result
        if self._happens(self.faults.lose):
            super().delete(space, [reads[index].key])
            return ReadResult(outcome=ReadOutcome.MISSING)
        if self._happens(self.faults.short):
            into[len(into) // 2 :] = bytes(len(into) - len(into) // 2)
        if self._happens(self.faults.flip):
            bit = self._draw(len(into) * 8)
            into[bit // 8] ^= 1 << bit % 8
        if self._happens(self.faults.swap):
            other = self._draw(len(reads))
            if results[other].outcome is ReadOutcome.FOUND and len(reads[other].into) == len(into):
                into[:] = bytes(reads[other].into)
                return results[other]
        return result

    def _happens(self, chance: float) -> bool:
        with self._lock:
            return chance > 0 and self._random.random() < chance

    def _draw(self, below: int) -> int:
        with self._lock:
            return self._random.randrange(below)
