"""Writers, readers and deleters at once, in a store so small that segments are reclaimed all the time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from log_fixtures import OpenLog

from stepwell.store.api import Space, WriteOutcome
from stepwell.testing.store_contract import fetch, key, offer

SPACES = [Space(digest=bytes([at]) * 32, tenant=f"tenant {at}") for at in range(3)]
SIZES = (60, 1024, 3000, 12_000)


def test_every_value_that_comes_back_is_the_one_saved(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()

    def live(thread: int) -> None:
        random = Random(thread)
        for turn in range(120):
            where, size = random.choice(SPACES), random.choice(SIZES)
            names = [f"{size}/{random.randrange(60)}" for _ in range(3)]
            match random.randrange(8):
                case 0:
                    store.delete(where, [key(name) for name in names])
                case 1 | 2 | 3:
                    for name in names:
                        fetch(store, where, name, size)  # asserts that it is whole, and its own
                case 4 if turn % 30 == 0:
                    store.clear(where.digest)
                case _:
                    outcomes = store.write_from(where, [offer(where, name, size) for name in dict.fromkeys(names)])
                    assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
            if turn % 40 == 0:
                store.snapshot()
                assert store.stat().directory_bytes <= 2**20

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(live, thread) for thread in range(4)]:
            done.result()
    store.audit()
    assert store.counters["carried_values"] and store.counters["dropped_values"], "the test must fill the store"
    values = store.stat().values
    store = open_here()
    store.audit()
    assert store.stat().values == values
    assert store.repair(lambda size: None).damage == ()
