"""Who is evicted first, and who may not be; and the order itself: the least worth now, whatever was pushed, popped or used."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tree_bench import GONE, Bench

from stepwell import Kind, Tier
from stepwell.base.tasks import NO_PAGES
from stepwell.policy.value import Expected, ReuseModel, ValueClass, Visit
from stepwell.sim.policies import LeastRecent
from stepwell.tree.accounts import Account
from stepwell.tree.checkpoints import drop_residency
from stepwell.tree.eviction_order import EvictionOrder, Standing
from stepwell.tree.node import Node, Residency, Run, Use, Victim, reach_of
from stepwell.tree.pruning import discard_ids, discard_suffix
from toys import FULL, HYBRID


def _pop(bench: Bench, tier: Tier = Tier.DEVICE) -> Victim | None:
    return bench.tree.ranking.pop(tier, runs=True, checkpoints=True)


def _order(bench: Bench, tier: Tier = Tier.DEVICE) -> list[tuple[str, int]]:
    """Everything in the order it would go: what, and where it ends in pages."""
    found = []
    while (victim := _pop(bench, tier)) is not None:
        if isinstance(victim, Run):
            tail = bench.tree.ranking.suffixes.of(victim)
            assert tail is not None
            found.append(("pages", victim.node.end))
            discard_suffix(bench.tree, victim, tail.start, GONE)
        else:
            found.append(("checkpoint", victim.checkpoint.page))
            drop_residency(bench.tree, victim, GONE)
        bench.check()
    return found


def test_least_recently_used_goes_first() -> None:
    bench = Bench(FULL)
    for at, page in ((3.0, 7), (1.0, 8), (2.0, 9)):
        bench.insert([page], use=Use(at_s=at), release=True)
    victims = [_pop(bench), _pop(bench), _pop(bench)]
    assert [v.node.used_at for v in victims if isinstance(v, Run)] == [1.0, 2.0, 3.0]


def test_a_use_after_queueing_counts() -> None:
    bench = Bench(FULL)
    for at, page in ((1.0, 7), (2.0, 8)):
        bench.insert([page], use=Use(at_s=at), release=True)
    bench.tree.touch(bench.path([7]), 1, Use(at_s=9.0))
    victim = _pop(bench)
    assert isinstance(victim, Run) and victim.node.used_at == 2.0


def test_idle_pages_are_the_last_ones_behind_any_page_in_use() -> None:
    bench = Bench(FULL)
    ids = bench.insert([7, 8, 9, 10], release=True)
    run = bench.path([7, 8, 9, 10])[-1].runs[Tier.DEVICE]
    assert run is not None
    ranking = bench.tree.ranking
    assert [ranking.suffixes.idle(run, 0, at_most) for at_most in (2, 9)] == [(2, 2), (0, 4)]
    bench.arena().retain(Kind.PREFIX, ids[1:2])
    assert [ranking.suffixes.idle(run, 0, at_most) for at_most in (1, 2, 3, 9)] == [(3, 1), (2, 2), (2, 2), (2, 2)]
    bench.arena().retain(Kind.PREFIX, ids[3:])
    assert [ranking.suffixes.idle(run, 0, at_most).num_pages for at_most in (1, 9)] == [0, 0]


def test_priority_outranks_recency() -> None:
    bench = Bench(FULL)
    bench.insert([7], use=Use(at_s=1.0, priority=3), release=True)
    bench.insert([8], use=Use(at_s=9.0), release=True)
    victim = _pop(bench)
    assert isinstance(victim, Run) and victim.node.used_at == 9.0


def test_leaves_go_before_what_they_hang_on() -> None:
    bench = Bench(FULL)
    bench.insert([1, 2, 3], use=Use(at_s=5.0), release=True)
    bench.insert([1, 4, 5, 6], use=Use(at_s=1.0), release=True)
    assert _order(bench) == [("pages", 4), ("pages", 3), ("pages", 1)]


def test_a_checkpoint_goes_before_the_pages_it_stands_on() -> None:
    bench = Bench()
    bench.insert([1, 2, 3], use=Use(at_s=1.0), release=True)
    bench.checkpoint([1, 2, 3], 3, now=50.0)
    assert _order(bench) == [("checkpoint", 3), ("pages", 3)]


def test_pages_behind_the_last_checkpoint_go_before_anything_of_worth() -> None:
    bench = Bench()
    bench.insert([1, 2], use=Use(at_s=0.0), release=True)
    bench.checkpoint([1, 2], 2)
    bench.insert([7, 8, 9], use=Use(at_s=99.0), release=True)
    bench.checkpoint([7, 8, 9], 1, now=99.0)
    victim = _pop(bench)
    assert isinstance(victim, Run) and victim.node.end == 3
    tail = bench.tree.ranking.suffixes.of(victim)
    assert tail is not None and tail.unreachable and tail.start == 1  # the page under its checkpoint stays


def test_pages_become_worthless_when_their_checkpoint_goes() -> None:
    bench = Bench()
    bench.insert([7, 8], use=Use(at_s=99.0), release=True)
    residency = bench.checkpoint([7, 8], 2, now=99.0)
    bench.insert([1], use=Use(at_s=1.0), release=True)
    bench.checkpoint([1], 1, now=1.0)
    assert residency is not None
    drop_residency(bench.tree, residency, GONE)
    victim = _pop(bench)
    assert isinstance(victim, Run) and victim.node.end == 2


def test_the_checkpoint_that_saves_most_per_byte_stays_longest() -> None:
    bench = Bench(value=Expected(ReuseModel(page_tokens=4)))
    path = list(range(1, 13))
    bench.insert(path, release=True)
    for page in (2, 3, 12):  # saves 2, 1 and 9 pages of recompute
        bench.checkpoint(path, page)
    victims = [_pop(bench) for _ in range(3)]
    assert [v.checkpoint.page for v in victims if isinstance(v, Residency)] == [3, 2, 12]


def test_pages_that_the_other_tier_stands_on_stay() -> None:
    bench = Bench(FULL)
    bench.insert([1, 2, 3], use=Use(at_s=1.0), release=True)
    host = bench.insert([1, 2, 3], tier=Tier.HOST, use=Use(at_s=1.0), release=True)
    discard_ids(bench.tree, Tier.HOST, host[:2], GONE)
    run = bench.path([1, 2, 3])[0].runs[Tier.DEVICE]
    assert run is not None
    tail = bench.tree.ranking.suffixes.of(run)
    assert tail is not None and tail.start == 2  # pages 1 and 2 are only here, and host page 3 needs them


def test_an_order_forgets_entries_that_were_queued_again() -> None:
    bench = Bench(FULL)
    bench.insert([1], release=True)
    run = bench.path([1])[0].runs[Tier.DEVICE]
    assert run is not None
    order = EvictionOrder(LeastRecent())
    order.push(run, Standing(0, ValueClass(0, 0, 1.0)))
    order.push(run, Standing(0, ValueClass(0, 0, 5.0)))
    assert order.head() == (run, Standing(0, ValueClass(0, 0, 5.0)))
    assert order.pop() is run and order.pop() is None and run.entry == 0


def test_everything_can_be_evicted_and_then_nothing_is_left() -> None:
    bench = Bench()
    for branch in range(2, 8):
        bench.insert([1, branch, branch, 9], use=Use(at_s=float(branch % 3)), release=True)
        bench.checkpoint([1, branch, branch, 9], 1 + branch % 4, now=float(branch))
    _order(bench)
    assert bench.shape() == {} and bench.arena().used_bytes == 0


def test_pages_stay_while_a_checkpoint_further_down_is_in_their_tier() -> None:
    bench = Bench()
    for tier in (Tier.DEVICE, Tier.HOST):
        bench.insert([1, 2], tier=tier, release=True)
    bench.insert([1, 2, 3], release=True)
    bench.insert([1, 2, 4], release=True)
    residency = bench.checkpoint([1, 2, 3], 3, Tier.HOST)  # page 3 itself is on the device only
    run = bench.path([1, 2])[0].runs[Tier.HOST]
    assert run is not None and bench.tree.ranking.suffixes.of(run) is None
    assert residency is not None
    drop_residency(bench.tree, residency, GONE)
    assert bench.tree.ranking.suffixes.of(run) is not None


NUM_VICTIMS = 12
HALF_LIVES_S = (5.0, 50.0, 1e9)  # by group


class Fading:
    """Groups that lose worth at different speeds, so that places overtake each other."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def level(self, saved_tokens: int, size_bytes: int, next_distance: int, distance: int, *, deferred: bool) -> int:
        return 0

    def due(self, used_at: float, urgent_until_s: float, visit: Visit | None) -> tuple[int, float]:
        return 0, used_at

    def worth(self, group: int, level: int, since: float) -> float:
        return float(2.0 ** (level - (self.now_s - since) / HALF_LIVES_S[group]))


