"""What a log says of its speed when it is opened."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from stepwell.base.meters import ManualClock
from stepwell.store.api import TimedRead, Write
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.opening import open_directory
from stepwell.store.log.state.log_state import IoMode
from stepwell.store.log.timed_reads import AT_MOST_S, READERS, tried_reads
from stepwell.store.seal import seal
from stepwell.store.wrappers import Slow
from stepwell.testing.store_contract import key, space

HERE = space("here")
MIB = 2**20


class SlowDisk(Disk):
    """Every read takes as long as `bytes_per_s` says, on a clock that a test holds."""

    def __init__(self, clock: ManualClock, bytes_per_s: float) -> None:
        self.clock, self.bytes_per_s = clock, bytes_per_s

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        moved = super().read(fd, buffers, offset)
        self.clock.advance(moved / self.bytes_per_s)
        return moved


def filled(directory: Path, values: int) -> None:
    data = memoryview(b"\x5a" * MIB)
    with closing(open_directory(directory, clock=ManualClock(), budget_bytes=256 * MIB)) as store:
        for at in range(values):
            store.write_from(HERE, [Write(key=key(str(at)), data=data, stamp=seal(HERE, key(str(at)), data))])


def test_a_log_reads_a_little_of_what_it_holds_and_says_how_fast_that_was(tmp_path: Path) -> None:
    filled(tmp_path / "log", 40)
    clock = ManualClock()
    with closing(open_directory(tmp_path / "log", clock=clock, disk=SlowDisk(clock, 1e9))) as store:
        one, many = store.traits.reads
        assert one.size_bytes < many.size_bytes <= 64 * MIB
        assert 0.5e9 < many.size_bytes / many.seconds < 1.5e9


def test_a_slow_disk_does_not_hold_up_the_opening(tmp_path: Path) -> None:
    filled(tmp_path / "log", 40)
    clock = ManualClock()
    before_s = clock.now()
    with closing(open_directory(tmp_path / "log", clock=clock, disk=SlowDisk(clock, 20e6))) as store:
        one = 9 * MIB / 20e6  # a turn that has begun is not interrupted
        assert clock.now() - before_s < AT_MOST_S + (1 + READERS) * one + 9 * MIB / 20e6 * 4
        assert all(each.size_bytes / each.seconds < 40e6 for each in store.traits.reads)


def test_a_log_that_holds_too_little_goes_by_its_disk(tmp_path: Path) -> None:
    assert tried_reads(IoMode()) == ()
    (read,) = tried_reads(IoMode(read_bytes_per_s=2 * 10**9))
    assert read.size_bytes / read.seconds == pytest.approx(2e9)
    with closing(open_directory(tmp_path / "log", clock=ManualClock(), budget_bytes=64 * MIB)) as store:
        assert store.traits.reads == ()


def test_a_store_that_is_held_down_says_so(tmp_path: Path) -> None:
    class Quick(Slow):
        def __init__(self) -> None:
            super().__init__(store, sleep=lambda seconds: None, latency_s=0.5, bytes_per_s=1e6)

    with closing(open_directory(tmp_path / "log", clock=ManualClock(), budget_bytes=64 * MIB)) as store:
        assert Quick()._slower(TimedRead(32 * MIB, 0.01)).seconds > 8.0 + 0.5
