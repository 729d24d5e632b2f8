"""Writes of one errand: sealed while the batch before is being written, in order, as far as they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

import numpy as np
import pytest

from stepwell.base.errand import Fate, FetchPages, PutPages
from stepwell.base.ids import Kind
from stepwell.base.keys import Namespace, PageKey
from stepwell.store.api import NO_PARENT, Space, Write, WriteOutcome, never
from stepwell.store.memory import MemoryStore
from stepwell.store.seal import checksum, stamp, stamp_all
from stepwell.transfer import store_hands
from stepwell.transfer.store_hands import StoreHands

SIZE, COUNT = 1000, 40
HERE = Namespace(model="m", layout="l")
KEYS = tuple(PageKey(bytes([at]) * 32) for at in range(COUNT))
IDS = np.arange(COUNT, dtype=np.int32)
PUT = PutPages(parent=None, first=0, keys=KEYS, ids=IDS)


class Pages:
    """Host pages, the second half to read into."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(1).integers(0, 256, (2 * COUNT, SIZE), dtype=np.uint8)

    def view(self, kind: Kind, page: int) -> memoryview:
        return memoryview(self.rows[page])


class Watched(MemoryStore):
    def __init__(self, on_write: Callable[[], None] = lambda: None) -> None:
        super().__init__(budget_bytes=1 << 20)
        self.batches: list[list[Write]] = []
        self.on_write = on_write

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self.batches.append(list(writes))
        self.on_write()
        return super().write_from(space, writes)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_hands, "FIRST_BATCH_BYTES", 4 * SIZE)
    monkeypatch.setattr(store_hands, "WRITE_BATCH_BYTES", 16 * SIZE)


def test_batches_grow_and_come_in_order_parents_before_children() -> None:
    store, pages = Watched(), Pages()
    hands = StoreHands(store, pages)
    assert set(hands.run(HERE, PUT, never).fates) == {Fate.OK}
    assert [len(batch) for batch in store.batches] == [4, 8, 16, 12]
    writes = [write for batch in store.batches for write in batch]
    assert [write.key for write in writes] == list(KEYS)
    assert [write.parent for write in writes] == [NO_PARENT, *KEYS[:-1]]
    fetched = hands.run(HERE, FetchPages(keys=KEYS, ids=IDS + COUNT), never)
    assert set(fetched.fates) == {Fate.OK} and np.array_equal(pages.rows[:COUNT], pages.rows[COUNT:])


def test_an_errand_called_off_keeps_what_was_written_and_writes_no_more() -> None:
    called_off = Event()
    store = Watched(called_off.set)
    outcome = StoreHands(store, Pages()).run(HERE, PUT, called_off.is_set)
    assert outcome.fates == (Fate.OK,) * 4 + (Fate.CANCELLED,) * 36 and len(store.batches) == 1


def test_a_page_that_cannot_be_seen_fails_the_errand_and_leaves_no_thread() -> None:
    class Broken(Pages):
        def view(self, kind: Kind, page: int) -> memoryview:
            if page == 30:
                raise IndexError(page)
            return super().view(kind, page)

    store = Watched()
    with pytest.raises(IndexError):
        StoreHands(store, Broken()).run(HERE, PUT, never)
    assert [len(batch) for batch in store.batches] == [4, 8, 16]


def test_stamps_made_in_bulk_are_the_stamps_made_one_by_one() -> None:
    space = StoreHands(Watched(), Pages()).space(HERE)
    values = [bytes([at]) * (at % 3) for at in range(COUNT)]
    digests = [checksum(value) for value in values]
    one_by_one = [stamp(space, key, length=len(v), digest=d) for key, v, d in zip(KEYS, values, digests, strict=True)]
    assert stamp_all(space, KEYS, [len(value) for value in values], digests) == one_by_one