def _run() -> Run:
    return Run(Node(None, account=Account(None), start=0, first=b"", rest=b"", num_pages=0), Tier.DEVICE, NO_PAGES)


PUSH = st.tuples(
    st.integers(0, NUM_VICTIMS - 1),
    st.integers(-1, 1),
    st.integers(0, len(HALF_LIVES_S) - 1),
    st.integers(-3, 3),
    st.floats(0, 9),
)
STEP = st.one_of(PUSH, st.just("pop"), st.just("look"), st.just("drop"), st.floats(0, 40))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=80))
def test_the_head_is_what_a_look_at_everything_would_find(steps: list[object]) -> None:
    value = Fading()
    order = EvictionOrder(value)
    victims = [_run() for _ in range(NUM_VICTIMS)]
    queued: dict[Run, tuple[int, Standing]] = {}  # when it was pushed, and where to

    def first() -> Run | None:
        ranks = {victim: (*order.rank(standing), number) for victim, (number, standing) in queued.items()}
        return min(ranks, key=ranks.__getitem__, default=None)

    for number, step in enumerate(steps):
        expected = first()
        if isinstance(step, tuple):
            which, priority, group, level, age_s = step
            standing = Standing(priority, ValueClass(group, level, value.now_s - age_s))
            order.push(victims[which], standing)
            queued[victims[which]] = number, standing
        elif isinstance(step, float):
            value.now_s += step
        elif step == "pop":
            assert order.pop() is expected
            queued.pop(expected, None)  # type: ignore[arg-type]
        elif step == "drop" and expected is not None:
            expected.entry = 0  # it left the tree; the order gets no message
            del queued[expected]
        else:
            head = order.head()
            assert head == ((expected, queued[expected][1]) if expected is not None else None)
    while (expected := first()) is not None:
        assert order.pop() is expected and expected.entry == 0
        del queued[expected]
    assert order.pop() is None and order.head() is None and len(order) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(PUSH, max_size=40), st.lists(st.one_of(st.none(), PUSH), max_size=20))
