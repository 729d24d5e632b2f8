"""Space: the budget at every moment, which values go first, quotas, and clearing one namespace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from log_fixtures import OpenLog

from stepwell.base.meters import ManualClock
from stepwell.store.api import Read, ReadOutcome, Space, WriteOutcome
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.opening import open_directory
from stepwell.store.log.store import LogStore
from stepwell.testing.store_contract import chain, fetch, key, offer, payload, space
from waiting import PATIENCE_S

HERE = space("here")
ALICE, BOB = Space(digest=b"a" * 32, tenant="alice"), Space(digest=b"b" * 32, tenant="bob")


class Watched(Disk):
    """Adds up the directory after everything that could make it larger."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.largest = 0
        self.directory: Path | None = None

    def create(self, path: Path) -> int:
        self.directory = path.parent
        return super().create(path)

    def allocate(self, fd: int, size: int) -> None:
        super().allocate(fd, size)
        self._weigh()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        super().write(fd, buffers, offset)
        self._weigh()

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._weigh()

    def _weigh(self) -> None:
        assert self.directory is not None
        self.largest = max(self.largest, self.total_bytes(self.directory))
        assert self.largest <= self.budget_bytes, f"{self.largest=} {self.budget_bytes=}"


@pytest.mark.parametrize("size", [20, 1024, 1025, 20_000])
def test_the_directory_never_outgrows_its_budget(size: int, tmp_path: Path) -> None:
    budget = 1200 * 1024
    disk = Watched(budget)
    with closing(open_directory(tmp_path, clock=ManualClock(), budget_bytes=budget, segment_bytes=64 * 1024, disk=disk)) as store:
        for turn in range(80):
            store.write_from(HERE, [offer(HERE, f"{turn}/{at}", size) for at in range(max(1, 40_000 // (size + 200)))])
            if turn % 20 == 10:
                store.snapshot()
        store.audit()
        assert store.counters["dropped_values"] > 0, "the test must fill the store"
        assert store.counters["snapshots"] + store.counters["snapshots_skipped"] == 4
    assert disk.largest >= budget // 2, "and use what it was given"


def fill(store: LogStore, count: int, prefix: str = "fill", where: Space = HERE) -> None:
    for at in range(count):
        assert store.write_from(where, [offer(where, f"{prefix} {at}", 9000)]) == [WriteOutcome.STORED]


def test_a_value_used_again_outlives_its_segment(open_here: OpenLog) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "hot", 9000), offer(HERE, "cold", 9000)])
    for at in range(200):
        fill(store, 1, f"fill {at}")
        assert fetch(store, HERE, "hot", 9000), f"given up after {at} others, though it was just used"
    assert fetch(store, HERE, "cold", 9000) is None
    assert store.counters["carried_values"] > 0


def test_values_deep_in_a_chain_go_before_the_ones_they_stand_on(open_here: OpenLog) -> None:
    store = open_here()
    names = [f"link {depth}" for depth in range(12)]
    store.write_from(HERE, chain(HERE, names, 9000))
    for at in range(200):
        fill(store, 1, f"fill {at}")
        there = store.contains(HERE, [key(name) for name in names])
        assert there == sorted(there, reverse=True), f"a link stands on nothing: {there}"
    assert not any(there)


def test_reading_a_leaf_keeps_all_it_stands_on(open_here: OpenLog) -> None:
    store = open_here()
    store.write_from(HERE, chain(HERE, ["root", "middle", "leaf"], 9000))
    for at in range(150):
        fill(store, 1, f"fill {at}")
        assert fetch(store, HERE, "leaf", 9000)
    assert store.contains(HERE, [key("root"), key("middle")]) == [True, True]


def test_who_is_warm_is_remembered_over_a_restart(open_here: OpenLog) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "warm", 9000)])
    fill(store, 12)
    assert fetch(store, HERE, "warm", 9000)
    store = open_here()
    fill(store, 16, "later")
    assert store.contains(HERE, [key("warm"), key("fill 0")]) == [True, False]


def test_a_tenant_over_its_quota_gives_up_its_own_coldest(open_here: OpenLog) -> None:
    store = open_here(quota_alice="64KiB")
    fill(store, 10, "bob's", BOB)
    fill(store, 20, "alice's", ALICE)
    by_tenant = {stat.tenant: stat for stat in store.stat().spaces}
    assert by_tenant["alice"].disk_bytes <= 64 * 1024 and by_tenant["bob"].values == 10
    assert fetch(store, ALICE, "alice's 19", 9000) and not fetch(store, ALICE, "alice's 0", 9000)
    assert store.write_from(ALICE, [offer(ALICE, "huge", 20_000)] * 1) == [WriteOutcome.STORED]
    many = [offer(ALICE, f"many {at}", 9000) for at in range(8)]
    outcomes = store.write_from(ALICE, many)
    assert outcomes == [WriteOutcome.STORED] * 5 + [WriteOutcome.NO_ROOM] * 3, "earlier entries are kept before later ones"


