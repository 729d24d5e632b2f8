"""What was taken away or damaged since the last snapshot is found by `check`, what a file claims costs nothing, and repair is
distinguished from failure by its exit status."""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from log_fixtures import OpenLog

from stepwell.base.errors import StoreError
from stepwell.base.meters import ManualClock
from stepwell.cli.main import main
from stepwell.store.api import WriteOutcome
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format import segment_list, snapshot
from stepwell.store.log.format.segment_list import name_of
from stepwell.store.log.inspect import check_directory, repair_directory
from stepwell.store.log.opening import open_directory
from stepwell.store.log.recovery.check import FILE_CUT, FILE_GONE, OTHER_STORE
from stepwell.store.log.state.segments import NEW_NAME
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.testing.store_contract import fetch, key, offer, space

HERE = space("here")
SIZE = 12_000


def killed(open_here: OpenLog, tmp_path: Path, *, count: int = 20, snapshot_at: int | None = None) -> Path:
    """A store of several segments that was killed; with a snapshot of its first values, or of none."""
    store = open_here()
    for at in range(count):
        if at == snapshot_at:
            store.snapshot()
        assert store.write_from(HERE, [offer(HERE, f"v{at}", SIZE)]) == [WriteOutcome.STORED]
    store.leave_in_child()
    return tmp_path / "store"


def full_segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.seg"))[:-1]


def remove(path: Path, other: Path) -> None:
    path.unlink()


