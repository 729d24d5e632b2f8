"""Two ranks over a real cluster: what they store serves them, new ones, and one rank, with the answers of one rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from mooncake_cluster import Cluster

from engine.worker_engines import FETCHED, answers, open_engine, prompt, same
from waiting import settle

FAMILIES = ["llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4"]
ASKED = [prompt(300), prompt(300)[:260] + prompt(60, seed=2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_two_ranks_store_in_a_cluster_serves_two_and_one(cluster: Cluster, family: str, tmp_path: Path) -> None:
    with open_engine(family, tmp_path, 1) as alone:
        expected = answers(alone, ASKED)
    cluster.lend("128mb")
    with open_engine(family, tmp_path, 2) as first:
        first.cache.store.attach(cluster.open(), FETCHED)
        same(answers(first, ASKED), expected)
        settle(first.cache)
        first.cache.flush()  # memory drops it, and the cluster does not
        found = answers(first, ASKED)
        same(found, expected)
        stored = found[0].usage.sources.store
        assert stored >= 256, found[0].usage.sources
        settle(first.cache)
        first.cache.audit()
    for ranks in (2, 1):  # other processes, and other host memory
        with open_engine(family, tmp_path, ranks) as later:
            later.cache.store.attach(cluster.open(), FETCHED)
            found = answers(later, ASKED)
            same(found, expected)
            assert found[0].usage.sources.store == stored, f"{ranks} ranks: {found[0].usage.sources}"
            settle(later.cache)
            later.cache.audit()
