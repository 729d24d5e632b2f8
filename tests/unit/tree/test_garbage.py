"""The garbage collector does not look at trees, and they do not need it: their last reference frees what leaves them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from random import Random

import pytest

from stepwell import ModelSpec, Point, Prefix, StateSpec, Tier, Window, WritePolicy
from stepwell.testing import digest_engine
from stepwell.tree.node import Checkpoint, Kids, Node, Residency, Run
from toys import HYBRID, Rig, text

PARTS = (Checkpoint, Kids, Node, Residency, Run)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def fill(rig: Rig, prompts: int) -> None:
    """Families of prompts that share a beginning, with answers: nodes are split, and checkpoints stand in many."""
    random = Random(1)
    for number in range(prompts):
        family = text(1000 + number // 8, random.randrange(4, 20))
        rig.serve_without_audit([*family, *text(number, random.randrange(4, 20))], answer=text(5000 + number, 6))


def collected() -> list[object]:
    """What the collector looks at, without what the model of digests remembers."""
    digest_engine._saved.cache_clear()
    digest_engine._seeds.cache_clear()
    gc.collect()
    return gc.get_objects()


def test_the_collector_looks_at_no_more_objects_for_a_larger_tree() -> None:
    rig = Rig(HYBRID, device_pages=8192, host_pages=8192, write=WritePolicy.THROUGH)
    fill(rig, 100)  # with all that is learned by then
    few = len(collected())
    fill(rig, 300)
    nodes = sum(1 for _ in rig.tree.nodes())
    assert nodes > 300 and len(collected()) - few < 50
    assert not any(type(each) in PARTS for each in collected())


def test_nothing_that_leaves_a_tree_waits_for_the_collector(no_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("stepwell.tree.node", "stepwell.tree.tree", "stepwell.tree.checkpoints", "stepwell.tree.eviction_order"):
        monkeypatch.setattr(f"{module}.untrack", lambda each: None)  # so that the collector would find it
    rig = Rig(HYBRID, device_pages=120, host_pages=160, write=WritePolicy.THROUGH)
    fill(rig, 120)
    assert rig.cache.counters["evicted_host_pages"] and rig.cache.counters["evicted_device_pages"]
    rig.cache.flush()
    rig.settle()
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.evict_all(tier)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    assert not [each for each in gc.garbage if type(each) in PARTS]


def test_a_cache_that_is_dropped_frees_its_tree() -> None:
    spec = ModelSpec(
        name="m", page_tokens=4,
        states=(
            StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=8, dtype="u8"),
            StateSpec(name="swa", shape=Window(tokens=8), layers=1, row_bytes=8, dtype="u8"),
            StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=32, dtype="u8"),
        ),
    )  # fmt: skip

    def live() -> None:
        rig = Rig(spec, device_pages=1024)
        fill(rig, 24)

    def blocks() -> int:
        collected()
        return sys.getallocatedblocks()

    live()
    before = blocks()
    for _ in range(5):
        live()
    assert blocks() - before < 1000, "five trees of some 50 nodes with their checkpoints"
