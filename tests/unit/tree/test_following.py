"""Checkpoints that follow one another on a path: who is needed less once another one is left, and who is not."""

from __future__ import annotations

from tree_bench import GONE, Bench

from stepwell import Tier
from stepwell.policy.value import Expected, ReuseModel
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.node import Checkpoint, Residency
from stepwell.tree.pruning import truncate


def _bench() -> Bench:
    return Bench(value=Expected(ReuseModel(page_tokens=4)))


def _left(bench: Bench, path: list[int], page: int, tier: Tier = Tier.DEVICE) -> Checkpoint:
    residency = bench.checkpoint(path, page, tier)
    assert residency is not None
    return residency.checkpoint


def _first(bench: Bench) -> int:
    victim = bench.tree.ranking.pop(Tier.DEVICE, runs=False, checkpoints=True)
    assert isinstance(victim, Residency)
    return victim.checkpoint.page


def _drop(bench: Bench, checkpoint: Checkpoint) -> None:
    for residency in list(checkpoint.residencies):
        if residency is not None:
            drop_residency(bench.tree, residency, GONE)
    bench.check()


def test_the_checkpoint_before_a_new_one_goes_first() -> None:
    """It saves more per byte than the other path's, until it is followed: then it is queued again, at once."""
    bench = _bench()
    path, other = list(range(1, 13)), [91, 92]
    for each in (path, other):
        bench.insert(each, release=True)
    _left(bench, path, 8)
    _left(bench, other, 2)
    _left(bench, path, 12)
    assert _first(bench) == 8


def test_both_tiers_of_a_followed_checkpoint_are_queued_again() -> None:
    bench = _bench()
    path = list(range(1, 9))
    for tier in (Tier.DEVICE, Tier.HOST):
        bench.insert(path, tier=tier, release=True)
    before = _left(bench, path, 4)
    bench.checkpoint(path, 4, Tier.HOST)
    tickets = [residency.entry for residency in before.residencies if residency is not None]
    _left(bench, path, 8)
    again = [residency.entry for residency in before.residencies if residency is not None]
    assert len(tickets) == 2 and all(new > old for new, old in zip(again, tickets, strict=True))


def test_a_checkpoint_between_two_stands_between_them() -> None:
    bench = _bench()
    path = list(range(1, 13))
    bench.insert(path, release=True)
    two, twelve = _left(bench, path, 2), _left(bench, path, 12)
    ticket = twelve.residencies[Tier.DEVICE].entry  # type: ignore[union-attr]
    six = _left(bench, path, 6)
    assert two.follower is six and six.follower is twelve and twelve.follower is None
    assert twelve.residencies[Tier.DEVICE].entry > ticket, "it saves less from now on"  # type: ignore[union-attr]
    _drop(bench, six)
    assert two.follower is twelve and six.follower is None


def test_the_first_of_a_node_knows_the_next_one() -> None:
    bench = _bench()
    bench.insert([1, 2, 3, 4], release=True)
    four = _left(bench, [1, 2, 3, 4], 4)
    assert _left(bench, [1, 2, 3, 4], 2).follower is four


def test_a_deeper_checkpoint_of_another_branch_does_not_follow() -> None:
    """Two conversations from one system prompt: the shorter one's last checkpoint is as much needed as the longer one's."""
    bench = _bench()
    longer, shorter = [1, 2, *range(10, 20)], [1, 2, 30, 31, 32]
    for each in (longer, shorter):
        bench.insert(each, release=True)
    shared = _left(bench, shorter, 2)
    long_end = _left(bench, longer, 12)
    assert shared.follower is long_end
    short_end = _left(bench, shorter, 5)
    assert shared.follower is short_end and short_end.follower is None and long_end.follower is None
    assert _first(bench) == 2


def test_one_that_leaves_at_the_same_boundary_of_another_branch_changes_nothing() -> None:
    bench = _bench()
    left, right = [1, 2, 3, 4], [1, 2, 5, 6]
    for each in (left, right):
        bench.insert(each, release=True)
    shared = _left(bench, left, 2)
    left_end, right_end = _left(bench, left, 4), _left(bench, right, 4)
    _drop(bench, left_end)
    assert shared.follower is right_end


def test_what_was_cut_off_with_its_branch_follows_nobody() -> None:
    bench = _bench()
    bench.insert([1, 2, 3, 4], release=True)
    bench.insert([1, 2, 3, 4, 5, 6, 7], release=True)
    bench.insert([1, 2, 3, 4, 5, 8], release=True)
    bench.insert([1, 2, 9], release=True)
    path = [1, 2, 3, 4, 5, 6, 7]
    top = _left(bench, path, 2)
    for page in (4, 7):  # in two nodes, one below the other
        _left(bench, path, page)
    node = bench.path(path)[1]
    truncate(bench.tree, node, 0, GONE)
    bench.check()
    assert top.follower is None


def test_a_split_keeps_who_follows_whom() -> None:
    bench = _bench()
    path = list(range(1, 9))
    bench.insert(path, release=True)
    two, eight = _left(bench, path, 2), _left(bench, path, 8)
    bench.insert([1, 2, 3, 99], release=True)
    assert two.node is not eight.node and two.follower is eight
    bench.check()