def test_victims_come_in_the_order_in_which_a_look_at_everything_would_find_them(
    pushes: list[tuple[int, int, int, int, float]], between: list[tuple[int, int, int, int, float] | None]
) -> None:
    value = Fading()
    order = EvictionOrder(value)
    victims = [_run() for _ in range(NUM_VICTIMS)]
    queued: dict[Run, tuple[int, Standing]] = {}

    def push(which: int, priority: int, group: int, level: int, age_s: float) -> None:
        standing = Standing(priority, ValueClass(group, level, value.now_s - age_s))
        order.push(victims[which], standing)
        queued[victims[which]] = victims[which].entry, standing

    for each in pushes:
        push(*each)
    value.now_s = 30.0  # by now places may have overtaken each other
    assert order.freeze_time()
    left: list[Run] = []
    while (head := order.head()) is not None:
        victim, standing = head
        ranks = {each: (*order.rank(place), number) for each, (number, place) in queued.items()}
        assert victim is min(ranks, key=ranks.__getitem__)  # type: ignore[comparison-overlap]
        assert queued.pop(victim)[1] == standing  # type: ignore[arg-type]
        assert order.pop() is victim  # it left, and its leaving may make others candidates
        left.append(victim)  # type: ignore[arg-type]
        if between and (more := between.pop()) is not None:
            push(*more)
    assert not queued
    assert len(left) >= len({which for which, *_ in pushes})


def test_entries_that_no_longer_count_do_not_pile_up() -> None:
    order, victims = EvictionOrder(Fading()), [_run() for _ in range(20)]
    for turn in range(5000):
        order.push(victims[turn % 20], Standing(0, ValueClass(turn % 3, turn % 7, float(turn))))
    assert len(order) <= 6 * len(victims)


def test_places_that_emptied_are_not_looked_at_again() -> None:
    order, victim = EvictionOrder(Fading()), _run()
    for level in range(500):
        order.push(victim, Standing(0, ValueClass(0, level, 0.0)))
    assert order.head() is not None
    assert len(order._older) + len(order._newer) == 1


def test_every_place_has_its_turn() -> None:
    order, victims = EvictionOrder(Fading()), [_run() for _ in range(5)]
    for level, victim in enumerate(victims):
        order.push(victim, Standing(0, ValueClass(0, level, 0.0)))
    seen = [order.next_head() for _ in victims]
    assert {id(head[0]) for head in seen if head is not None} == {id(victim) for victim in victims}


def test_a_checkpoint_reaches_back_to_the_one_before_it_and_has_pages_alone_back_to_a_branch() -> None:
    bench = Bench(HYBRID)
    bench.insert([1, 2, 3, 4, 5], release=True)
    for page in (2, 5):
        bench.checkpoint([1, 2, 3, 4, 5], page)
    [node] = bench.path([1, 2, 3, 4, 5])
    assert reach_of(node, 5) == (2, 3), "in one node"
    assert reach_of(node, 2) == (0, 0), "the one behind it needs its pages"
    bench.insert([1, 2, 3, 9], release=True)
    bench.checkpoint([1, 2, 3, 9], 4)
    upper, lower = bench.path([1, 2, 3, 4, 5])
    assert reach_of(lower, 5) == (2, 2), "another path needs the third page"
    assert reach_of(upper, 2) == (0, 0)
    bench.insert([1, 2, 3, 9, 7], release=True)
    assert reach_of(bench.path([1, 2, 3, 9])[-1], 4)[0] == 2


def test_a_checkpoint_alone_on_its_path_has_all_of_its_pages_alone() -> None:
    bench = Bench(HYBRID)
    bench.insert([1, 2, 3], release=True)
    bench.checkpoint([1, 2, 3], 3)
    [node] = bench.path([1, 2, 3])
    assert reach_of(node, 3) == (0, 3)
    bench.tree.split(node, 2)
    assert reach_of(node, 3) == (0, 3), "cut, and no branch"
