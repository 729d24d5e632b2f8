"""Mooncake over TCP in a private network: Stepwell's store beside the wheel's own `batch_get_into` on the same client.

Run by `mooncake_network.py` inside that network; prints one JSON line for each measurement. Another process lends the
memory that the values lie in. Raw means one thread, 128 values a call, no stamps; the store is driven as the cache drives it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests" / "mooncake")]

from mooncake_cluster import Cluster  # noqa: E402

from stepwell import Kind  # noqa: E402
from store.load import BATCH, Load, Took, make_load, timed  # noqa: E402
from store.stepwell_log import Driver  # noqa: E402

USUAL, WHOLE = "mooncake", "mooncake, 128 each"


class Raw:
    """The wheel's own calls on registered memory."""

    name = "raw Mooncake"

    def __init__(self, load: Load, client: Any) -> None:
        self._load, self._client = load, client
        self._first = int(load.memory.rows(Kind.PREFIX).__array_interface__["data"][0])
        self._stride = int(load.memory.rows(Kind.PREFIX).strides[0])
        self._names: list[str] = []

    def write(self, life: int) -> Took:
        self._names = [f"raw-{life}-{at}" for at in range(self._load.count)]
        return timed(lambda: self._move(self._client.batch_put_from, 0, lambda codes: not any(codes)))

    def read(self) -> Took:
        sizes = [self._load.value_bytes] * BATCH
        return timed(lambda: self._move(self._client.batch_get_into, self._load.count, lambda codes: codes == sizes))

    def forget(self) -> None:
        self._client.batch_remove(self._names, True)

    def _move(self, call: Any, first_page: int, is_good: Any) -> None:
        sizes = [self._load.value_bytes] * BATCH
        for at in range(0, self._load.count, BATCH):
            pointers = [self._first + (first_page + page) * self._stride for page in range(at, at + BATCH)]
            codes = list(call(self._names[at : at + BATCH], pointers, sizes))
            assert is_good(codes), f"Mooncake answered {codes[:4]}"


class Ours:
    """As the cache drives it, or with a whole batch of 128 to every reader, as raw has it."""

    def __init__(self, name: str, load: Load, driver: Driver) -> None:
        self.name, self._load, self._driver, self._life = name, load, driver, 0

    def write(self, life: int) -> Took:
        self._life = 2 * life + (self.name == WHOLE)
        life = self._life
        self._load.keys(life)
        return timed(lambda: self._driver.write(life))

    def read(self) -> Took:
        return timed(lambda: self._driver.read(self._life))

    def forget(self) -> None:
        self._driver.store.delete(self._driver.space, self._load.keys(self._life))


def run(load: Load, rounds: int, cluster: Cluster) -> None:
    memory = memoryview(load.memory.rows(Kind.PREFIX).base)
    store = cluster.open(staging_bytes=str(192 << 20))
    store.register([memory])
    raw = Raw(load, store._session.client._raw)
    usual, whole = Driver(store, load), Driver(store, load, chunk_bytes=load.batch_bytes)
    contenders: Sequence[Raw | Ours] = (Ours(USUAL, load, usual), Ours(WHOLE, load, whole), raw)
    for life in range(rounds + 1):
        for contender in contenders:
            _say(load, contender.name, "write", contender.write(life), life)
        for contender in contenders:
            load.forget_targets()
            _say(load, contender.name, "read", contender.read(), life)
            load.check_targets()
        for contender in contenders:
            contender.forget()
    store.close()


def _say(load: Load, name: str, operation: str, took: Took, life: int) -> None:
    if life:  # the first warms up
        row = {"value_bytes": load.value_bytes, "total_bytes": load.total_bytes, "name": name, "operation": operation}
        sys.stdout.write(json.dumps({**row, "wall_s": took.wall_s, "cpu_s": took.cpu_s}) + "\n")
        sys.stdout.flush()


def main() -> None:
    rounds, sets = int(sys.argv[1]), json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as directory:
        for value_bytes, batches in sets:
            load = make_load(value_bytes, batches)
            folder = Path(directory) / str(value_bytes)
            folder.mkdir()
            with Cluster(folder, ["--default_kv_lease_ttl=60000"]) as cluster:
                cluster.lend(str(4 * load.total_bytes + (256 << 20)))
                run(load, rounds, cluster)


if __name__ == "__main__":
    main()