class Unwalked(list[Space | None]):
    """A list of spaces that raises when a caller goes through it."""

    def __iter__(self) -> Iterator[Space | None]:
        raise AssertionError("a write walked all spaces")


def test_a_write_below_its_quota_looks_at_no_other_space(open_here: OpenLog) -> None:
    store = open_here(quota_alice="256KiB", quota_bob="256KiB")
    for at in range(20):
        fill(store, 1, "few", Space(digest=bytes([at]) * 32, tenant="alice"))
    index = store._state.index
    index.spaces = Unwalked(index.spaces)
    fill(store, 1, "alice's", ALICE)
    fill(store, 1, "bob's", BOB)
    fill(store, 1, "no one's", HERE)
    index.spaces = [index.spaces[number] for number in range(len(index.spaces))]
    store.audit()


def test_what_a_tenant_takes_up_is_known_at_all_times(open_here: OpenLog) -> None:
    store = open_here(quota_alice="64KiB")
    fill(store, 20, "alice's", ALICE)
    fill(store, 3, "bob's", BOB)
    assert store.delete(BOB, [key("bob's 0")]) == 1
    for _ in range(2):
        store.audit()
        by_tenant = {stat.tenant: stat.disk_bytes for stat in store.stat().spaces}
        assert {name: store._state.index.tenant_bytes(name) for name in by_tenant} == by_tenant
        store = open_here()
    store.clear(BOB.digest)
    store.audit()
    assert store._state.index.tenant_bytes("bob") == 0


def test_clear_takes_one_namespace_for_good_and_no_other(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    for where in (ALICE, BOB):
        store.write_from(where, [offer(where, f"v{at}", 2000) for at in range(5)])
    assert store.clear(ALICE.digest) == 5 and store.clear(ALICE.digest) == 0
    store.write_from(ALICE, [offer(ALICE, "anew", 2000)])
    for _ in range(2):
        store = open_here()
        assert [stat.values for stat in store.stat().spaces if stat.tenant == "bob"] == [5]
        assert fetch(store, ALICE, "anew", 2000) and store.contains(ALICE, [key("v0"), key("v4")]) == [False, False]
        store.close()
        (tmp_path / "store" / "snapshot").unlink()


def test_a_segment_is_not_written_over_while_it_is_read(open_here: OpenLog) -> None:
    store = open_here()
    fill(store, 3, "old")
    intos = [memoryview(bytearray(9000)) for _ in range(3)]
    asked = []

    def cancelled() -> bool:
        if not asked:  # the places are known, nothing is read yet: now everything else happens
            asked.append(Thread(target=fill, args=(store, 150)))
            asked[0].start()
            asked[0].join(PATIENCE_S)
        return False

    results = store.read_into(HERE, [Read(key=key(f"old {at}"), into=into) for at, into in enumerate(intos)], cancelled=cancelled)
    asked[0].join()
    fill(store, 60, "later")
    assert [result.outcome for result in results] == [ReadOutcome.FOUND] * 3
    assert all(into == payload(f"old {at}", 9000) for at, into in enumerate(intos))
    assert store.contains(HERE, [key("old 0")]) == [False], "the test must have written over it"


def test_marks_alone_never_fill_the_store(open_here: OpenLog) -> None:
    store = open_here(budget="900KiB")
    store.write_from(HERE, [offer(HERE, "keeps an old segment alive", 9000)])
    for turn in range(120):
        names = [f"{turn}/{at}" for at in range(60)]
        assert set(store.write_from(HERE, [offer(HERE, name, 100) for name in names])) == {WriteOutcome.STORED}
        assert store.delete(HERE, [key(name) for name in names]) == 60
        assert fetch(store, HERE, "keeps an old segment alive", 9000), f"given up in turn {turn}, though it was just used"
    store.audit()


def test_a_delete_outlives_snapshots_and_segments_as_long_as_the_bytes_it_hides(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    fill(store, 3, "hot")
    fill(store, 1, "deleted")  # in the first segment, with values that keep it from ever being reclaimed
    fill(store, 1, "other")
    assert store.delete(HERE, [key("deleted 0")]) == 1
    for turn in range(3):
        store = open_here()  # from here on only the snapshot has the delete
        for at in range(30):
            fill(store, 1, f"{turn} {at}")
            assert all(fetch(store, HERE, f"hot {hot}", 9000) for hot in range(3))
    store.close()
    assert (tmp_path / "store" / f"{1:016x}.seg").exists(), "the bytes must still be there, or the test proves nothing"
    (tmp_path / "store" / "snapshot").unlink()
    store = open_here()
    assert store.contains(HERE, [key("deleted 0"), key("hot 0")]) == [False, True]
