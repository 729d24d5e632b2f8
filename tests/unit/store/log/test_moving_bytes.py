"""How bytes move: many callers per sync, many values per call, past the page cache where that can be."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier, Event

import pytest

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import ManualClock, SystemClock
from stepwell.store.api import Read, ReadOutcome, Write, WriteOutcome
from stepwell.store.log import store as store_module
from stepwell.store.log.disk import page_cache
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.opening import open_directory
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.store.seal import seal
from stepwell.testing.store_contract import fetch, key, offer, payload, space
from waiting import PATIENCE_S, wait_until

HERE = space("here")
MIB = 2**20


class Counting(Disk):
    """Counts calls, and can hold a sync back."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []  # descriptor, bytes
        self.writes: list[int] = []
        self.syncs = 0
        self.syncing, self.go_on = Event(), Event()
        self.go_on.set()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads.append((fd, sum(map(len, buffers))))
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.writes.append(fd)
        super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.syncs += 1
        self.syncing.set()
        assert self.go_on.wait(PATIENCE_S), "the test never released the sync"
        super().sync(fd)


@pytest.fixture
def disk() -> Counting:
    return Counting()


@pytest.fixture
def open_with(tmp_path: Path, disk: Counting) -> Iterator[Callable[[Direct], LogStore]]:
    stores: list[LogStore] = []

    def open_(direct: Direct) -> LogStore:
        stores.append(
            open_directory(
                tmp_path / "store", clock=ManualClock(), budget_bytes=96 * MIB, segment_bytes=16 * MIB, direct=direct, disk=disk
            )
        )
        disk.reads, disk.writes, disk.syncs = [], [], 0
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))[:size]


def test_callers_that_wait_share_one_sync(open_with: Callable[[Direct], LogStore], disk: Counting) -> None:
    store = open_with(Direct.OFF)
    disk.go_on.clear()
    disk.syncing.clear()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(store.write_from, HERE, [offer(HERE, "first")])
        assert disk.syncing.wait(PATIENCE_S)
        others = [pool.submit(store.write_from, HERE, [offer(HERE, f"other {at}")]) for at in range(8)]
        wait_until(lambda: len(store._group_commit._queue) == 9, "all others wait behind the first")
        assert not first.done() and store.contains(HERE, [key("first")]) == [False], "nothing is there before it is safe"
        disk.go_on.set()
        assert all(future.result() == [WriteOutcome.STORED] for future in [first, *others])
    assert disk.syncs == 2 and len(disk.writes) == 2


def test_values_that_lie_together_are_read_in_one_call(open_with: Callable[[Direct], LogStore], disk: Counting) -> None:
    store = open_with(Direct.OFF)
    for half in range(2):
        store.write_from(HERE, [offer(HERE, f"{half}/{at}", 5000) for at in range(20)])
    names = [f"{half}/{at}" for at in range(20) for half in range(2)]  # out of order
    reads = [Read(key=key(name), into=memoryview(bytearray(5000))) for name in names]
    assert {result.outcome for result in store.read_into(HERE, reads)} == {ReadOutcome.FOUND}
    assert all(read.into == payload(name, 5000) for name, read in zip(names, reads, strict=True))
    assert len(disk.reads) == 1


def test_a_cancellation_is_heard_after_a_few_mib(open_with: Callable[[Direct], LogStore], disk: Counting) -> None:
    store = open_with(Direct.OFF)
    names = [f"v{at}" for at in range(24)]
    for name in names:
        store.write_from(HERE, [offer(HERE, name, MIB)])
    reads = [Read(key=key(name), into=memoryview(bytearray(MIB))) for name in names]
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(len(disk.reads))
        return len(asked) > 1

    outcomes = [result.outcome for result in store.read_into(HERE, reads, cancelled=cancelled)]
    found = outcomes.count(ReadOutcome.FOUND)
    assert 0 < found <= 8 and outcomes == [ReadOutcome.FOUND] * found + [ReadOutcome.CANCELLED] * (24 - found)


