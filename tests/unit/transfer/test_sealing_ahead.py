"""Puts: an operation is sealed while the one before is being written; all are written in order, as far as they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from stepwell.base.errors import StoreError
from stepwell.base.ids import JobId, Kind
from stepwell.base.meters import SystemClock
from stepwell.base.prompt import Namespace, PageKey
from stepwell.base.tasks import FetchPages, ItemStatus, Outcome, PutCheckpoint, PutPages, Reply, StoreOp
from stepwell.jobs.executors import ThreadStoreExecutor
from stepwell.store.api import NO_PARENT, Space, Write, WriteOutcome, never
from stepwell.store.memory import MemoryStore
from stepwell.store.seal import checksum, stamp, stamp_all
from stepwell.transfer import store_worker
from stepwell.transfer.store_worker import Sealed, StoreWorker
from waiting import PATIENCE_S

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
    monkeypatch.setattr(store_worker, "WRITE_BATCH_BYTES", 16 * SIZE)


def test_batches_come_in_order_parents_before_children() -> None:
    store, pages = Watched(), Pages()
    worker = StoreWorker(store, pages)
    assert set(worker.run(HERE, PUT, never).statuses) == {ItemStatus.OK}
    assert [len(batch) for batch in store.batches] == [16, 16, 8]
    writes = [write for batch in store.batches for write in batch]
    assert [write.key for write in writes] == list(KEYS)
    assert [write.parent for write in writes] == [NO_PARENT, *KEYS[:-1]]
    fetched = worker.run(HERE, FetchPages(keys=KEYS, ids=IDS + COUNT), never)
    assert set(fetched.statuses) == {ItemStatus.OK} and np.array_equal(pages.rows[:COUNT], pages.rows[COUNT:])


def test_an_operation_called_off_keeps_what_was_written_and_writes_no_more() -> None:
    called_off = Event()
    store = Watched(called_off.set)
    outcome = StoreWorker(store, Pages()).run(HERE, PUT, called_off.is_set)
    assert outcome.statuses == (ItemStatus.OK,) * 16 + (ItemStatus.CANCELLED,) * 24 and len(store.batches) == 1


class Broken(Pages):
    """Its last page but nine cannot be seen."""

    def view(self, kind: Kind, page: int) -> memoryview:
        if page == 30:
            raise IndexError(page)
        return super().view(kind, page)


def test_a_page_that_cannot_be_seen_fails_its_operation_before_anything_is_written() -> None:
    store = Watched()
    with pytest.raises(IndexError):
        StoreWorker(store, Broken()).run(HERE, PUT, never)
    assert not store.batches


def part(number: int, start: int, stop: int) -> StoreOp:
    """The operation for some of the pages."""
    parent = KEYS[start - 1] if start else None
    task = PutPages(parent=parent, first=start, keys=KEYS[start:stop], ids=IDS[start:stop])
    return StoreOp(job=JobId(number), namespace=HERE, task=task)


def test_the_next_operation_is_sealed_while_one_is_written_and_written_after_it() -> None:
    writing, sealed_ahead = Event(), Event()

    class Told(Pages):
        def view(self, kind: Kind, page: int) -> memoryview:
            if page == COUNT - 1 and writing.is_set():
                sealed_ahead.set()
            return super().view(kind, page)

    def on_write() -> None:
        writing.set()
        assert sealed_ahead.wait(PATIENCE_S), "nothing was sealed while this was being written"

    store = Watched(on_write)
    store_executor = ThreadStoreExecutor([StoreWorker(store, Told())], SystemClock())
    store_executor.submit(part(1, 0, 10))
    assert writing.wait(PATIENCE_S)
    store_executor.submit(part(2, 10, COUNT))
    store_executor.drain(PATIENCE_S)
    store_executor.close()
    assert [reply.job for reply in store_executor.answers()] == [1, 2]
    assert [write.key for batch in store.batches for write in batch] == list(KEYS)


def test_what_is_sealed_behind_a_write_that_hangs_can_be_taken_back_and_is_not_written() -> None:
    writing, go = Event(), Event()

    def on_write() -> None:
        writing.set()
        assert go.wait(PATIENCE_S)

    store = Watched(on_write)
    store_executor = ThreadStoreExecutor([StoreWorker(store, Pages())], SystemClock())
    store_executor.submit(part(1, 0, 10))
    assert writing.wait(PATIENCE_S)
    store_executor.submit(part(2, 10, COUNT))
    assert store_executor.withdraw(JobId(2)) and not store_executor.withdraw(JobId(1))
    go.set()
    store_executor.drain(PATIENCE_S)
    store_executor.close()
    assert [reply.job for reply in store_executor.answers()] == [1] and len(store.batches) == 1


class Held:
    """An executor whose first write waits, while operations behind it are sealed."""

    def __init__(self, store: Watched, last_page: int) -> None:
        self._writing, self._go, self._sealing_last = Event(), Event(), Event()
        self.store = store
        store.on_write = self._wait

        class Told(Pages):
            def view(inner, kind: Kind, page: int) -> memoryview:
                if page == last_page:
                    self._sealing_last.set()
                return super().view(kind, page)

        self.executor = ThreadStoreExecutor([StoreWorker(store, Told())], SystemClock())

    def _wait(self) -> None:
        self._writing.set()
        assert self._go.wait(PATIENCE_S)

    def submit(self, *ops: StoreOp) -> None:
        """The first is being written, and all but the last are sealed, when this returns."""
        self.executor.submit(ops[0])
        assert self._writing.wait(PATIENCE_S)
        for op in ops[1:]:
            self.executor.submit(op)
        assert self._sealing_last.wait(PATIENCE_S)

    def finish(self) -> dict[int, Reply]:
        self._go.set()
        self.executor.drain(PATIENCE_S)
        self.executor.close()
        return {reply.job: reply for reply in self.executor.answers()}


def test_what_was_sealed_while_another_was_written_is_written_together_as_far_as_a_batch_takes_it() -> None:
    held = Held(Watched(), last_page=30)
    held.submit(part(1, 0, 4), part(2, 4, 8), part(3, 8, 12), part(4, 12, 20), part(5, 20, 24), part(6, 30, 40))
    replies = held.finish()
    assert [len(batch) for batch in held.store.batches[:2]] == [4, 16], "2, 3 and 4 are as much as a batch takes"
    written = [write for batch in held.store.batches for write in batch]
    assert [write.key for write in written] == [*KEYS[:24], *KEYS[30:]]
    assert [replies[job].outcome.statuses for job in (2, 3, 4)] == [(ItemStatus.OK,) * 4] * 2 + [(ItemStatus.OK,) * 8]
    assert [replies[job].outcome.moved_bytes for job in range(1, 7)] == [SIZE * pages for pages in (4, 4, 4, 8, 4, 10)]


def test_pages_of_two_spaces_are_not_written_together() -> None:
    held = Held(Watched(), last_page=30)
    elsewhere = replace(part(3, 8, 12), namespace=Namespace(model="other", layout="l"))
    held.submit(part(1, 0, 4), part(2, 4, 8), elsewhere, part(4, 12, 16), part(5, 30, 31))
    assert len(held.finish()) == 5
    assert [len(batch) for batch in held.store.batches[:3]] == [4, 4, 4]
    assert sum(map(len, held.store.batches)) == 17


def test_of_puts_that_go_together_one_is_called_off_and_the_others_are_written() -> None:
    held = Held(Watched(), last_page=30)
    held.submit(part(1, 0, 4), part(2, 4, 8), part(3, 8, 12), part(4, 12, 16), part(5, 30, 31))
    held.executor.cancel(JobId(2))
    assert held.executor.withdraw(JobId(4))
    replies = held.finish()
    assert sorted(replies) == [1, 2, 3, 5]
    assert replies[JobId(2)].outcome.statuses == (ItemStatus.CANCELLED,) * 4
    assert replies[JobId(3)].outcome.statuses == (ItemStatus.OK,) * 4
    assert [write.key for batch in held.store.batches for write in batch] == [*KEYS[:4], *KEYS[8:12], KEYS[30]]


def test_of_puts_that_go_together_only_the_one_that_the_store_cannot_take_fails() -> None:
    class Failing(Watched):
        def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
            outcomes = super().write_from(space, writes)
            if KEYS[8] in [write.key for write in writes]:
                raise StoreError("gone")
            return outcomes

    held = Held(Failing(), last_page=30)
    held.submit(part(1, 0, 4), part(2, 4, 8), part(3, 8, 12), part(4, 12, 16), part(5, 30, 31))
    replies = held.finish()
    assert [replies[JobId(job)].outcome.error for job in range(1, 6)] == [None, None, "StoreError: gone", None, None]
    assert replies[JobId(3)].outcome.statuses == (ItemStatus.FAILED,) * 4
    assert replies[JobId(2)].outcome.statuses == replies[JobId(4)].outcome.statuses == (ItemStatus.OK,) * 4


def test_one_failed_call_for_puts_that_go_together_does_not_count_as_many_failures() -> None:
    class Hiccup(Watched):
        def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
            if len(self.batches) == 1:
                self.batches.append(list(writes))
                raise StoreError("busy")
            return super().write_from(space, writes)

    held = Held(Hiccup(), last_page=30)
    held.submit(part(1, 0, 4), part(2, 4, 8), part(3, 8, 12), part(4, 12, 16), part(5, 30, 31))
    replies = held.finish()
    failed, *alone = map(len, held.store.batches[1:5])
    assert failed >= 12 and alone == [4, 4, 4]
    assert [reply.outcome.error for reply in replies.values()] == [None] * 5, "three in a row switch a store off"


@pytest.mark.parametrize("answered", [0, 5, 41])
def test_values_that_a_store_says_nothing_of_are_not_acknowledged(answered: int) -> None:
    class Terse(Watched):
        def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
            return (super().write_from(space, writes) + [WriteOutcome.STORED] * 41)[:answered]

    store_executor = ThreadStoreExecutor([StoreWorker(Terse(), Pages())], SystemClock())
    store_executor.submit(part(1, 0, 10))
    store_executor.drain(PATIENCE_S)
    store_executor.close()
    (reply,) = store_executor.answers()
    assert reply.outcome.statuses == (ItemStatus.FAILED,) * 10 and reply.outcome.moved_bytes == 0
    assert reply.outcome.error == f"StoreError: the store was given 10 values and answered for {answered}"


def test_a_checkpoint_gets_no_manifest_when_the_store_says_nothing_of_a_member() -> None:
    class Terse(Watched):
        def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
            return super().write_from(space, writes)[:1]

    store = Terse()
    none = np.empty(0, np.int32)
    task = PutCheckpoint(boundary=KEYS[0], page=1, window_keys=(), windows=none, points=IDS[:2])
    with pytest.raises(StoreError):
        StoreWorker(store, Pages()).run(HERE, task, never)
    assert [len(batch) for batch in store.batches] == [2], "members, and nothing behind them"


def test_puts_are_gathered_without_looking_at_all_of_them_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    class Counted(Space):
        def __eq__(self, other: object) -> bool:
            compared.append(self.digest)
            return isinstance(other, Space) and self.digest == other.digest

        def __hash__(self) -> int:
            compared.append(self.digest)
            return hash(self.digest)

    worker = StoreWorker(Watched(), Pages())
    sealed = Sealed(space=Counted(digest=bytes(32)), task=part(1, 0, 1).task, writes=(), places=(), size_bytes=0)
    monkeypatch.setattr(worker, "seal", lambda namespace, task: replace(sealed, space=Counted(digest=bytes(32))))
    writing, go = Event(), Event()

    def wait(group: Sequence[Sealed], cancelled: Callable[[], bool]) -> list[Outcome]:
        writing.set()
        assert go.wait(PATIENCE_S)
        return [Outcome(statuses=(ItemStatus.OK,)) for _ in group]

    monkeypatch.setattr(worker, "put", wait)
    store_executor = ThreadStoreExecutor([worker], SystemClock())
    for number in range(101):
        store_executor.submit(part(number, 0, 1))
    assert writing.wait(PATIENCE_S)
    go.set()
    store_executor.drain(PATIENCE_S)
    store_executor.close()
    assert len(store_executor.answers()) == 101 and len(compared) <= 2 * 101


def test_what_fails_while_it_is_sealed_comes_home_and_the_next_operation_is_written() -> None:
    store = Watched()
    store_executor = ThreadStoreExecutor([StoreWorker(store, Broken())], SystemClock())
    store_executor.submit(part(1, 20, COUNT))
    store_executor.submit(part(2, 0, 10))
    store_executor.close()  # everything handed in before is still done
    store_executor.drain(PATIENCE_S)
    first, second = store_executor.answers()
    assert first.outcome.statuses == (ItemStatus.FAILED,) * 20 and "IndexError" in (first.outcome.error or "")
    assert second.outcome.statuses == (ItemStatus.OK,) * 10 and len(store.batches) == 1


def test_stamps_made_in_bulk_are_the_stamps_made_one_by_one() -> None:
    space = StoreWorker(Watched(), Pages()).space(HERE)
    values = [bytes([at]) * (at % 3) for at in range(COUNT)]
    digests = [checksum(value) for value in values]
    one_by_one = [stamp(space, key, length=len(v), digest=d) for key, v, d in zip(KEYS, values, digests, strict=True)]
    assert stamp_all(space, KEYS, [len(value) for value in values], digests) == one_by_one
