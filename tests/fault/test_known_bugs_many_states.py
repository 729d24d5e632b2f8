"""Known bugs of earlier systems, group H: several states that must agree on one boundary, and on one name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from stepwell import ConfigError, Kind, Namespace, Prefix, StateSpec, Tier
from stepwell.base.prompt import pack, page_keys
from stepwell.base.tasks import Purpose
from stepwell.tree.checkpoints import add_residency
from stepwell.tree.match import find
from stepwell.tree.node import Use
from toys import HYBRID, KV, Rig, model, swa, text

PAGES = 4


def _plant(rig: Rig, *, arrived: set[int], checkpoints: set[int], complete: set[int]) -> int:
    """A path of PAGES pages, some of them arrived, with checkpoints, some of them complete; returns where it resumes."""
    arena = rig.state.arena(Tier.DEVICE)
    packed = pack(text(1, PAGES * 4 + 1))
    pages = arena.alloc({Kind.PREFIX: PAGES})[Kind.PREFIX]
    arena.mark_ready(Kind.PREFIX, pages[sorted(arrived)])
    node = rig.tree.insert(rig.cache.namespace, packed, Tier.DEVICE, pages, Use(at_s=0.0))
    for page in sorted(checkpoints):
        span = len(rig.spec.window_span(page * 4))
        held = arena.alloc({Kind.WINDOW: span, Kind.POINT: 1})
        for kind, ids in held.items():
            arena.mark_ready(kind, ids)
        add_residency(
            rig.tree, node, page, Tier.DEVICE, windows=held[Kind.WINDOW], points=held[Kind.POINT], ready=page in complete, now=0.0
        )
    return find(rig.tree, rig.cache.namespace, packed, PAGES * 4 + 1).restore_tokens // 4


def test_restore_point_is_the_greatest_common_boundary_not_the_least_depth() -> None:
    """H1: prefix pages reach 3, checkpoints are at 1 and 4. The lesser of the deepest, 3, has no checkpoint: it is 1."""
    assert _plant(Rig(HYBRID), arrived={0, 1, 2}, checkpoints={1, 4}, complete={1, 4}) == 1


def test_restore_point_is_nothing_when_no_boundary_is_common() -> None:
    """H1: prefix pages reach 2, the only checkpoint is at 3: resuming at 2 would be wrong, so it is a miss."""
    assert _plant(Rig(HYBRID), arrived={0, 1}, checkpoints={3}, complete={3}) == 0


def test_restore_point_agrees_with_the_definition_for_every_presence() -> None:
    """H1, exhaustively: for every set of arrived pages and of complete checkpoints, the deepest boundary by definition."""
    every = [set(each) for size in range(PAGES + 1) for each in itertools.combinations(range(PAGES), size)]
    for arrived, complete in itertools.product(every, every):
        boundaries = {page + 1 for page in complete}
        legal = [b for b in boundaries if set(range(b)) <= arrived]
        found = _plant(Rig(HYBRID), arrived=arrived, checkpoints={1, 2, 3, 4}, complete=boundaries)
        assert found == max(legal, default=0), f"{arrived=} {boundaries=}"


def test_window_and_point_of_a_boundary_come_and_go_together() -> None:
    """H1: no tier ever has a boundary's window without its point, so there are no two depths to take the lesser of."""
    rig = Rig(HYBRID, device_pages=48, host_pages=40)
    for name in range(12):
        rig.serve([*text(1, 8), *text(name, 13)])
        for node in rig.tree.nodes():
            for checkpoint in (node.checkpoints or {}).values():
                for residency in checkpoint.residencies:
                    span = rig.spec.window_span(checkpoint.page * 4)
                    assert residency is None or (len(residency.windows), len(residency.points)) == (len(span), 1)


def test_kv_and_its_index_arrive_together_or_not_at_all() -> None:
    """H2: two states over one prefix are one object, so neither can be restored longer than the other."""
    index = StateSpec(name="index", shape=Prefix(ratio=2), layers=1, row_bytes=16, dtype="u8")
    rig = Rig(model(KV, index), device_pages=512, host_pages=512)
    prompt = text(1, 33)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(prompt)
    (copy,) = rig.executor.plan(rig.pending(Purpose.LOAD)[0]).copies
    assert copy.source.kind is Kind.PREFIX and len(copy.source.ids) == 8
    rig.fail_all()
    assert lease.failed
    rig.cache.release(lease)
    assert rig.restore(prompt) == 0
    assert rig.serve(prompt).computed == 33