def test_small_values_share_a_block(open_with: Callable[[Direct], LogStore]) -> None:
    store = open_with(Direct.OFF)
    store.write_from(HERE, [offer(HERE, f"manifest {at}", 300) for at in range(8)])
    active = store._state.active
    assert active is not None and active.end == 4096, "eight manifests and their header in one block"
    assert all(fetch(store, HERE, f"manifest {at}", 300) for at in range(8))


@pytest.mark.parametrize("size", [1025, 4095, 4096, 4097, 100_000, 3 * MIB + 5])
def test_values_of_any_length_go_past_the_page_cache(size: int, open_with: Callable[[Direct], LogStore], disk: Counting) -> None:
    try:
        store = open_with(Direct.ON)
    except ConfigError as error:
        if "no direct I/O" not in str(error):
            raise
        pytest.skip("this file system has no direct I/O: set TMPDIR to a folder on a disk")
    data, into, odd = aligned(size), aligned(size), aligned(size + 3)[3:]
    data[:] = payload("x", size)
    store.write_from(HERE, [Write(key=key("x"), data=data, stamp=seal(HERE, key("x"), data)), offer(HERE, "small", 10)])
    segment = store._state.active
    assert segment is not None and disk.writes == [segment.direct_fd]
    assert store.read_into(HERE, [Read(key=key("x"), into=into)])[0].outcome is ReadOutcome.FOUND and into == data
    assert [fd for fd, _ in disk.reads] == [segment.direct_fd]
    assert store.read_into(HERE, [Read(key=key("x"), into=odd)])[0].outcome is ReadOutcome.FOUND and odd == data
    assert fetch(store, HERE, "small", 10)
    odd_data = memoryview(bytes(odd))
    assert store.write_from(HERE, [Write(key=key("odd"), data=odd_data, stamp=seal(HERE, key("odd"), odd_data))]) == [
        WriteOutcome.STORED
    ]
    assert store.read_into(HERE, [Read(key=key("odd"), into=into)])[0].outcome is ReadOutcome.FOUND and into == data


