"""What every contender moves: the same values from and into the same host pages, in batches of 128.

A contender keeps a set of values and is timed as a whole set at a time; what it needs before (a cold or warm page cache,
room for the next set) is not timed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from stepwell import CacheConfig, Kind, ModelSpec, Prefix, StateSpec, Tier
from stepwell.base.prompt import PageKey
from stepwell.cache.build import layouts_for
from stepwell.transfer.copy_engine import PageMemory

BATCH = 128
PAGE_TOKENS = 64
MANY_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Wall time, and CPU time of the process with all its threads; the kernel's own threads are in neither's account."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], None]) -> Took:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work()
    return Took(wall_s=time.perf_counter() - wall_s, cpu_s=time.process_time() - cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Values of one size. Host pages `0 .. count-1` hold them, pages `count .. 2*count-1` are what they are read into."""

    value_bytes: int
    batches: int
    memory: PageMemory

    @property
    def count(self) -> int:
        return self.batches * BATCH

    @property
    def total_bytes(self) -> int:
        return self.count * self.value_bytes

    @property
    def batch_bytes(self) -> int:
        return BATCH * self.value_bytes

    def source(self, at: int) -> memoryview:
        return self.memory.view(Kind.PREFIX, at)

    def target(self, at: int) -> memoryview:
        return self.memory.view(Kind.PREFIX, self.count + at)

    def keys(self, life: int) -> tuple[PageKey, ...]:
        """Names of the values in one of their lives: a value is written once in each."""
        return named(f"{self.value_bytes}/{life}", self.count)

    def forget_targets(self) -> None:
        self.memory.rows(Kind.PREFIX)[self.count : 2 * self.count] = 0

    def check_targets(self) -> None:
        """Asserts that every value arrived where it was wanted."""
        rows = self.memory.rows(Kind.PREFIX)
        assert np.array_equal(rows[: self.count], rows[self.count : 2 * self.count]), "a contender brought other bytes"


@cache
def named(what: str, count: int) -> tuple[PageKey, ...]:
    return tuple(PageKey(hashlib.blake2b(f"{what}/{at}".encode(), digest_size=32).digest()) for at in range(count))


def make_load(value_bytes: int, batches: int, host_block: Callable[[int], memoryview] | None = None) -> Load:
    """Its memory is `host_block(size)`, or its own."""
    pages = 2 * batches * BATCH
    kv = StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=value_bytes // PAGE_TOKENS, dtype="u8")
    spec = ModelSpec(name="bench-store", states=(kv,), page_tokens=PAGE_TOKENS)
    room = pages * value_bytes
    layout = layouts_for(spec, CacheConfig(device_bytes=room, host_bytes=room))[Tier.HOST]
    block = None if host_block is None else host_block(layout.size_bytes)
    load = Load(value_bytes=value_bytes, batches=batches, memory=PageMemory(spec, layout, block))
    rows = load.memory.rows(Kind.PREFIX)
    rng = np.random.default_rng(value_bytes)
    for at in range(load.count):
        rows[at] = np.frombuffer(rng.bytes(value_bytes), np.uint8)
    return load


class Contender(Protocol):
    """Keeps one set of values at a time."""

    name: str

    def write(self, life: int) -> Took:
        """Keeps the values of a life, in place of those of the last."""
        ...

    def read(self) -> Took:
        """Brings all values of the last life into their target pages."""
        ...

    def files(self) -> list[Path]:
        """Where its bytes are."""
        ...

    def close(self) -> None: ...


class Asked(Protocol):
    """A contender that can be asked which keys it has."""

    name: str

    def exists(self) -> Took:
        """Asks for the first 4,096 keys of the last life, which are all there."""
        ...


def chill(files: list[Path]) -> None:
    """Syncs files and drops them from the page cache."""
    if len(files) > MANY_FILES:
        os.sync()  # one by one would take minutes
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            if len(files) <= MANY_FILES:
                os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(files: list[Path]) -> None:
    """Reads files into the page cache."""
    buffer = bytearray(4 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
