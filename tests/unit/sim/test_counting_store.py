"""The counting store is bounded at every moment, gives up what is deep before what it stands on, and has no bytes."""

from __future__ import annotations

from random import Random

import pytest

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.sim.store import CountingStore
from stepwell.store.api import NO_STAMP, Read, Space, Write, WriteOutcome

SPACE = Space(digest=bytes(32))
K = [number.to_bytes(32, "little") for number in range(1, 7)]


def key(name: int) -> bytes:
    return name.to_bytes(32, "little")


def chain(store: CountingStore, *names: int) -> list[WriteOutcome]:
    parents = [None, *map(key, names[:-1])]
    outcomes = [store.keep(key(name), 10, parent) for name, parent in zip(names, parents, strict=True)]
    store.use(key(names[-1]))
    return outcomes


def held(store: CountingStore, *names: int) -> list[bool]:
    return store.contains(SPACE, [key(name) for name in names])


def test_the_oldest_chain_goes_first_and_its_deepest_value_before_the_others() -> None:
    store = CountingStore(60)
    chain(store, 1, 2, 3)
    chain(store, 11, 12, 13)
    chain(store, 21)
    assert held(store, 1, 2, 3, 11, 12, 13, 21) == [True, True, False, True, True, True, True]
    store.use(key(2))
    chain(store, 22, 23)
    assert held(store, 1, 2, 11, 12, 13, 21) == [True, True, True, False, False, True]


class Plain:
    """What the store promises, said in the plainest way: every use is entered into all that a value stands on."""

    def __init__(self, most: int) -> None:
        self.used: dict[int, int] = {}
        self._most = most
        self._parents: dict[int, int | None] = {}
        self._num_uses = 0

    def keep(self, name: int, parent: int | None) -> bool:
        if name in self.used:
            return True
        if parent is not None and parent not in self.used:
            return False
        self._num_uses += 1
        below = self._below(parent)
        while len(self.used) >= self._most:
            free = [each for each in self.used if each not in below]
            if not free:
                return False
            oldest = min(self.used[each] for each in free)
            del self.used[max(each for each in free if self.used[each] == oldest)]  # names grow along a chain
        self._parents[name] = parent
        self.used.update(dict.fromkeys([*below, name], self._num_uses))
        return True

    def use(self, name: int) -> None:
        self._num_uses += 1
        self.used.update(dict.fromkeys(self._below(name), self._num_uses))

    def _below(self, name: int | None) -> list[int]:
        found = []
        while name is not None and name in self.used:
            found.append(name)
            name = self._parents[name]
        return found


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_is_what_a_plain_count_says(seed: int) -> None:
    random, store, plain = Random(seed), CountingStore(200), Plain(20)
    trunks = [[1000 * name + depth for depth in range(random.randint(1, 12))] for name in range(8)]
    branches = [[*trunk[: len(trunk) // 2], *(100 + each for each in trunk[len(trunk) // 2 :])] for trunk in trunks]
    everything = sorted({name for each in (*trunks, *branches) for name in each})
    for _ in range(300):
        picked = random.choice(trunks + branches)
        names = picked[: random.randint(1, len(picked))]
        for depth, name in enumerate(names):
            kept = plain.keep(name, names[depth - 1] if depth else None)
            outcome = store.keep(key(name), 10, key(names[depth - 1]) if depth else None)
            assert kept is (outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS))
        if random.random() < 0.5 and names[-1] in plain.used:
            plain.use(names[-1])
            store.use(key(names[-1]))
        assert held(store, *everything) == [name in plain.used for name in everything]


def test_a_value_is_kept_once() -> None:
    store = CountingStore(100)
    assert chain(store, 1, 2) == [WriteOutcome.STORED] * 2
    assert chain(store, 1, 2) == [WriteOutcome.EXISTS] * 2
    assert (store.used_bytes, len(store)) == (20, 2)


def test_a_chain_that_does_not_fit_keeps_its_beginning() -> None:
    store = CountingStore(30)
    assert chain(store, 1, 2, 3, 4, 5)[-2:] == [WriteOutcome.NO_ROOM] * 2
    assert held(store, 1, 2, 3, 4, 5) == [True, True, True, False, False]
    assert store.keep(key(9), 31, None) is WriteOutcome.TOO_LARGE


def test_a_value_kept_again_after_it_was_deleted_below_another_can_go() -> None:
    store = CountingStore(30)
    chain(store, 1, 2)
    store.delete(SPACE, [key(1)])
    chain(store, 1)
    store.delete(SPACE, [key(2)])
    assert store.keep(key(9), 30, None) is WriteOutcome.STORED
    assert held(store, 1, 2, 9) == [False, False, True]


def test_what_a_deleted_value_stood_on_was_used_when_that_was() -> None:
    store = CountingStore(30)
    chain(store, 1, 2)
    chain(store, 11)
    store.use(key(2))
    store.delete(SPACE, [key(2)])
    chain(store, 21)
    chain(store, 31)
    assert held(store, 1, 11, 21, 31) == [True, False, True, True]


def test_many_uses_of_few_values_take_no_room() -> None:
    store = CountingStore(100)
    chain(store, 1, 2)
    for _ in range(10_000):
        store.use(key(2))
    assert len(store._ends) < 200


def test_deleted_values_are_gone_and_counted() -> None:
    store = CountingStore(100)
    chain(store, 1, 2)
    assert store.delete(SPACE, [key(2), key(7)]) == 1
    assert (store.used_bytes, held(store, 1, 2)) == (10, [True, False])


@pytest.mark.parametrize("seed", range(5))
def test_no_value_ever_outlives_what_it_stands_on_nor_the_budget_its_bound(seed: int) -> None:
    random, store = Random(seed), CountingStore(400)
    parents: dict[int, int] = {}
    for _ in range(300):
        path = [random.randrange(5)]
        for _ in range(random.randrange(12)):
            child = path[-1] * 3 + 5 + random.randrange(2)
            parents[child] = path[-1]
            path.append(child)
        chain(store, *path)
        assert store.used_bytes <= 400
        assert store.used_bytes == 10 * len(store)
        assert all(key(parent) in store for child, parent in parents.items() if key(child) in store)


def test_it_never_makes_up_bytes() -> None:
    store = CountingStore(100)
    chain(store, 1)
    with pytest.raises(StoreError):
        store.read_into(SPACE, [Read(key(1), memoryview(bytearray(10)))])
    with pytest.raises(StoreError):
        store.write_from(SPACE, [Write(key(2), memoryview(b"x"), NO_STAMP)])


def test_the_lowest_level_goes_first_and_counts_for_what_it_stands_on() -> None:
    store = CountingStore(40)
    store.keep(K[0], 10, None, Level.EXPENDABLE)
    store.keep(K[1], 10, K[0], Level.NORMAL)
    store.keep(K[2], 10, None, Level.VALUABLE)
    store.keep(K[3], 10, None, Level.EXPENDABLE)
    store.keep(K[4], 10, None)
    assert [key in store for key in K[:5]] == [True, True, True, False, True]
    store.relevel(SPACE, [K[1]], Level.EXPENDABLE)
    store.keep(K[5], 20, None)
    assert [key in store for key in K[:5]] == [False, False, True, False, True]


def test_what_a_value_stands_on_may_come_after_it() -> None:
    store = CountingStore(30)
    store.keep(K[1], 10, K[0])
    store.keep(K[0], 10, None, Level.EXPENDABLE)
    store.keep(K[2], 10, None)
    store.keep(K[3], 10, None)
    assert K[0] in store and K[1] not in store, "the beginning of a chain went before its end"
