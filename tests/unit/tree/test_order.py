"""The eviction order over several places: always the one of least worth now, whatever was pushed, popped or used meanwhile."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import Tier
from stepwell.base.plan import NO_PAGES
from stepwell.policy.value import Facts, Place
from stepwell.tree.node import Node, Run
from stepwell.tree.order import EvictionOrder, Standing

NUM_VICTIMS = 12
HALF_LIVES_S = (5.0, 50.0, 1e9)  # by group


class Fading:
    """Groups that lose worth at different speeds, so that places overtake each other."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def place(self, facts: Facts) -> Place:
        return Place(0, 0, facts.used_at)

    def worth(self, group: int, level: int, since: float) -> float:
        return float(2.0 ** (level - (self.now_s - since) / HALF_LIVES_S[group]))


def _run() -> Run:
    return Run(Node(None, start=0, first=b"", rest=b"", num_pages=0), Tier.DEVICE, NO_PAGES)


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
            standing = Standing(priority, Place(group, level, value.now_s - age_s))
            order.push(victims[which], standing)
            queued[victims[which]] = number, standing
        elif isinstance(step, float):
            value.now_s += step
        elif step == "pop":
            assert order.pop() is expected
            queued.pop(expected, None)  # type: ignore[arg-type]
        elif step == "drop" and expected is not None:
            expected.entry = 0  # it left the tree; nobody tells the order
            del queued[expected]
        else:
            head = order.head()
            assert head == ((expected, queued[expected][1]) if expected is not None else None)
    while (expected := first()) is not None:
        assert order.pop() is expected and expected.entry == 0
        del queued[expected]
    assert order.pop() is None and order.head() is None and len(order) == 0


def test_entries_that_no_longer_count_do_not_pile_up() -> None:
    order, victims = EvictionOrder(Fading()), [_run() for _ in range(20)]
    for turn in range(5000):
        order.push(victims[turn % 20], Standing(0, Place(turn % 3, turn % 7, float(turn))))
    assert len(order) <= 6 * len(victims)


def test_places_that_emptied_are_not_looked_at_again() -> None:
    order, victim = EvictionOrder(Fading()), _run()
    for level in range(500):
        order.push(victim, Standing(0, Place(0, level, 0.0)))
    assert order.head() is not None
    assert len(order._older) + len(order._newer) == 1


def test_every_place_has_its_turn() -> None:
    order, victims = EvictionOrder(Fading()), [_run() for _ in range(5)]
    for level, victim in enumerate(victims):
        order.push(victim, Standing(0, Place(0, level, 0.0)))
    seen = [order.next_head() for _ in victims]
    assert {id(head[0]) for head in seen if head is not None} == {id(victim) for victim in victims}
