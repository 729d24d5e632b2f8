"""The counting store is bounded at every moment, gives up what is deep before what it stands on, and has no bytes."""

from __future__ import annotations

from random import Random

import pytest

from stepwell.base.errors import StoreError
from stepwell.sim.store import CountingStore
from stepwell.store.api import NO_STAMP, Read, Space, Write, WriteOutcome

SPACE = Space(digest=bytes(32))


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


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_every_length_leave_what_a_plain_count_says(seed: int) -> None:
    """What a value stands on is brought up to date once a chain: it must make no difference to what goes."""
    random, store, plain = Random(seed), CountingStore(200), CountingStore(200)
    chains = [[100 * name + depth for depth in range(random.randint(1, 12))] for name in range(12)]
    for _ in range(200):
        picked = random.choice(chains)
        names = picked[: random.randint(1, len(picked))]
        outcomes = chain(store, *names)
        for depth, name in enumerate(names):
            plain._kept = None  # as if every value came alone
            assert plain.keep(key(name), 10, key(names[depth - 1]) if depth else None) is outcomes[depth]
        plain.use(key(names[-1]))
        everything = [name for each in chains for name in each]
        assert held(store, *everything) == held(plain, *everything)


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