def test_draft_rows_travel_in_the_page_of_the_model_they_draft_for() -> None:
    """H3: a draft's rows cannot be lost on the way down or up: they are a part of the same page."""
    draft = StateSpec(name="draft", shape=Prefix(), layers=1, row_bytes=8, dtype="u8", required=False)
    rig = Rig(model(KV, draft), device_pages=256, host_pages=256)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    checked = rig.engine.rows_checked
    assert rig.serve(text(1, 17)).host == 16
    assert rig.engine.rows_checked - checked >= 16 * 2 + 16  # two layers of KV and one of the draft


@pytest.mark.parametrize("window", [17, 64, 1000])
def test_window_longer_than_the_whole_prompt_restores(window: int) -> None:
    """H4: a window that reaches back beyond the first token needs what there is, no more."""
    rig = Rig(model(KV, swa(window)), host_pages=64)
    prompt = text(1, 17)
    rig.serve(prompt)
    assert rig.serve(prompt).device == 16
    rig.evict_all(Tier.DEVICE)
    assert rig.serve(prompt).host == 16


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_load_that_fails_on_one_rank_is_a_miss_for_all(failing_rank: int) -> None:
    """H5: one rank lost the window: no rank restores it, and the prompt is computed on all of them."""
    rig = Rig(HYBRID, host_pages=64, ranks=3)
    prompt = text(1, 17)
    rig.serve(prompt)
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(prompt)
    rig.executor.finish(rig.pending(Purpose.LOAD)[0], failing_rank=failing_rank)
    report = rig.cache.step()
    assert report.failed == (lease,) and lease.failed
    rig.cache.release(lease)
    rig.cache.audit()
    assert rig.restore(prompt) == 0
    assert rig.serve(prompt).computed == 17
    assert rig.serve(prompt).device == 16


def test_a_chain_continued_from_its_last_key_equals_one_made_at_once() -> None:
    """H6: a chain never starts anew in the middle: the keys of later pages depend on all that came before."""
    packed, size = pack(text(1, 40)), 16
    seed = Namespace(model="m", layout="l").digest
    whole = list(page_keys(seed, packed, size))
    head = list(page_keys(seed, packed[: 6 * size], size))
    assert head + list(page_keys(head[-1], packed[6 * size :], size)) == whole
    restarted = list(page_keys(seed, packed[6 * size :], size))
    assert not set(restarted) & set(whole)


@pytest.mark.parametrize("field", ["model", "shard", "adapter", "salt"])
def test_namespaces_never_meet_in_any_tier(field: str) -> None:
    """H7: the same tokens for another model, shard, adapter or tenant are other pages, with other names."""
    rig = Rig(HYBRID, host_pages=64)
    mine = rig.cache.namespace
    theirs = Namespace(**({"model": mine.model, "layout": mine.layout} | {field: "other"}))
    packed = pack(text(1, 17))
    assert not set(page_keys(mine.digest, packed, 16)) & set(page_keys(theirs.digest, packed, 16))
    rig.serve(text(1, 17))
    assert rig.cache.lookup(text(1, 17), namespace=theirs).known_tokens == 0
    with pytest.raises(ConfigError, match="another layout"):
        rig.cache.lookup(text(1, 17), namespace=replace(theirs, layout="x"))
    lease = rig.cache.acquire(rig.cache.lookup(text(1, 17), namespace=theirs))
    rig.prefill(lease)
    rig.cache.release(lease)
    rig.settle()
    for space in (mine, theirs):
        again = rig.cache.acquire(rig.cache.lookup(text(1, 17), namespace=space))
        rig.settle()
        rig.engine.check(again)
        rig.cache.release(again)
    rig.cache.clear(namespace=theirs)
    assert rig.cache.lookup(text(1, 17)).restore_tokens == 16
    assert rig.cache.lookup(text(1, 17), namespace=theirs).known_tokens == 0
