"""A read from Mooncake in its parts, each timed apart: the wheel's calls, the stamp, the lane, the hash, the store, its readers.

    python benchmarks/store/mooncake_parts.py 524288 2 4       bytes of a value, batches of 128 values, rounds

Starts a master in a private network, as `make bench-store` does. Prints seconds of processor time of this process for a GiB, and
the speed by the clock; medians of rounds in which every part has its turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
TESTS = BENCHMARKS.parent / "tests"
sys.path[:0] = [str(BENCHMARKS), str(TESTS), str(TESTS / "mooncake")]

import xxhash  # noqa: E402
from mooncake_cluster import Cluster  # noqa: E402

from stepwell import Kind  # noqa: E402
from stepwell.cli.demo_cluster.private_network import inside, why_not  # noqa: E402
from stepwell.store.api import STAMP_BYTES, Read  # noqa: E402
from stepwell.store.mooncake.store import MooncakeStore  # noqa: E402
from store.load import BATCH, Load, Took, make_load, timed  # noqa: E402
from store.stepwell_log import Driver  # noqa: E402

INSIDE = "STEPWELL_BENCH_INSIDE"
LIFE = 1


class Parts:
    """One set of values, raw and with stamps before them; every part reads all of it."""

    def __init__(self, load: Load, store: MooncakeStore) -> None:
        self._load, self._store, self._raw = load, store, store._session.client._raw
        self._lane = store._session.writing
        self._stamped = load.value_bytes + STAMP_BYTES
        self._step = min(BATCH, self._lane._memory.nbytes // self._stamped)
        rows = load.memory.rows(Kind.PREFIX)
        first, stride = int(rows.__array_interface__["data"][0]), int(rows.strides[0])
        self._sources = [first + page * stride for page in range(load.count)]
        self._targets = [first + (load.count + page) * stride for page in range(load.count)]
        self._driver, self._small = Driver(store, load), Driver(store, load, chunk_bytes=load.batch_bytes)

    def parts(self) -> dict[str, Callable[[], None]]:
        return {
            "raw: batch_get_into": self._read_raw,
            "batch_get_into_multi_buffers": self._read_multi,
            "  with a stamp, into a lane": self._read_lane,
            "  and copied out of it": lambda: self._read_lane(copy=True),
            "  and hashed": lambda: self._read_lane(copy=True, digest=True),
            "  with a stamp, in two slices": self._read_two,
            "MooncakeStore.read_into": self._read_store,
            "as the cache does": lambda: self._driver.read(LIFE),
            "as the cache does, 128 values each": lambda: self._small.read(LIFE),
        }

    def write(self) -> None:
        size = self._load.value_bytes
        for at in range(0, self._load.count, BATCH):
            ours = slice(at, at + BATCH)
            assert not any(self._raw.batch_put_from(self._names("raw", ours), self._sources[ours], [size] * BATCH))
        for at in range(0, self._load.count, self._step):
            ours = slice(at, at + self._step)
            pointers = [[self._lane._address, source] for source in self._sources[ours]]
            sizes = [[STAMP_BYTES, size]] * len(pointers)
            assert not any(self._raw.batch_put_from_multi_buffers(self._names("stamped", ours), pointers, sizes))
        self._driver.write(LIFE)

    def close(self) -> None:
        for driver in (self._driver, self._small):
            driver._store_executor.close()

    def _read_raw(self) -> None:
        size = self._load.value_bytes
        for at in range(0, self._load.count, BATCH):
            ours = slice(at, at + BATCH)
            got = self._raw.batch_get_into(self._names("raw", ours), self._targets[ours], [size] * BATCH)
            assert list(got) == [size] * BATCH

    def _read_multi(self) -> None:
        size = self._load.value_bytes
        for at in range(0, self._load.count, BATCH):
            ours = slice(at, at + BATCH)
            self._get("raw", ours, [[target] for target in self._targets[ours]], [size])

    def _read_lane(self, *, copy: bool = False, digest: bool = False) -> None:
        size = self._stamped
        for at in range(0, self._load.count, self._step):
            ours = range(self._load.count)[at : at + self._step]
            self._get("stamped", slice(at, ours.stop), [[self._lane._address + size * i] for i in range(len(ours))], [size])
            for i, page in enumerate(ours):
                target = self._load.target(page)
                if copy:
                    target[:] = self._lane._memory[size * i + STAMP_BYTES : size * (i + 1)]
                if digest:
                    xxhash.xxh3_128_digest(target)

    def _read_two(self) -> None:
        for at in range(0, self._load.count, self._step):
            ours = slice(at, at + self._step)
            pointers = [[self._lane._address + STAMP_BYTES * i, target] for i, target in enumerate(self._targets[ours])]
            self._get("stamped", ours, pointers, [STAMP_BYTES, self._load.value_bytes])

    def _read_store(self) -> None:
        keys = self._load.keys(LIFE)
        for at in range(0, self._load.count, BATCH):
            self._store.read_into(
                self._driver.space, [Read(key=keys[page], into=self._load.target(page)) for page in range(at, at + BATCH)]
            )

    def _get(self, what: str, ours: slice, pointers: list[list[int]], sizes: list[int]) -> None:
        got = self._raw.batch_get_into_multi_buffers(self._names(what, ours), pointers, [sizes] * len(pointers))
        assert list(got) == [sum(sizes)] * len(pointers), f"Mooncake answered {got[:4]}"

    def _names(self, what: str, ours: slice) -> list[str]:
        return [f"{what}-{page}" for page in range(self._load.count)[ours]]


def measure(load: Load, rounds: int, cluster: Cluster) -> None:
    store = cluster.open(staging_bytes=str(192 << 20))
    store.register([memoryview(load.memory.rows(Kind.PREFIX).base)])
    all_parts = Parts(load, store)
    all_parts.write()
    took: dict[str, list[Took]] = {name: [] for name in all_parts.parts()}
    for life in range(rounds + 1):
        for name, part in all_parts.parts().items():
            one = timed(part)
            if life:  # the first warms up
                took[name].append(one)
    for name, each in took.items():
        wall_s, cpu_s = (statistics.median(times) for times in zip(*((one.wall_s, one.cpu_s) for one in each), strict=True))
        gib = load.total_bytes / 2**30
        sys.stdout.write(f"{name:36}{cpu_s / gib:8.2f} CPU s/GiB{load.total_bytes / wall_s / 1e9:8.2f} GB/s\n")
    all_parts.close()


def main() -> None:
    if INSIDE not in os.environ:
        if why := why_not():
            sys.exit(f"there is no private network: {why}")
        sys.exit(subprocess.run(inside([sys.executable, *sys.argv]), env=os.environ | {INSIDE: "1"}, check=False).returncode)
    value_bytes, batches, rounds = (int(each) for each in sys.argv[1:4])
    load = make_load(value_bytes, batches)
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), ["--default_kv_lease_ttl=60000"]) as cluster:
        cluster.lend(str(4 * load.total_bytes + (256 << 20)))
        measure(load, rounds, cluster)


if __name__ == "__main__":
    main()