def test_what_the_page_cache_has_comes_from_there_and_the_rest_past_it(
    open_with: Callable[[Direct], LogStore], disk: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        store = open_with(Direct.ON)
    except ConfigError as error:
        if "no direct I/O" not in str(error):
            raise
        pytest.skip("this file system has no direct I/O: set TMPDIR to a folder on a disk")
    data, into = aligned(MIB), aligned(MIB)
    data[:] = payload("x", MIB)
    store.write_from(HERE, [Write(key=key("x"), data=data, stamp=seal(HERE, key("x"), data))])
    segment = store._state.active
    assert segment is not None
    disk.reads, asked = [], []

    def is_cached(fd: int, offset: int, size: int) -> bool:
        asked.append((fd, offset, size))
        return len(asked) > 1

    monkeypatch.setattr(disk, "is_cached", is_cached)
    for _ in range(2):
        into[:] = bytes(MIB)
        assert store.read_into(HERE, [Read(key=key("x"), into=into)])[0].outcome is ReadOutcome.FOUND and into == data
    assert disk.reads == [(segment.direct_fd, MIB), (segment.fd, MIB)]
    assert asked == [(segment.fd, 4096, MIB)] * 2, "the value lies behind one block of header"


def test_the_page_cache_is_known(tmp_path: Path) -> None:
    path, disk = tmp_path / "file", Disk()
    path.write_bytes(bytes(64 * 1024))
    fd = disk.open(path)
    try:
        disk.sync(fd)
        if not page_cache.holds(fd, 0, 64 * 1024):
            pytest.skip("this kernel does not say what it keeps")
        assert disk.is_cached(fd, 5000, 50_000) and not disk.is_cached(fd, 0, 65 * 1024) and not disk.is_cached(fd, 0, 0)
        disk.drop_cached(fd, 32 * 1024, 32 * 1024)
        assert disk.is_cached(fd, 0, 4096) or not disk.is_cached(fd, 0, 64 * 1024), "a file that lacks a part is not whole"
    finally:
        disk.close(fd)
    assert not disk.is_cached(fd, 0, 4096), "of a descriptor that is closed nothing is known"


def test_both_ways_are_tried_and_timed_within_the_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with closing(open_directory(tmp_path / "store", clock=SystemClock(), budget_bytes=64 * MIB, segment_bytes=4 * MIB)) as store:
        measured = store.measured
        assert measured.read_bytes_per_s > 0 and measured.write_bytes_per_s > 0
        assert f"{tmp_path / 'store'}: reads {'past' if measured.direct_reads else 'through'} the page cache at " in caplog.text
        assert store.stat().directory_bytes <= 64 * MIB and store.stat().values == 0
    with closing(open_directory(tmp_path / "store", clock=SystemClock())) as store:
        assert store.counters["recovered_batches"] == 0 and store.counters["damaged_gaps"] == 0, "a probe leaves nothing"


class SlowForMany(Disk):
    """A page cache that is as fast as can be for one reader, and slow for several; time is a clock of its own."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.direct, self.reading = clock, set[int](), Barrier(4)

    def open(self, path: Path, *, writable: bool = True, direct: bool = False) -> int:
        fd = super().open(path, writable=writable, direct=direct)
        self.direct.add(fd) if direct else self.direct.discard(fd)
        return fd

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        first = self.reading.wait(PATIENCE_S) == 0  # breaks unless four read at once
        if first:
            self.clock.advance(0.001 if fd in self.direct else 0.002)
        self.reading.wait(PATIENCE_S)
        return super().read(fd, buffers, offset)


def test_the_way_to_read_is_chosen_by_several_readers_at_once(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = SlowForMany(clock)
    with closing(
        open_directory(tmp_path / "store", clock=clock, budget_bytes=64 * MIB, segment_bytes=4 * MIB, disk=disk)
    ) as store:
        best_s = 0.001 if disk.direct else 0.002  # a file system without direct I/O has one way only
        assert store.measured.read_bytes_per_s == pytest.approx(2 * MIB / best_s, rel=1e-3)


def test_a_value_cut_off_on_disk_is_damaged(open_with: Callable[[Direct], LogStore], tmp_path: Path) -> None:
    store = open_with(Direct.OFF)
    store.write_from(HERE, [offer(HERE, "x", 50_000)])
    (path,) = (tmp_path / "store").glob("*.seg")
    with path.open("r+b") as file:
        file.truncate(20_000)
    (result,) = store.read_into(HERE, [Read(key=key("x"), into=memoryview(bytearray(50_000)))])
    assert result.outcome is ReadOutcome.DAMAGED and result.stamp == b""


def test_a_read_that_hangs_makes_close_say_so_and_keeps_its_file_open(
    open_with: Callable[[Direct], LogStore], disk: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "READERS_END_S", 0.05)
    reading, go_on, read = Event(), Event(), disk.read

    def hang(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return read(fd, buffers, offset)

    store = open_with(Direct.OFF)
    store.write_from(HERE, [offer(HERE, "a", 5000)])
    monkeypatch.setattr(disk, "read", hang)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(fetch, store, HERE, "a", 5000)
        assert reading.wait(PATIENCE_S)
        with pytest.raises(StoreError, match="did not end within"):
            store.close()
        with pytest.raises(StoreError, match="closed"):
            store.contains(HERE, [key("a")])
        with pytest.raises(StoreError):
            open_directory(tmp_path / "store", clock=SystemClock())  # no other process may write to what is being read
        go_on.set()
        assert coming.result(PATIENCE_S) == payload("a", 5000), "its file was not closed under it"
    store.close()  # a second one does nothing
