"""Masters and clients that die: a miss or an error in bounded time, never other bytes, and back to work afterwards."""

from __future__ import annotations

import time

import pytest
from mooncake_cluster import Cluster

from stepwell.base.errors import StoreError
from stepwell.store.api import Read, ReadOutcome, WriteOutcome
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.testing.store_contract import fetch, key, offer, space
from waiting import wait_until

HERE = space("faults")
BLOCKED_S = 30.0  # Mooncake gives up after 4.5 s, or after 90 s where it is left to itself; the rest is for a busy machine


def read(store: MooncakeStore, name: str) -> ReadOutcome:
    (result,) = store.read_into(HERE, [Read(key=key(name), into=memoryview(bytearray(1000)))])
    return result.outcome


def stores_again(store: MooncakeStore, name: str) -> bool:
    try:
        return store.write_from(HERE, [offer(HERE, name)]) == [WriteOutcome.STORED]
    except StoreError:
        return False


def test_a_dead_master_is_an_error_and_a_restarted_one_serves_again(cluster: Cluster) -> None:
    cluster.lend("32mb")
    store = cluster.open()
    store.write_from(HERE, [offer(HERE, "before")])
    cluster.master.kill()
    verbs = {
        "contains": lambda: store.contains(HERE, [key("before")]),
        "read": lambda: read(store, "before"),
        "write": lambda: store.write_from(HERE, [offer(HERE, "during")]),
        "delete": lambda: store.delete(HERE, [key("before")]),
    }
    for name, verb in verbs.items():
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="master"):
            verb()
        took_s = time.monotonic() - began_s
        assert took_s < BLOCKED_S, f"{name} blocked for {took_s:.1f} s"
    cluster.start_master()
    wait_until(lambda: stores_again(store, "after"), pause_s=0.1)
    assert fetch(store, HERE, "after") is not None
    assert read(store, "before") is ReadOutcome.MISSING, "a master alone remembers nothing"


def test_values_of_a_dead_client_are_lost_and_its_successor_serves(cluster: Cluster) -> None:
    holder, store = cluster.lend("32mb"), cluster.open()
    store.write_from(HERE, [offer(HERE, "x")])
    holder.kill()
    assert read(store, "x") is ReadOutcome.FAILED, "the master has not noticed yet, the value is out of reach"
    assert store.counters["mooncake_read_error_800"] == 1
    wait_until(lambda: read(store, "x") is ReadOutcome.MISSING, pause_s=0.1)
    assert store.write_from(HERE, [offer(HERE, "x")]) == [WriteOutcome.NO_ROOM], "no peer contributes memory any more"
    cluster.lend("32mb")
    wait_until(lambda: stores_again(store, "x"), pause_s=0.1)
    assert fetch(store, HERE, "x") is not None


def test_a_writer_killed_in_the_middle_leaves_nothing_torn(cluster: Cluster) -> None:
    cluster.lend("128mb")
    store = cluster.open()
    names = [f"value {i}" for i in range(150)]
    for life in range(3):
        writer = cluster.start()
        writer.tell("write", space="faults", names=[f"{name} of {life}" for name in names], size=200_000)
        wait_until(lambda: any(store.contains(HERE, [key(f"value 0 of {life}")])), pause_s=0.001)  # noqa: B023
        writer.kill()
        for name in names:
            fetch(store, HERE, f"{name} of {life}", 200_000)  # fails for bytes that are not the ones saved
    assert stores_again(store, "life goes on") and fetch(store, HERE, "life goes on") is not None


def test_a_store_without_a_master_is_not_opened(cluster: Cluster) -> None:
    cluster.master.kill()
    began_s = time.monotonic()
    with pytest.raises(StoreError, match="no Mooncake master at"):
        cluster.open()
    assert time.monotonic() - began_s < BLOCKED_S


def test_a_cluster_that_refuses_a_client_says_what_to_look_at(cluster: Cluster) -> None:
    with pytest.raises(StoreError, match="global_segment_size"):
        cluster.open(global_segment_size="32tb")


def test_memory_that_is_registered_twice_is_refused(cluster: Cluster) -> None:
    arena = memoryview(bytearray(100_000))
    store = cluster.open()
    with pytest.raises(StoreError, match="register"):
        store.register([arena, arena[1000:2000]])
    store.register([arena])
    store.register([arena[:]])  # the very same is no mistake
    with pytest.raises(StoreError, match="register"):
        store.register([arena[1000:2000]])
    store.unregister([arena])
    store.register([arena[1000:2000]])
