"""Pages survive a change of the number of ranks, and what ranks keep alike is on the host and in the store once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.worker_engines import FETCHED, FOUR, answers, open_engine, prompt, same
from stepwell.base.config import WritePolicy
from stepwell.base.ids import Tier
from stepwell.store.memory import MemoryStore
from waiting import settle

pytest.importorskip("transformers")

FAMILIES = ("llama", "gemma3", "qwen3_next", "deepseek_v32", "deepseek_v4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_two_ranks_stored_serves_one_and_four(family: str, root: Path, tmp_path: Path) -> None:
    asked, store = [prompt(300)], f"log:{tmp_path / 'store'}"
    with open_engine(FOUR + family, root, 1) as alone:
        expected = answers(alone, asked)
    fetched, host = [], []
    for ranks in (2, 1, 4):
        with open_engine(
            FOUR + family, root, ranks, store=store, store_config=FETCHED, write=WritePolicy.THROUGH
        ) as engine:  # fmt: skip
            found = answers(engine, asked)
            same(found, expected)
            settle(engine.cache)
            fetched.append(found[0].usage.sources.store)
            host.append(engine.cache.stats().tier(Tier.HOST).used_bytes)
            engine.cache.audit()
    assert fetched[0] == 0 and fetched[1] == fetched[2] >= 256, f"tokens from the store at 2, 1 and 4 ranks: {fetched}"
    assert host[1] == host[2] > 0, f"host bytes at 2, 1 and 4 ranks: {host}"


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_what_all_ranks_keep_is_on_the_host_and_in_the_store_once(family: str, root: Path) -> None:
    used = []
    for ranks in (1, 2, 4):
        with open_engine(FOUR + family, root, ranks, store="memory:") as engine:
            answers(engine, [prompt(300)])
            settle(engine.cache)
            (store,) = engine.stores
            assert isinstance(store, MemoryStore)
            used.append((engine.cache.stats().tier(Tier.HOST).used_bytes, store.used_bytes))
    assert used[0] == used[1] == used[2] and min(used[0]) > 0, f"host and store bytes at 1, 2 and 4 ranks: {used}"
