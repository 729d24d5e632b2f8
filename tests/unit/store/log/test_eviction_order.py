"""What goes first is known at all times: no put at a quota and no reclaim looks at all values, and every link is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from log_fixtures import OpenLog

from stepwell.base.ids import Level
from stepwell.store.api import NO_PARENT, Space
from stepwell.store.log.format.batch import ENTRY, Batch, BatchKind
from stepwell.store.log.state.columns import Columns, Rows
from stepwell.store.log.state.index import Index
from stepwell.store.log.writing.victim import VictimOrder, evict_first
from stepwell.testing.store_contract import offer, space

HERE = space("order")
ALICE = Space(digest=b"a" * 32, tenant="alice")
SIZE = 9000
LOOKS = 12  # at segments, for one choice: four new ones, and eight again


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many segments each choice looked at, while nothing may look at all values."""

    def held(columns: Columns) -> Rows:
        raise AssertionError("all values were looked at")

    counts: list[int] = []
    choose, look = VictimOrder.choose, VictimOrder._look

    def counted_choose(order, *args):  # type: ignore[no-untyped-def]
        counts.append(0)
        return choose(order, *args)

    def counted_look(order, *args):  # type: ignore[no-untyped-def]
        counts[-1] += 1
        return look(order, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Columns, "held", held)
        patch.setattr(VictimOrder, "choose", counted_choose)
        patch.setattr(VictimOrder, "_look", counted_look)
        yield counts


def test_no_reclaim_and_no_put_at_a_quota_looks_at_all_values(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_here(budget="4MiB", quota_alice="16KiB")
    with counted(monkeypatch) as looks:
        for at in range(600):
            level = Level.EXPENDABLE if at % 3 else Level.NORMAL
            store.write_from(HERE, [offer(HERE, f"v{at}", SIZE, level=level)])
            store.write_from(ALICE, [offer(ALICE, f"a{at}", 500, level=level)])
    assert 8 * 1024 < store._state.index.tenant_bytes("alice") <= 16 * 1024
    assert len(store._state.segments.table) > 3 * LOOKS
    assert looks and max(looks) <= LOOKS


class Model:
    """The same values in an index and in dictionaries."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.index, self.where = Index(), Space(digest=bytes([7]) * 32, tenant="alice")
        self.index.keep_order(["alice"])
        self.parents: dict[int, int] = {}
        self.depths: dict[int, int] = {0: -1}

    def there(self) -> list[int]:
        return [int.from_bytes(key, "little") for key in self.index.rows_of(self.where.digest)]

    def put(self, number: int) -> None:
        """Also where what it stands on is not there: it may come later, or again."""
        if number not in self.parents:
            self.parents[number] = int(self.rng.integers(0, number))
            self.depths[number] = self.depths[self.parents[number]] + 1
        parent = self.parents[number].to_bytes(32, "little") if self.parents[number] else NO_PARENT
        entries = np.zeros(1, ENTRY)
        entries["key"], entries["parent"] = (np.frombuffer(each, np.uint8) for each in (number.to_bytes(32, "little"), parent))
        entries["length"], entries["depth"], entries["flags"] = 5000, self.depths[number], self.rng.integers(0, 3)
        tick = self.index.next_tick()
        batch = Batch(
            kind=BatchKind.PUT, segment=int(self.rng.integers(1, 5)), offset=0, header_bytes=4096, total_bytes=12288, seq=tick,
            settled=0, space=self.where, entries=entries,
        )  # fmt: skip
        self.index.put(batch, used=tick)
        self.index.note_use(self.where.digest, [parent])

    def remove(self, number: int) -> None:
        self.index.remove(np.array([self.index.rows_of(self.where.digest)[number.to_bytes(32, "little")]], np.int64))

    def relevel(self, number: int) -> None:
        level = Level(int(self.rng.integers(0, 3)))
        self.index.relevel(self.where.digest, [number.to_bytes(32, "little")], level)


def grown(seed: int) -> Model:
    model = Model(seed)
    for number in range(1, 60):
        model.put(number)
        if model.rng.random() < 0.5:
            model.relevel(int(model.rng.choice(model.there())))
        if model.rng.random() < 0.4:
            model.remove(int(model.rng.choice(model.there())))
        missing = sorted(set(model.parents) - set(model.there()))
        if missing and model.rng.random() < 0.3:
            model.put(int(model.rng.choice(missing)))
        model.index.audit()
    return model


@pytest.mark.parametrize("seed", range(20))
def test_links_levels_and_queues_follow_every_change(seed: int) -> None:
    grown(seed)


@pytest.mark.parametrize("seed", range(10))
def test_an_opening_finds_the_order_that_was_kept(seed: int) -> None:
    kept = grown(seed).index
    kept.settle_uses()
    spaces, columns = kept.dump()
    opened = Index()
    assert opened.load(spaces, columns, kept.tick)
    opened.keep_order(["alice"])
    opened.audit()
    orders = []
    for index in (kept, opened):
        rows = evict_first(index, "alice", 2**40, most=2**20)
        orders.append([index.columns.key[row].tobytes() for row in rows])
        index.remove(rows)
        index.audit()
        assert not index.num_values
    assert orders[0] == orders[1]
