"""The tree as it grows: insert, split, extend, attach, and checkpoints inside nodes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tree_bench import SPACE, Bench

from stepwell import Kind, Tier
from stepwell.base.config import PRIORITY_STEP_S
from stepwell.tree.node import ABSENT, Use
from stepwell.tree.tree import NODE_PAGES


def test_one_path_is_one_node() -> None:
    bench = Bench()
    pages = bench.insert([1, 2, 3])
    assert bench.shape() == {(1, 2, 3): 3}
    assert bench.ids([1, 2, 3]) == pages.tolist()


def test_a_branch_splits_at_the_page_where_paths_part() -> None:
    bench = Bench()
    first = bench.insert([1, 2, 3, 4])
    second = bench.insert([1, 2, 8, 9])
    assert bench.shape() == {(1, 2): 2, (1, 2, 3, 4): 2, (1, 2, 8, 9): 2}
    assert bench.ids([1, 2, 3, 4]) == first.tolist()
    assert bench.ids([1, 2, 8, 9]) == [*first[:2].tolist(), *second[2:].tolist()]
    assert bench.refs(second[:2]) == [1, 1]  # duplicates stay with the request that offered them


def test_a_prefix_of_a_known_path_changes_nothing() -> None:
    bench = Bench()
    bench.insert([1, 2, 3])
    bench.insert([1, 2])
    assert bench.shape() == {(1, 2, 3): 3}


def test_a_leaf_is_extended_in_place_and_keeps_its_identity() -> None:
    bench = Bench()
    bench.insert([1, 2])
    leaf = bench.path([1, 2])[-1]
    grown = bench.insert([1, 2, 3, 4])
    assert bench.path([1, 2, 3, 4]) == (leaf,) and leaf.num_pages == 4
    assert bench.ids([1, 2, 3, 4])[2:] == grown[2:].tolist()


def test_a_node_with_children_is_not_extended() -> None:
    bench = Bench()
    bench.insert([1, 2, 3])
    bench.insert([1, 2, 4])
    bench.insert([1, 2, 5])
    assert bench.shape() == {(1, 2): 2, (1, 2, 3): 1, (1, 2, 4): 1, (1, 2, 5): 1}


def test_nodes_are_cut_at_their_greatest_length() -> None:
    bench = Bench(pages=2048)
    long = list(range(1, 2 * NODE_PAGES + 11))
    bench.insert(long[:10])
    bench.insert(long)
    assert [node.num_pages for node in bench.path(long)] == [NODE_PAGES, NODE_PAGES, 10]
    assert bench.known(long) == len(long)
    bench.check()


def test_split_keeps_use_priority_and_expiry_on_both_sides() -> None:
    bench = Bench()
    bench.insert([1, 2, 3], use=Use(at_s=5.0, priority=2, expires_at_s=99.0))
    lower = bench.path([1, 2, 3])[-1]
    lower.hits = 7
    upper = bench.tree.split(lower, 1)
    for node in (upper, lower):
        assert (node.used_at, node.urgent_until, node.expires_at, node.hits) == (5.0, 5.0 + 2 * PRIORITY_STEP_S, 99.0, 7)
    assert lower.parent is upper and (upper.start, upper.end, lower.start, lower.end) == (0, 1, 1, 3)
    bench.check()


def test_a_split_makes_older_matches_invalid() -> None:
    """A match names nodes; after a split one of them means something else, so the match must be found again."""
    bench = Bench()
    bench.insert([1, 2, 3])
    before = bench.tree.version
    bench.tree.split(bench.path([1, 2, 3])[-1], 2)
    assert bench.tree.version > before


@pytest.mark.parametrize("at", [0, 3, 7])
def test_split_outside_a_node_is_our_bug(at: int) -> None:
    bench = Bench()
    bench.insert([1, 2, 3])
    with pytest.raises(AssertionError, match="cannot split"):
        bench.tree.split(bench.path([1, 2, 3])[-1], at)


def test_attach_fills_gaps_only() -> None:
    bench = Bench()
    device = bench.insert([1, 2, 3])
    node = bench.path([1, 2, 3])[-1]
    host = bench.alloc(3, Tier.HOST)
    bench.tree.attach(node, Tier.HOST, np.array([host[0], ABSENT, host[2]], np.int32))
    assert bench.ids([1, 2, 3], Tier.HOST) == [host[0], ABSENT, host[2]]
    bench.tree.attach(node, Tier.HOST, bench.alloc(3, Tier.HOST))
    assert bench.ids([1, 2, 3], Tier.HOST)[::2] == [host[0], host[2]]
    assert bench.ids([1, 2, 3]) == device.tolist()
    bench.check()


def test_checkpoints_go_to_the_half_they_stand_in() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    for page in (1, 2, 3, 4):
        bench.checkpoint([1, 2, 3, 4], page)
    lower = bench.path([1, 2, 3, 4])[-1]
    upper = bench.tree.split(lower, 2)
    assert sorted(upper.checkpoints or {}) == [1, 2] and sorted(lower.checkpoints or {}) == [3, 4]
    assert all(c.node is node for node in (upper, lower) for c in (node.checkpoints or {}).values())
    bench.check()


def test_a_second_checkpoint_at_one_boundary_is_refused() -> None:
    bench = Bench()
    bench.insert([1, 2])
    assert bench.checkpoint([1, 2], 2) is not None
    assert bench.checkpoint([1, 2], 2) is None
    assert bench.checkpoint([1, 2], 2, Tier.HOST) is not None
    bench.check()


def test_namespaces_are_trees_of_their_own() -> None:
    bench = Bench()
    a, b = replace(SPACE, salt="a"), replace(SPACE, tenant="a")
    bench.insert([1, 2], space=a)
    bench.insert([1, 3], space=b)
    assert bench.shape(a) == {(1, 2): 2} and bench.shape(b) == {(1, 3): 2}


def test_page_that_became_ready_is_seen() -> None:
    bench = Bench()
    pages = bench.insert([1, 2, 3], ready=False)
    run = bench.path([1, 2, 3])[-1].runs[Tier.DEVICE]
    assert run is not None and (run.num_pages, run.num_ready) == (3, 0)
    bench.arena().mark_ready(Kind.PREFIX, pages[:2])
    bench.tree.refresh(Tier.DEVICE, pages[:2])
    assert run.num_ready == 2
    bench.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_growth_keeps_every_path_and_every_count(seed: int) -> None:
    random_ = random.Random(seed)
    bench = Bench(pages=2048)
    kept: dict[tuple[int, ...], int] = {}
    for _ in range(60):
        path = [random_.randrange(3) for _ in range(random_.randrange(1, 9))]
        pages = bench.insert(path)
        for end in range(1, len(path) + 1):
            kept.setdefault(tuple(path[:end]), int(pages[end - 1]))
        if random_.random() < 0.3:
            page = random_.randrange(1, len(path) + 1)
            bench.checkpoint(path, page, random_.choice([Tier.DEVICE, Tier.HOST]))
        bench.check()
    for prefix, page in kept.items():
        assert bench.ids(list(prefix))[-1] == page
