"""The tree as it shrinks: truncate, discard, losses, clear."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tree_bench import GONE, SPACE, Bench

from stepwell import Kind, Tier
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import ABSENT, LossReason
from stepwell.tree.notes import key_of
from stepwell.tree.pruning import MOST_EMPTY_ROOTS, clear, discard, discard_ids, truncate
from stepwell.tree.tree import MAX_LOST


def test_truncate_takes_the_tail_all_below_and_their_checkpoints() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.insert([1, 2, 3, 5, 6])
    for page in (1, 3):
        bench.checkpoint([1, 2, 3], page)
    bench.checkpoint([1, 2, 3, 5, 6], 5)
    upper = bench.path([1, 2, 3])[0]
    truncate(bench.tree, upper, 2, GONE)
    assert bench.shape() == {(1, 2): 2} and sorted(upper.checkpoints or {}) == [1]
    assert bench.arena().used_pages(Kind.POINT) == 1
    bench.check()


def test_truncate_at_zero_unlinks_the_node() -> None:
    bench = Bench()
    bench.insert([1, 2])
    bench.insert([1, 3])
    truncate(bench.tree, bench.path([1, 3])[-1], 0, GONE)
    assert bench.shape() == {(1,): 1, (1, 2): 1}
    bench.check()


def test_the_tree_gives_back_exactly_its_own_references() -> None:
    bench = Bench()
    pages = bench.insert([1, 2, 3])
    assert bench.refs(pages) == [2, 2, 2]
    truncate(bench.tree, bench.path([1, 2, 3])[0], 1, GONE)
    assert bench.refs(pages) == [2, 1, 1]


def test_discard_in_one_tier_keeps_what_the_other_has() -> None:
    bench = Bench()
    device, host = bench.insert([1, 2, 3]), bench.insert([1, 2, 3], tier=Tier.HOST)
    run = bench.path([1, 2, 3])[0].runs[Tier.DEVICE]
    assert run is not None
    discard(bench.tree, run, np.array([False, True, True]), GONE)
    assert bench.ids([1, 2, 3]) == [device[0], ABSENT, ABSENT]
    assert bench.ids([1, 2, 3], Tier.HOST) == host.tolist() and bench.known([1, 2, 3]) == 3
    bench.check()


def test_a_page_that_no_tier_holds_takes_the_rest_of_the_path_with_it() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.insert([1, 2], tier=Tier.HOST)
    bench.checkpoint([1, 2, 3, 4], 4, Tier.HOST)
    run = bench.path([1, 2, 3, 4])[0].runs[Tier.DEVICE]
    assert run is not None
    discard(bench.tree, run, np.array([False, True, True, False]), GONE)
    assert bench.known([1, 2, 3, 4]) == 2  # page 3 is nowhere, so page 4 could never be used
    assert bench.arena(Tier.HOST).used_pages(Kind.POINT) == 0
    bench.check()


def test_discard_by_page_finds_pages_wherever_they_are_now() -> None:
    bench = Bench()
    pages = bench.insert([1, 2, 3, 4])
    bench.insert([1, 2, 9])  # splits the node the pages were in
    discard_ids(bench.tree, Tier.DEVICE, pages[[1, 2, 3]], GONE)
    assert bench.shape() == {(1,): 1}
    discard_ids(bench.tree, Tier.DEVICE, pages[[1, 2, 3]], GONE)  # they are not in the tree any more
    assert bench.shape() == {(1,): 1}
    bench.check()


def test_a_dropped_checkpoint_leaves_its_pages_and_a_note() -> None:
    bench = Bench()
    bench.insert([1, 2])
    residency = bench.checkpoint([1, 2], 2)
    assert residency is not None
    drop_residency(bench.tree, residency, GONE)
    drop_residency(bench.tree, residency, GONE)  # once is enough
    node = bench.path([1, 2])[0]
    assert bench.known([1, 2]) == 2 and bench.restore([1, 2]) == 0
    assert bench.tree.lost_checkpoints.of(node) == {2: GONE} and node.checkpoints == {}
    assert bench.arena().used_pages(Kind.POINT) == bench.arena().used_pages(Kind.WINDOW) == 0
    bench.check()


def test_a_checkpoint_in_two_tiers_survives_the_loss_of_one() -> None:
    bench = Bench()
    bench.insert([1, 2])
    residency = bench.checkpoint([1, 2], 2)
    bench.checkpoint([1, 2], 2, Tier.HOST)
    assert residency is not None
    drop_residency(bench.tree, residency, GONE)
    assert bench.restore([1, 2]) == 2 and not bench.tree.lost_checkpoints.of(bench.path([1, 2])[0])


def test_losses_are_noted_where_the_path_ends_now_and_forgotten_when_it_grows_again() -> None:
    bench = Bench()
    bench.insert([1, 2, 3])
    node = bench.path([1, 2, 3])[0]
    truncate(bench.tree, node, 1, GONE)
    assert bench.tree.lost.of(node) == {key_of(bench.packed([2])): GONE}
    bench.insert([1, 2])
    assert not bench.tree.lost.of(node)


def test_notes_of_losses_are_bounded() -> None:
    bench = Bench(pages=1024)
    bench.insert([1, 70])
    bench.insert([1, 71])
    for branch in range(2, MAX_LOST + 20):
        bench.insert([1, branch, branch])
        truncate(bench.tree, bench.path([1, branch, branch])[-1], 0, GONE)
    assert len(bench.tree.lost.of(bench.path([1])[0])) == MAX_LOST


def test_clear_forgets_one_namespace_and_leaves_pages_to_their_holders() -> None:
    bench = Bench()
    mine, other = bench.insert([1, 2]), replace(SPACE, salt="other")
    bench.insert([1, 2], space=other)
    clear(bench.tree, SPACE.digest, GONE)
    assert bench.shape() == {} and bench.shape(other) == {(1, 2): 2}
    assert bench.refs(mine) == [1, 1]
    bench.check()


def test_empty_namespaces_are_kept_for_explanations_but_not_without_end() -> None:
    bench = Bench(pages=2048)
    for number in range(MOST_EMPTY_ROOTS + 50):
        space = replace(SPACE, salt=str(number))
        bench.insert([1], space=space, release=True)
        clear(bench.tree, space.digest, GONE)
    assert len(bench.tree.roots) <= MOST_EMPTY_ROOTS + 1
    bench.check()


@pytest.mark.parametrize("reason", list(LossReason))
def test_every_reason_has_words(reason: LossReason) -> None:
    assert reason.value
