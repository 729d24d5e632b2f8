"""What a node remembers of what hung below it and is gone: whose visit it was, for when it returns."""

from __future__ import annotations

from tree_bench import GONE, SPACE, Bench

from stepwell import Tier
from stepwell.base.prompt import PageKey
from stepwell.policy.value import Visit
from stepwell.tree.node import Use
from stepwell.tree.notes import Notes, key_of
from stepwell.tree.pruning import clear, truncate
from stepwell.tree.tree import MAX_PAST
from toys import FULL


def _entered(bench: Bench, path: list[int], at_s: float = 0.0) -> Visit:
    visit = Visit(at_s, end=len(path))
    bench.insert(path, use=Use(at_s=at_s, visit=visit), release=True)
    return visit


def _page(bench: Bench, page: int) -> int:
    return key_of(bench.packed([page]))


def test_a_branch_that_left_is_remembered_by_its_first_page() -> None:
    bench = Bench(FULL)
    _entered(bench, [1, 2, 3])
    visit = _entered(bench, [1, 2, 7, 8])
    top, branch = bench.path([1, 2, 7, 8])
    truncate(bench.tree, branch, 0, GONE)
    assert bench.tree.past.of(top) == {_page(bench, 7): visit}
    bench.check()


def test_a_tail_that_left_is_remembered_where_it_was_cut_last() -> None:
    bench = Bench(FULL)
    visit = _entered(bench, [1, 2, 3, 4, 5])
    node = bench.path([1])[0]
    for at, page in ((4, 5), (2, 3)):
        truncate(bench.tree, node, at, GONE)
        assert bench.tree.past.of(node) == {_page(bench, page): visit}


def test_what_came_back_is_not_remembered_as_gone() -> None:
    bench = Bench(FULL)
    visit = _entered(bench, [1, 2, 3, 4])
    node = bench.path([1])[0]
    truncate(bench.tree, node, 2, GONE)
    bench.insert([1, 2, 3, 4], release=True)
    assert not bench.tree.past.of(node) and node.num_pages == 4 and node.visit is visit


def test_pages_fetched_without_a_request_come_back_under_their_old_visit() -> None:
    bench = Bench(FULL)
    _entered(bench, [1, 2, 3])
    visit = _entered(bench, [1, 2, 7, 8])
    truncate(bench.tree, bench.path([1, 2, 7, 8])[1], 0, GONE)
    bench.insert([1, 2, 7, 8], tier=Tier.DEVICE, use=Use(at_s=9.0), release=True)
    assert bench.path([1, 2, 7, 8])[1].visit is visit


def test_a_newcomer_does_not_take_the_place_of_those_who_may_return() -> None:
    """A system prompt that lost its conversations stays a node of its own, or their memory would hang at another depth."""
    bench = Bench(FULL)
    _entered(bench, [1, 2, 3])
    visit = _entered(bench, [1, 2, 7])
    for branch in (3, 7):
        truncate(bench.tree, bench.path([1, 2, branch])[1], 0, GONE)
    _entered(bench, [1, 2, 9, 9])
    top, below = bench.path([1, 2, 9, 9])
    assert (top.num_pages, below.num_pages) == (2, 2)
    assert bench.tree.past.of(top)[_page(bench, 7)] is visit and not bench.tree.past.of(below)
    bench.check()


def test_a_split_leaves_the_memory_where_the_lost_things_hung() -> None:
    bench = Bench(FULL)
    _entered(bench, [1, 2, 3, 4])
    visit = _entered(bench, [1, 2, 3, 4, 5])
    node = bench.path([1])[0]
    truncate(bench.tree, node, 4, GONE)
    upper = bench.tree.split(node, 2)
    assert not bench.tree.past.of(upper) and list(bench.tree.past.of(node)) == [_page(bench, 5)]
    assert upper.visit is node.visit and visit is not None


def test_only_the_latest_are_remembered() -> None:
    bench = Bench(FULL)
    _entered(bench, [1, 2])
    for branch in range(10, 10 + MAX_PAST + 20):
        _entered(bench, [1, 2, branch, 3])
        _entered(bench, [1, 2, 9])
        truncate(bench.tree, bench.path([1, 2, branch])[1], 0, GONE)
    past = bench.tree.past.of(bench.path([1, 2])[0])
    assert len(past) == MAX_PAST
    assert _page(bench, 10) not in past and _page(bench, 10 + MAX_PAST + 19) in past


def test_a_cleared_namespace_remembers_nobody() -> None:
    bench = Bench(FULL)
    _entered(bench, [1, 2])
    clear(bench.tree, PageKey(SPACE.digest), GONE)
    assert not bench.tree.past.of(bench.tree.roots[PageKey(SPACE.digest)])


def test_notes_hold_no_tokens_and_a_given_number_for_the_whole_tree() -> None:
    """However long a page is and however many nodes there are: the oldest notes of the node noted longest ago go first."""
    bench = Bench(FULL)
    bench.tree.past = Notes(most_of_node=4, most=10)
    for family in range(1, 5):
        for branch in range(10, 16):
            _entered(bench, [family, 2, 9])
            _entered(bench, [family, 2, branch])
            truncate(bench.tree, bench.path([family, 2, branch])[1], 0, GONE)
            bench.check()
    past = [bench.tree.past.of(bench.path([family, 2])[0]) for family in range(1, 5)]
    assert [len(each) for each in past] == [0, 2, 4, 4] and len(bench.tree.past) == 10
    assert list(past[1]) == [_page(bench, 14), _page(bench, 15)]
    assert all(-(2**63) <= key < 2**63 for each in past for key in each)


def test_notes_of_nodes_that_left_are_gone_with_them() -> None:
    bench = Bench(FULL)
    for branch in (3, 4, 5):
        _entered(bench, [1, 2, branch, 7])
        _entered(bench, [1, 2, branch, 8])
        truncate(bench.tree, bench.path([1, 2, branch, 7])[-1], 0, GONE)
    assert len(bench.tree.past) == 3
    truncate(bench.tree, bench.path([1, 2])[0], 0, GONE)
    bench.check()
    assert len(bench.tree.past) == len(bench.tree.lost) == 1, "of the path, at the root"
