"""A pool that is full: groups go as a whole, pinned values last, and writers are refused only when nothing can go."""

from __future__ import annotations

from collections import Counter

from mooncake_cluster import Cluster

from stepwell.store.api import WriteOutcome
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.testing.store_contract import key, offer, space
from waiting import wait_until

HERE = space("pressure")
MEMBERS, SIZE = 5, 100_000  # of a checkpoint: four states and a manifest


def group_of(number: int) -> list[str]:
    return [f"checkpoint {number}, part {part}" for part in range(MEMBERS)]


def is_written(store: MooncakeStore, number: int) -> bool:
    """Writes a checkpoint, or what is missing of it."""
    group = f"checkpoint {number}".encode()
    outcomes = store.write_from(HERE, [offer(HERE, name, SIZE, group=group) for name in group_of(number)])
    return WriteOutcome.NO_ROOM not in outcomes


def test_checkpoints_are_evicted_whole(cluster: Cluster) -> None:
    cluster.lend("32mb")
    store = cluster.open()
    numbers = range(120)  # 60 MB
    for number in numbers:
        wait_until(lambda: is_written(store, number), pause_s=0.1)  # noqa: B023 - a busy machine may need more than one try
        store.write_from(HERE, [offer(HERE, f"page {number}", SIZE)])  # and pages without a group in between
    kept = [sum(store.contains(HERE, [key(name) for name in group_of(number)])) for number in numbers]
    assert set(kept) == {0, MEMBERS}, f"members kept of each checkpoint: {kept}"
    assert kept[-1] == MEMBERS and kept[0] == 0, "the youngest stay, the oldest go"


def test_a_full_pool_makes_room_for_what_is_new(cluster: Cluster) -> None:
    cluster.lend("32mb")
    store = cluster.open()
    outcomes: Counter[WriteOutcome] = Counter()
    for start in range(0, 1000, 50):  # 100 MB
        outcomes.update(store.write_from(HERE, [offer(HERE, f"value {i}", SIZE) for i in range(start, start + 50)]))
    assert outcomes[WriteOutcome.STORED] > 950, f"{outcomes}: without a moment to evict about 100 are refused"
    found = store.contains(HERE, [key(f"value {i}") for i in range(1000)])
    assert not found[0] and 100 < sum(found) < 340 and sum(found[-100:]) > sum(found[:100])


def test_a_value_larger_than_the_pool_is_refused(cluster: Cluster) -> None:
    cluster.lend("16mb")
    store = cluster.open(staging_bytes="96mb")
    assert store.write_from(HERE, [offer(HERE, "x", 20 * 2**20), offer(HERE, "y", SIZE)]) == [
        WriteOutcome.NO_ROOM,
        WriteOutcome.STORED,
    ]


def test_where_nobody_lends_memory_there_is_no_room(cluster: Cluster) -> None:
    store = cluster.open()
    assert store.write_from(HERE, [offer(HERE, "x")]) == [WriteOutcome.NO_ROOM]
    assert store.contains(HERE, [key("x")]) == [False]


def test_pinned_values_are_evicted_last(cluster: Cluster) -> None:
    cluster.lend("32mb")
    pinning, plain = cluster.open(soft_pin="enable", soft_pin_ttl_ms="600000"), cluster.open()
    pinned = [f"pinned {i}" for i in range(50)]
    assert set(pinning.write_from(HERE, [offer(HERE, name, SIZE) for name in pinned])) == {WriteOutcome.STORED}
    for start in range(0, 600, 50):
        plain.write_from(HERE, [offer(HERE, f"plain {i}", SIZE) for i in range(start, start + 50)])
    assert all(plain.contains(HERE, [key(name) for name in pinned]))
    assert not all(plain.contains(HERE, [key(f"plain {i}") for i in range(600)]))
