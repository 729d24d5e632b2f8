"""Lookup: pure, and as deep as everything that is needed."""

from __future__ import annotations

from dataclasses import replace

from tree_bench import GONE, SPACE, Bench

from stepwell import Kind, Tier
from stepwell.base.ids import CACHED_KINDS
from stepwell.tree.checkpoints import residency_arrived
from stepwell.tree.pruning import discard_ids
from toys import FULL


def _fingerprint(bench: Bench) -> object:
    nodes = [
        (n.start, n.num_pages, n.used_at, n.hits, n.urgent_until, n.expires_at, sorted(n.checkpoints or {}))
        for n in bench.tree.nodes()
    ]
    notes = [dict(each.of(n)) for n in bench.tree.nodes() for each in (bench.tree.lost, bench.tree.lost_checkpoints)]
    arenas = [(a.refs[k].tobytes(), a.state[k].tobytes()) for a in bench.tree.arenas.values() for k in CACHED_KINDS]
    heaps = [len(order) for orders in bench.tree.ranking._orders.values() for order in orders]
    return nodes, notes, arenas, heaps, bench.tree.version, len(bench.tree.roots)


def test_lookup_changes_nothing() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.insert([1, 2, 7])
    bench.checkpoint([1, 2, 3, 4], 3)
    before = _fingerprint(bench)
    for path in ([1, 2, 3, 4], [1, 2], [1, 2, 3, 9], [5], [1]):
        bench.match(path)
    assert _fingerprint(bench) == before


def test_known_counts_pages_of_text_restore_counts_what_can_be_used() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.checkpoint([1, 2, 3, 4], 2)
    match = bench.match([1, 2, 3, 4, 5])
    assert (match.known_tokens, match.arrived_tokens, match.restore_tokens) == (16, 16, 8)
    assert "restore 8 of 21 tokens" in repr(match)


def test_the_last_token_is_not_restored_unless_a_limit_includes_it() -> None:
    bench = Bench(FULL)
    bench.insert([1, 2, 3])
    assert bench.match([1, 2, 3], extra_tokens=0).restore_tokens == 8
    for limit, restored in ((100, 12), (12, 12), (11, 8)):
        match = bench.match([1, 2, 3], extra_tokens=0, limit_tokens=limit)
        assert (match.restore_tokens, match.limit_tokens) == (restored, restored)
    assert bench.match([1, 2, 3], extra_tokens=1).restore_tokens == 12


def test_pages_on_their_way_are_known_but_not_used() -> None:
    bench = Bench(FULL)
    pages = bench.insert([1, 2, 3, 4], ready=False)
    bench.arena().mark_ready(Kind.PREFIX, pages[[0, 1, 3]])
    bench.tree.refresh(Tier.DEVICE, pages)
    match = bench.match([1, 2, 3, 4])
    assert (match.known_tokens, match.arrived_tokens, match.restore_tokens) == (16, 8, 8)


def test_tiers_fill_each_others_gaps() -> None:
    bench = Bench(FULL)
    bench.insert([1, 2])
    pages = bench.insert([1, 2, 3, 4], tier=Tier.HOST)
    discard_ids(bench.tree, Tier.HOST, pages[:1], GONE)
    match = bench.match([1, 2, 3, 4])
    assert (match.restore_tokens, match.device_tokens, match.host_tokens) == (16, 8, 8)


def test_a_checkpoint_deeper_than_the_prompt_is_not_used() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    for page in (1, 4):
        bench.checkpoint([1, 2, 3, 4], page)
    assert bench.match([1, 2, 3, 4], extra_tokens=0).restore_tokens == 4
    assert bench.match([1, 2, 3, 4]).restore_tokens == 16
    assert bench.match([1, 2, 9]).restore_tokens == 4


def test_an_unfinished_checkpoint_is_not_used() -> None:
    bench = Bench()
    bench.insert([1, 2, 3])
    bench.checkpoint([1, 2, 3], 1)
    residency = bench.checkpoint([1, 2, 3], 3, Tier.HOST, ready=False)
    assert bench.restore([1, 2, 3]) == 1
    assert residency is not None
    for kind, ids in residency.spans():
        bench.arena(Tier.HOST).mark_ready(kind, ids)
    residency_arrived(bench.tree, residency)
    assert bench.restore([1, 2, 3]) == 3


def test_another_namespace_knows_nothing() -> None:
    bench = Bench()
    bench.insert([1, 2], space=replace(SPACE, salt="elsewhere"))
    assert bench.known([1, 2]) == 0 and bench.match([1, 2]).path == ()
