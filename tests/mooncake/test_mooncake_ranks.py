"""Two ranks over a real cluster: what they store serves them, new ones, and one rank, with the answers of one rank alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from mooncake_cluster import Cluster

from engine.worker_engines import open_engine
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine import Answer, Engine
from waiting import settle

FETCHED = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
TOLERANCE = 1e-4  # of logprobs: two ranks add up in another order than one


def asked() -> list[list[int]]:
    draw = random.Random(3)
    first = [draw.randrange(128) for _ in range(300)]
    return [first, first[:260] + [draw.randrange(128) for _ in range(60)]]


def answers(engine: Engine) -> list[Answer]:
    return [engine.generate(each, max_tokens=6, logprobs=1, ignore_eos=True) for each in asked()]


def same(ours: list[Answer], theirs: list[Answer]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        apart = max(abs(a.logprob - b.logprob) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        assert apart < TOLERANCE, f"logprobs differ by {apart}"


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_what_two_ranks_store_in_a_cluster_serves_two_and_one(cluster: Cluster, family: str, tmp_path: Path) -> None:
    with open_engine(family, tmp_path, 1) as alone:
        expected = answers(alone)
    cluster.lend("128mb")
    with open_engine(family, tmp_path, 2) as first:
        first.cache.store.attach(cluster.open(), FETCHED)
        same(answers(first), expected)
        settle(first.cache)
        first.cache.flush()  # memory forgets it, and the cluster does not
        found = answers(first)
        same(found, expected)
        stored = found[0].usage.sources.store
        assert stored >= 256, found[0].usage.sources
        settle(first.cache)
        first.cache.audit()
    for ranks in (2, 1):  # other processes, and other host memory
        with open_engine(family, tmp_path, ranks) as later:
            later.cache.store.attach(cluster.open(), FETCHED)
            found = answers(later)
            same(found, expected)
            assert found[0].usage.sources.store == stored, f"{ranks} ranks: {found[0].usage.sources}"
            settle(later.cache)
            later.cache.audit()
