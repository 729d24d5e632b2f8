"""The memory store evicts the lowest level first, of one level the oldest, and finds it without looking at all values."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from stepwell.base.ids import Level
from stepwell.store.api import NO_PARENT
from stepwell.store.memory import MemoryStore
from stepwell.testing.store_contract import fetch, key, offer, space

HERE = space("order")
SIZE = 10


def first_to_go(store: MemoryStore) -> tuple[bytes, bytes]:
    """By looking at all of them: the oldest of those whose level, and that of all that stand on them, is lowest."""
    levels = {name: value.level for name, value in store._values.items()}
    for value in store._values.values():
        below = (HERE.digest, value.parent)
        while levels.get(below, value.level) < value.level:
            levels[below] = value.level
            below = (HERE.digest, store._values[below].parent)
    return min(levels, key=lambda name: (levels[name], store._values[name].used))


@pytest.mark.parametrize("seed", range(20))
def test_who_goes_is_who_would_be_found_by_looking_at_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, store, gone = Random(seed), MemoryStore(40 * SIZE), []
    choose = store._first_to_go

    def chosen() -> tuple[bytes, bytes]:
        expected = first_to_go(store)
        gone.append(choose())
        assert gone[-1] == expected
        return expected

    monkeypatch.setattr(store, "_first_to_go", chosen)
    for number in range(400):
        own = number ^ 1  # some come before what they stand on
        parent = key(str(random.randrange(max(own - 30, 0), own))) if own and random.random() < 0.7 else NO_PARENT
        store.write_from(HERE, [offer(HERE, str(own), SIZE, parent=parent, level=random.choice(list(Level)))])
        picked = [str(random.randrange(number + 1)) for _ in range(3)]
        if random.random() < 0.3:
            store.relevel(HERE, [key(picked[2])], random.choice(list(Level)))
        if random.random() < 0.2:
            fetch(store, HERE, picked[0], SIZE)
        if random.random() < 0.1:
            store.delete(HERE, [key(picked[1])])
    assert len(gone) > 200


class Watched(dict):  # type: ignore[type-arg]
    scans = 0

    def __iter__(self) -> Iterator[object]:
        self.scans += 1
        return super().__iter__()

    def items(self):  # type: ignore[no-untyped-def]
        self.scans += 1
        return super().items()


def test_a_full_store_is_not_looked_through_for_every_write() -> None:
    store = MemoryStore(1000 * SIZE)
    store._values = values = Watched()
    for number in range(2000):
        store.write_from(HERE, [offer(HERE, str(number), SIZE, level=Level(number % 2))])
    assert len(values) == 1000 and values.scans < 20
