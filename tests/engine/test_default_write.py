"""The default write policy of an engine: it follows from what its tiers hold, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.families import checkpoint
from stepwell.base.config import WritePolicy
from stepwell.base.spec.presets import load_spec
from stepwell.engine import EngineConfig
from stepwell.engine.building import build_ranked
from stepwell.engine.building.build_ranked import held_by_all
from stepwell.engine.building.settings import write_for
from stepwell.store.memory import MemoryStore

MB = 10**6


def config(**more: Any) -> EngineConfig:
    return EngineConfig(device="cpu", host_memory="500MB", **more)


@pytest.mark.parametrize(("model", "ranks", "whole"), [("llama-3.1-8b", 4, 4), ("llama-3.1-8b", 16, 8), ("deepseek-v3", 8, 1)])
def test_ranks_hold_as_much_as_their_shares_add_up_to(model: str, ranks: int, whole: int) -> None:
    """Rows of heads are cut, to no less than a head; those that every rank has whole are held once, however many ranks."""
    spec = load_spec(model)
    assert held_by_all(100 * MB, spec, spec.for_ranks(ranks)) == whole * 100 * MB


def test_a_host_that_is_large_for_one_rank_may_be_small_for_all() -> None:
    spec = load_spec("llama-3.1-8b")
    assert write_for(config(), 100 * MB, None).write is WritePolicy.THROUGH
    held = held_by_all(100 * MB, spec, spec.for_ranks(2))
    assert write_for(config(), held, None).write is WritePolicy.EXCLUSIVE


def test_a_store_that_says_its_size_counts_with_it() -> None:
    stored = config(store="memory:")
    assert write_for(stored, 100 * MB, MemoryStore(1000 * MB)).write is WritePolicy.EXCLUSIVE
    assert write_for(stored, 100 * MB, MemoryStore(9000 * MB)).write is WritePolicy.THROUGH
    assert write_for(stored, 100 * MB, None).write is WritePolicy.THROUGH, "it does not say"


def test_rows_that_may_spill_are_on_the_host_at_once_and_the_reason_says_so() -> None:
    chosen = write_for(config(sparse="quest", hot_rows=64), 400 * MB, None)
    assert chosen.write is WritePolicy.THROUGH and "spill" in chosen.why
    named = write_for(replace(config(), write=WritePolicy.EXCLUSIVE), 400 * MB, None)
    assert named == (WritePolicy.EXCLUSIVE, "as requested")


class _NoWorkers:
    """Ranks that are never started, with so much memory each."""

    device_bytes = 100 * MB

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def start(self) -> None:
        pass

    close = start


def test_an_engine_of_ranks_asks_for_what_they_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")  # makes the checkpoint
    asked: list[int] = []

    def note(config: EngineConfig, device_bytes: int, store: object) -> None:
        asked.append(device_bytes)
        raise InterruptedError("this is all that was to be seen")

    monkeypatch.setattr(build_ranked, "RankWorkers", _NoWorkers)
    monkeypatch.setattr(build_ranked, "write_for", note)
    with pytest.raises(InterruptedError):
        build_ranked.build_ranked("llama", checkpoint("llama"), config(tensor_parallel=2), None)
    assert asked == [200 * MB]
