"""Every connector over one cluster: what one process saved another resumes, every byte of it, or misses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mooncake_cluster import Cluster

from processes import Peer
from stepwell.store.api import Read, ReadOutcome, Space, Write, WriteOutcome

pytest.importorskip("torch")

CONNECTED = Path(__file__).with_name("connected_peer.py")
POOLS = ("kv", "indexer", "swa", "mamba", "draft")
PAGES, KV_BYTES = 6, 2 * 2 * 4 * 2 * 8 * 2  # keys and values, layers, tokens, heads, width, bf16
Start = Callable[..., Peer]


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Start:
    """Starts a process with a connector over the cluster, which has a lender."""
    cluster.lend("64mb")
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps(cluster.options()))
    return lambda connector, **changes: cluster.start(CONNECTED, connector, str(file), json.dumps(changes))


def test_pages_of_every_pool_of_sglang_are_read_by_another_process(start: Start) -> None:
    first, second = (start("hicache") for _ in range(2))
    assert second.ask("find") == [] and second.ask("read") == {pool: [False] * PAGES for pool in POOLS}
    assert first.ask("save") == dict.fromkeys(POOLS, PAGES)
    assert second.ask("find") == [1, 2, 3, 4, 5, 6]
    assert second.ask("read") == {pool: [True] * PAGES for pool in POOLS}
    first.kill()
    assert start("hicache").ask("read") == {pool: [True] * PAGES for pool in POOLS}, "a third one, after the first was killed"


def test_pages_of_another_model_or_rank_are_never_found(start: Start) -> None:
    start("hicache").ask("save")
    for other in ({"model_name": "other"}, {"tp_rank": 1, "tp_size": 2}):
        assert start("hicache", **other).ask("find") == []


def test_one_flipped_bit_in_the_cluster_is_a_miss_and_deleted(start: Start, cluster: Cluster) -> None:
    first, second = (start("hicache") for _ in range(2))
    first.ask("save")
    digest, label, key = first.ask("where", page=3)
    _flip(cluster, Space(digest=bytes.fromhex(digest), label=label, tenant=""), bytes.fromhex(key))
    assert second.ask("read")["kv"] == [True, True, True, False, True, True]
    assert first.ask("find") == [1, 2, 3] and first.ask("save")["kv"] == PAGES and second.ask("read")["kv"] == [True] * PAGES


def _flip(cluster: Cluster, space: Space, key: bytes) -> None:
    """Exchanges a page for one that differs in one bit, under the stamp that it had."""
    store, page = cluster.open(), memoryview(bytearray(KV_BYTES))
    (found,) = store.read_into(space, [Read(key=key, into=page)])
    assert found.outcome is ReadOutcome.FOUND
    page[KV_BYTES // 2] ^= 1
    assert store.delete(space, [key]) == 1
    assert store.write_from(space, [Write(key=key, data=page, stamp=found.stamp)]) == [WriteOutcome.STORED]


def test_a_cluster_that_is_gone_is_a_miss(start: Start, cluster: Cluster) -> None:
    first = start("hicache")
    first.ask("save")
    cluster.master.kill()
    assert first.ask("read") == {pool: [False] * PAGES for pool in POOLS} and first.ask("find") == []


def test_the_linker_of_sglang_resumes_what_another_process_saved(start: Start) -> None:
    first, second = (start("linker") for _ in range(2))
    assert second.ask("read") == 0
    assert first.ask("save") is True
    first.kill()
    assert second.ask("read") == PAGES


def test_an_engine_like_vllm_resumes_what_another_process_saved(start: Start) -> None:
    first = start("vllm")
    assert first.ask("serve", tokens=45) == {"computed": 49, "store": 0}
    first.ask("close")
    second = start("vllm").ask("serve", tokens=45)
    assert second["computed"] <= 9 and second["store"] >= 40


def test_a_model_of_transformers_resumes_what_another_process_saved(start: Start) -> None:
    pytest.importorskip("transformers")
    first, second = (start("transformers") for _ in range(2))
    computed, resumed = first.ask("serve", tokens=100), second.ask("serve", tokens=100)
    assert (computed["cached"], resumed["cached"]) == (0, 96)
    assert resumed["digest"] == computed["digest"], "the logits have other bits"
