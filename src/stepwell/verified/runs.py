"""Values made of several runs of memory: what is read and written, and how runs are gathered and scattered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from stepwell.base.tasks import ItemStatus
from stepwell.store.api import KEY_BYTES, NO_PARENT

ALIGNMENT = 4096  # of values in one buffer: direct reads need it


class ReadRuns(NamedTuple):
    """A requested value, and the memory for exactly its bytes, run after run."""

    key: bytes
    runs: Sequence[memoryview]


class WriteRuns(NamedTuple):
    """A value to store: its bytes are those of its runs, one after the other. Parents are written before their children.

    `parent` is the value without which this one is useless: stores evict the deep end of a chain before its beginning.
    """

    key: bytes
    runs: Sequence[memoryview]
    parent: bytes = NO_PARENT
    depth: int = 0
    group: bytes = b""


V = TypeVar("V", ReadRuns, WriteRuns)


def must_be_sound(values: Sequence[ReadRuns] | Sequence[WriteRuns], *, writable: bool) -> None:
    """Raises ValueError for invalid keys or runs."""
    for value in values:
        if len(value.key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(value.key)}")
        for run in value.runs:
            if run.itemsize != 1 or run.ndim != 1 or not run.c_contiguous or (writable and run.readonly):
                raise ValueError("runs are contiguous memoryviews of bytes, to be read into writable ones; use .cast('B')")


def pieces(values: Sequence[V], most_bytes: int) -> list[tuple[int, Sequence[V]]]:
    """Groups of neighbouring values, each with the index of its first value; a value larger than `most_bytes` is alone."""
    cuts: list[int] = [0]
    size = 0
    for at, value in enumerate(values):
        own = sum([-(-len(run) // ALIGNMENT) * ALIGNMENT for run in value.runs])
        if size and size + own > most_bytes:
            cuts.append(at)
            size = 0
        size += own
    return [(start, values[start:end]) for start, end in zip(cuts, [*cuts[1:], len(values)], strict=True)]


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where values of these sizes begin, each at a multiple of a block, and how much memory they take together."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def gather(runs: Sequence[memoryview], into: memoryview) -> None:
    """Copies runs into one piece of memory, one after the other."""
    target, end = np.frombuffer(into, np.uint8), 0  # NumPy's copies release the GIL
    for run in filter(len, runs):
        target[end : end + len(run)] = np.frombuffer(run, np.uint8)
        end += len(run)


def scatter(value: memoryview, runs: Sequence[memoryview]) -> None:
    """The reverse of `gather`."""
    source, end = np.frombuffer(value, np.uint8), 0
    for run in filter(len, runs):
        np.frombuffer(run, np.uint8)[:] = source[end : end + len(run)]
        end += len(run)


def good_bytes(values: Sequence[V], statuses: Sequence[ItemStatus]) -> int:
    """Bytes of the values that are OK."""
    return sum([sum(map(len, value.runs)) for value, status in zip(values, statuses, strict=True) if status is ItemStatus.OK])