def zero(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def cut(path: Path, other: Path) -> None:
    os.truncate(path, 20_000)


def cut_at_a_batch(path: Path, other: Path) -> None:
    os.truncate(path, 16_384)


def restore_older(path: Path, other: Path) -> None:
    """As it was when less had been written to it."""
    content = path.read_bytes()
    path.write_bytes(content[:16_384] + bytes(len(content) - 16_384))


def damage_in(directory: Path) -> list[str]:
    return [f"{one.file}: {one.reason}" for one in check_directory(directory, Disk(), lambda _: None).damage]


@pytest.mark.parametrize("snapshot_at", [None, 0, 6])
@pytest.mark.parametrize("harm", [remove, zero, empty, swap, cut, cut_at_a_batch, restore_older])
def test_check_finds_full_segments_that_were_harmed_since_the_snapshot(
    harm: Callable[[Path, Path], None], snapshot_at: int | None, open_here: OpenLog, tmp_path: Path
) -> None:
    whole = killed(open_here, tmp_path, snapshot_at=snapshot_at)
    segments = [path.name for path in full_segments(whole)]
    assert len(segments) >= 4 and not damage_in(whole)
    for at, name in enumerate(segments):
        directory = tmp_path / f"harmed {at}"
        shutil.copytree(whole, directory)
        harm(directory / name, directory / segments[at - 1])
        assert any(name in one for one in damage_in(directory)), f"{harm.__name__} of {name} went unnoticed"
        report = repair_directory(directory, Disk(), lambda _: None)
        assert report.damage and not report.left and not damage_in(directory)


def last_segment(directory: Path) -> Path:
    return sorted(directory.glob("*.seg"))[-1]


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("snapshot_at", [None, 0])
@pytest.mark.parametrize(
    ("harm", "reason"), [(remove, FILE_GONE), (empty, FILE_CUT), (cut, FILE_CUT), (cut_at_a_batch, FILE_CUT)]
)
def test_check_finds_that_the_last_segment_was_removed_or_cut(
    harm: Callable[[Path, Path], None], reason: str, snapshot_at: int | None, count: int, open_here: OpenLog, tmp_path: Path
) -> None:
    directory = killed(open_here, tmp_path, count=count, snapshot_at=snapshot_at)
    last = last_segment(directory)
    assert not damage_in(directory)
    harm(last, last)
    assert f"{last.name}: {reason}" in damage_in(directory)
    assert main(["store", "check", str(directory)]) == 1
    assert main(["store", "check", "--repair", str(directory)]) == 0
    assert main(["store", "check", str(directory)]) == 0
    store = open_here()
    assert store.write_from(HERE, [offer(HERE, "after", SIZE)]) == [WriteOutcome.STORED]
    store.audit()


@pytest.mark.parametrize("count", [1, 20])
def test_check_finds_that_the_last_segment_is_of_another_store(count: int, open_here: OpenLog, tmp_path: Path) -> None:
    directory = killed(open_here, tmp_path, count=count)
    with closing(
        open_directory(tmp_path / "other", clock=ManualClock(), budget_bytes=2**20, segment_bytes=2**16, direct=Direct.OFF)
    ) as other:
        other.write_from(HERE, [offer(HERE, "theirs", SIZE)])
    shutil.copy(last_segment(tmp_path / "other"), last_segment(directory))
    assert f"{last_segment(directory).name}: {OTHER_STORE}" in damage_in(directory)
    report = repair_directory(directory, Disk(), lambda _: None)
    assert report.damage and not report.left and not damage_in(directory)


def test_a_file_that_a_crash_left_half_made_is_no_damage_and_makes_way(open_here: OpenLog, tmp_path: Path) -> None:
    directory = killed(open_here, tmp_path)
    (directory / NEW_NAME).write_bytes(b"half")
    assert not damage_in(directory)
    open_here()
    assert not (directory / NEW_NAME).exists()


def test_what_was_reclaimed_is_not_missed(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    for at in range(200):
        store.write_from(HERE, [offer(HERE, f"v{at}", SIZE)])
        if at % 5 == 0:
            assert not damage_in(tmp_path / "store"), f"after {at} values, though nothing is wrong"
        if at == 60:
            store.snapshot()
    assert store.counters["dropped_values"] > 0
    store.leave_in_child()
    assert not damage_in(tmp_path / "store")
    store = open_here(budget="800KiB")  # which takes files away
    store.leave_in_child()
    assert not damage_in(tmp_path / "store")


def test_a_segment_removed_under_an_open_store_is_missed_too(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    for at in range(20):
        store.write_from(HERE, [offer(HERE, f"v{at}", SIZE)])
    full_segments(tmp_path / "store")[1].unlink()
    assert any(FILE_GONE in one for one in damage_in(tmp_path / "store"))


def test_the_list_of_segments_is_small_and_costs_one_sync_for_each(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    for at in range(20):
        store.write_from(HERE, [offer(HERE, f"v{at}", SIZE)])
    assert (tmp_path / "store" / segment_list.NAME).stat().st_size == 2 * 4096
    assert store.counters["snapshots"] == 0


class NoList(Disk):
    """Cannot write the list of segments."""

    def create(self, path: Path) -> int:
        if path.name.startswith(segment_list.NAME):
            raise OSError(28, "the disk is full")
        return super().create(path)


def test_without_room_for_the_list_values_are_stored_all_the_same(tmp_path: Path) -> None:
    store = open_directory(
        tmp_path / "store", clock=ManualClock(), budget_bytes=2**20, segment_bytes=2**16, direct=Direct.OFF, disk=NoList()
    )
    for at in range(100):
        assert store.write_from(HERE, [offer(HERE, f"v{at}", SIZE)]) == [WriteOutcome.STORED]
    assert store.counters["sealed_failed"] > 0
    store.leave_in_child()
    assert not damage_in(tmp_path / "store")


def test_a_broken_list_of_segments_is_damage_and_is_repaired(
    open_here: OpenLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = killed(open_here, tmp_path)
    (directory / segment_list.NAME).write_bytes(os.urandom(8192))
    assert main(["store", "check", str(directory)]) == 1
    assert "the list of segments cannot be used" in capsys.readouterr().out
    assert main(["store", "check", "--repair", str(directory)]) == 0
    assert main(["store", "check", str(directory)]) == 0
    full_segments(directory)[0].unlink()
    assert main(["store", "check", str(directory)]) == 1, "it is there again"


# ---- what a file claims ---------------------------------------------------------------------------


def claim(path: Path, size_bytes: int) -> None:
    """A snapshot whose head says that it is as long as it is made now. It takes up nothing on the disk."""
    head = bytearray(path.read_bytes()[: snapshot._HEAD.size])
    before = struct.unpack_from("<Q", head, len(head) - 8)[0]
    rows = size_bytes // snapshot.ROW_BYTES
    struct.pack_into("<Q", head, len(head) - 8, rows)
    size = path.stat().st_size + (rows - before) * snapshot.ROW_BYTES
    path.write_bytes(head)
    os.truncate(path, size)


@pytest.mark.parametrize("size", [64 << 20, 3 << 30, 2**43])
def test_a_snapshot_that_claims_to_be_huge_is_refused_in_little_memory(size: int, open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here(budget="8GiB", segment="16MiB")
    store.write_from(HERE, [offer(HERE, "x", SIZE)])
    store.close()
    try:
        claim(tmp_path / "store" / "snapshot", size)
    except OSError:
        pytest.skip("this file system has no files as large as that")
    tracemalloc.start()
    try:
        store = open_here(budget="", segment="")
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert fetch(store, HERE, "x", SIZE)


# ---- numbers that no log reaches ------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**33, 2**48, 2**61 - 1, 2**61, 2**62 - 1])
def test_a_stray_segment_with_an_absurd_number_is_named_at_once_and_can_be_moved_away(
    number: int, open_here: OpenLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = killed(open_here, tmp_path, count=4)
    stray = directory / name_of(number)
    stray.write_bytes(bytes(64 * 1024))
    with pytest.raises(StoreError, match=rf"{stray.name}, with an impossible number.*move it away"):
        open_here()
    for order in ("stat", "check"):
        assert main(["store", order, str(directory)]) == 2
    assert "impossible number" in capsys.readouterr().err
    stray.unlink()
    for turn in range(3):
        store = open_here()
        assert store.write_from(HERE, [offer(HERE, f"more {turn} {at}", SIZE) for at in range(6)]) == [WriteOutcome.STORED] * 6
        assert store.contains(HERE, [key("v0"), key("v3")]) == [True, True]


@pytest.mark.parametrize("ahead", [1, 1000, 2**31])
def test_an_empty_segment_a_little_ahead_stays_usable_for_ever(ahead: int, open_here: OpenLog, tmp_path: Path) -> None:
    directory = killed(open_here, tmp_path)
    last = int(sorted(directory.glob("*.seg"))[-1].stem, 16)
    (directory / name_of(last + ahead)).write_bytes(b"")
    for turn in range(4):
        store: LogStore = open_here()
        assert store.write_from(HERE, [offer(HERE, f"more {turn} {at}", SIZE) for at in range(6)]) == [WriteOutcome.STORED] * 6
        assert fetch(store, HERE, f"more {turn} 5", SIZE)
