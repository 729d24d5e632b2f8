"""A log on a real file system that is smaller than its budget, and one that others fill up: values go, nothing breaks.

The file system is a small tmpfs in a mount namespace of its own, in which this file runs again as a program.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from stepwell.base.meters import SystemClock
from stepwell.store.api import Read, ReadOutcome, Space, Write, WriteOutcome
from stepwell.store.log.opening import open_directory
from stepwell.store.log.store import LogStore
from stepwell.store.seal import Verdict, seal, verify

MIB = 2**20
DISK_BYTES, SEGMENT_BYTES, VALUE_BYTES = 20 * MIB, 4 * MIB, 100_000
HERE = Space(digest=b"s" * 32)
MOUNT = f'mount -t tmpfs -o size={DISK_BYTES} tmpfs "$0" && exec "$@"'
IN_A_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT)


def run_on_a_small_disk(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*IN_A_NAMESPACE, str(directory), *command], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    try:
        tried = run_on_a_small_disk(tmp_path, "true")
    except FileNotFoundError:
        pytest.skip("there is no program 'unshare' here: apt-get install util-linux")
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here ({tried.stderr.strip()}): run as root, or as .ci/run prepares it")
    return tmp_path


@pytest.mark.parametrize("part", ["smaller_than_its_budget", "filled_by_others", "too_full_to_begin"])
def test_a_full_disk_costs_values_and_nothing_else(small_disk: Path, part: str) -> None:
    done = run_on_a_small_disk(small_disk, sys.executable, __file__, str(small_disk), part)
    assert done.returncode == 0, done.stderr


class Life:
    """Values written to one log, and what is still there of them."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self._random = np.random.default_rng(1)
        self._numbers = count()
        self._values: dict[bytes, memoryview] = {}

    def open(self) -> LogStore:
        return open_directory(self.disk / "log", clock=SystemClock(), budget_bytes=4 * DISK_BYTES, segment_bytes=SEGMENT_BYTES)

    def write(self, store: LogStore, num_values: int) -> Counter[WriteOutcome]:
        outcomes: Counter[WriteOutcome] = Counter()
        for _ in range(num_values):
            key, data = next(self._numbers).to_bytes(32, "big"), memoryview(self._random.bytes(VALUE_BYTES))
            self._values[key] = data
            outcomes.update(store.write_from(HERE, [Write(key=key, data=data, stamp=seal(HERE, key, data))]))
        store.audit()
        return outcomes

    def read(self, store: LogStore) -> int:
        """How many values are there; every other is a miss, and what is there is right."""
        into = [memoryview(bytearray(VALUE_BYTES)) for _ in self._values]
        results = store.read_into(HERE, [Read(key=key, into=to) for key, to in zip(self._values, into, strict=True)])
        outcomes = Counter(result.outcome for result in results)
        assert outcomes.keys() <= {ReadOutcome.FOUND, ReadOutcome.MISSING}, outcomes
        for (key, data), to, result in zip(self._values.items(), into, results, strict=True):
            if result.outcome is ReadOutcome.FOUND:
                assert to == data and verify(HERE, key, to, result.stamp) is Verdict.INTACT
        return outcomes[ReadOutcome.FOUND]

    def fill(self, *, but_bytes: int = 0) -> None:
        """Another program takes what is left of the disk."""
        with (self.disk / "else").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(65536)):
                    pass
            except OSError:
                pass
            file.truncate(max(file.tell() - but_bytes, 0))


def smaller_than_its_budget(life: Life) -> None:
    store = life.open()
    assert life.write(store, 600) == {WriteOutcome.STORED: 600}, "old values make space for new ones"
    assert store.counters.snapshot()["disk_full"] > 0
    kept = life.read(store)
    assert kept * VALUE_BYTES > DISK_BYTES / 3
    store.close()
    store = life.open()
    assert life.read(store) >= kept, "what was there when it was closed is there when it is opened"
    assert life.write(store, 50) == {WriteOutcome.STORED: 50}
    store.close()


def filled_by_others(life: Life) -> None:
    store = life.open()
    life.write(store, 100)
    life.fill()
    assert life.write(store, 300) == {WriteOutcome.STORED: 300}, "it goes on in the segments it has"
    kept = life.read(store)
    assert kept > 0
    store.close()  # there is no space for a snapshot
    store = life.open()
    assert life.read(store) >= kept
    store.close()


def too_full_to_begin(life: Life) -> None:
    life.fill(but_bytes=MIB)  # space for the log's small files, and for no segment
    store = life.open()
    assert life.write(store, 3) == {WriteOutcome.NO_ROOM: 3} and life.read(store) == 0
    assert store.counters.snapshot()["no_room"] == 3
    (life.disk / "else").unlink()
    assert life.write(store, 3) == {WriteOutcome.STORED: 3} and life.read(store) == 3, "it goes on when there is space"
    store.close()


if __name__ == "__main__":
    globals()[sys.argv[2]](Life(Path(sys.argv[1])))
