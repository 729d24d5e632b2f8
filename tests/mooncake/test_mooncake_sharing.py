"""Several clients of one cluster: what one writes the others read, bit for bit, through registered memory or not."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from mooncake_cluster import Cluster

from stepwell.store.api import Read, ReadOutcome, Write, WriteOutcome
from stepwell.store.registry import open_store
from stepwell.store.seal import Verdict, seal, verify
from stepwell.testing.store_contract import fetch, key, payload, space
from waiting import wait_until

HERE = space("shared")
LARGE = 400_000
NAMES = [f"value {i}" for i in range(20)]


def test_two_processes_share_values_both_ways(cluster: Cluster) -> None:
    peer, store = cluster.lend("128mb"), cluster.open()
    assert set(peer.ask("write", space="shared", names=NAMES, size=LARGE)) == {"STORED"}
    assert store.contains(HERE, [key(name) for name in (*NAMES, "none")]) == [True] * len(NAMES) + [False]
    assert all(fetch(store, HERE, name, LARGE) is not None for name in NAMES)
    assert fetch(store, space("another"), NAMES[0], LARGE) is None
    data = memoryview(payload("from here", LARGE))
    mine = Write(key=key("from here"), data=data, stamp=seal(HERE, key("from here"), data))
    assert store.write_from(HERE, [mine]) == [WriteOutcome.STORED]
    assert peer.ask("write", space="shared", names=["from here", NAMES[0]], size=LARGE) == ["EXISTS", "EXISTS"]
    assert peer.ask("read", space="shared", names=["from here", "none"], size=LARGE) == [True, False]
    assert peer.ask("delete", space="shared", names=["from here"]) == 1
    assert fetch(store, HERE, "from here", LARGE) is None


def test_a_space_is_cleared_for_all_and_no_other(cluster: Cluster) -> None:
    peer, store = cluster.lend("128mb"), cluster.open()
    for name in ("shared", "another"):
        assert set(peer.ask("write", space=name, names=NAMES, size=5000)) == {"STORED"}
    assert store.contains(HERE, [key(NAMES[0])]) == [True]  # a value with a lease goes too
    assert store.clear(HERE.digest) == len(NAMES) and store.clear(HERE.digest) == 0
    assert peer.ask("read", space="shared", names=NAMES[:2], size=5000) == [False, False]
    assert peer.ask("read", space="another", names=NAMES[:2], size=5000) == [True, True]


def test_values_move_through_the_registered_arena(cluster: Cluster) -> None:
    arena = memoryview(bytearray(2 * len(NAMES) * LARGE))
    cluster.lend("128mb")
    store = cluster.open()
    store.register([arena])
    pages = [arena[i * LARGE : (i + 1) * LARGE] for i in range(2 * len(NAMES))]
    writes = []
    for name, page in zip(NAMES, pages, strict=False):
        page[:] = payload(name, LARGE)
        writes.append(Write(key=key(name), data=page, stamp=seal(HERE, key(name), page)))
    assert store.write_from(HERE, writes) == [WriteOutcome.STORED] * len(NAMES)
    reads = [Read(key=key(name), into=page) for name, page in zip(NAMES, pages[len(NAMES) :], strict=True)]
    for write, read, result in zip(writes, reads, store.read_into(HERE, reads), strict=True):
        assert result.outcome is ReadOutcome.FOUND and result.stamp == write.stamp
        assert verify(HERE, read.key, read.into, result.stamp) is Verdict.INTACT and read.into == write.data
    for size in (LARGE - 1, LARGE + 1, 2 * LARGE):
        (result,) = store.read_into(HERE, [Read(key=key(NAMES[0]), into=arena[:size])])
        assert result.outcome is ReadOutcome.LENGTH, f"{size} bytes were filled from a value of {LARGE}"


def test_a_batch_far_beyond_one_call_arrives_whole(tmp_path: Path) -> None:
    names = [f"small {i}" for i in range(1500)]  # in one call of 3,000 slices the wheel hung for a minute, and stayed broken
    reads = [Read(key=key(name), into=memoryview(bytearray(5000))) for name in names]
    with Cluster(tmp_path, ["--default_kv_lease_ttl=60000"]) as cluster:  # a busy machine may take longer than the usual one
        peer, store = cluster.lend("128mb"), cluster.open()
        assert set(peer.ask("write", space="shared", names=names, size=5000)) == {"STORED"}
        assert {result.outcome for result in store.read_into(HERE, reads)} == {ReadOutcome.FOUND}
    assert all(bytes(read.into) == payload(name, 5000) for name, read in zip(names, reads, strict=True))


def test_a_second_copy_outlives_the_first_holder(cluster: Cluster) -> None:
    first, second = cluster.lend("64mb"), cluster.lend("64mb")
    store = cluster.open(replica_num="2")
    data = [memoryview(payload(name, LARGE)) for name in NAMES]
    writes = [Write(key=key(name), data=each, stamp=seal(HERE, key(name), each)) for name, each in zip(NAMES, data, strict=True)]
    assert store.write_from(HERE, writes) == [WriteOutcome.STORED] * len(NAMES)
    first.kill()
    wait_until(lambda: all(fetch(store, HERE, name, LARGE) is not None for name in NAMES), pause_s=0.1)
    assert all(second.ask("read", space="shared", names=NAMES, size=LARGE))


def test_tenants_of_a_strict_master_never_meet_and_keep_their_quota(tmp_path: Path) -> None:
    """Without --enable_multi_tenants they would share everything: then only spaces keep values apart."""
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n- name: alice\n  quota: 1MB\n- name: bob\n  quota: 8MB\n")
    with Cluster(tmp_path, ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}"]) as cluster:
        cluster.start(tenant_id="bob", global_segment_size="32mb")
        alice, bob = (cluster.start(tenant_id=tenant) for tenant in ("alice", "bob"))
        assert alice.ask("write", space="shared", names=["x"], size=LARGE) == ["STORED"]
        assert alice.ask("read", space="shared", names=["x"], size=LARGE) == [True]
        assert bob.ask("contains", space="shared", names=["x"]) == [False]
        assert alice.ask("write", space="shared", names=["large"], size=3 * LARGE) == ["NO_ROOM"]
        assert bob.ask("write", space="shared", names=["large"], size=3 * LARGE) == ["STORED"]


def test_a_store_is_opened_from_a_file_too(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(cluster.options(global_segment_size="16mb", soft_pin="enable", soft_pin_ttl_ms="60000")))
    with closing(open_store(f"mooncake:{path}")) as store:
        assert store.contains(HERE, [key("x")]) == [False] and store.traits.shared and store.traits.groups
