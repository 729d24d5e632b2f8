"""Files that others left, took away or damaged: each is an error that says so, or is left alone. Nothing is made up or lost."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from log_fixtures import OpenLog

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import ManualClock, SystemClock
from stepwell.cli.main import main
from stepwell.store.api import Read, ReadOutcome, WriteOutcome
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format import superblock
from stepwell.store.log.format.segment_list import NUMBERS_END, name_of, number_of
from stepwell.store.log.opening import open_directory
from stepwell.store.log.state.segments import Segment, Segments
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.testing.store_contract import fetch, key, offer, payload, space

HERE = space("here")
SIZE = 12_000
Prepare = Callable[[Path], object]


def filled(open_here: OpenLog, tmp_path: Path, count: int = 9) -> Path:
    """A closed store of several segments, one batch for each value."""
    store = open_here()
    for at in range(count):
        store.write_from(HERE, [offer(HERE, f"v{at}", SIZE)])
    store.close()
    return tmp_path / "store"


def crashed(store: LogStore) -> None:
    """Ends as a process that is killed does: the lock is free, nothing is saved."""
    store.leave_in_child()


def test_a_lost_segments_number_is_never_given_again(open_here: OpenLog, tmp_path: Path) -> None:
    directory = filled(open_here, tmp_path)
    last = sorted(directory.glob("*.seg"))[-1]
    last.unlink()
    store = open_here()
    names = [f"new{at}" for at in range(4)]
    assert set(store.write_from(HERE, [offer(HERE, name, SIZE) for name in names])) == {WriteOutcome.STORED}
    assert not last.exists()
    crashed(store)
    store = open_here()
    assert all(fetch(store, HERE, name, SIZE) for name in names)
    for at in range(9):  # what was lost is a miss, and nothing else comes back for it
        into = memoryview(bytearray(SIZE))
        (result,) = store.read_into(HERE, [Read(key=key(f"v{at}"), into=into)])
        assert result.outcome is ReadOutcome.MISSING or bytes(into) == payload(f"v{at}", SIZE)
    store.audit()


def link_to_victim(path: Path) -> None:
    victim = path.parent.parent / "victim"
    victim.write_bytes(b"precious" * 50_000)
    path.unlink(missing_ok=True)
    os.symlink(victim, path)


def settings(**changed: object) -> Prepare:
    def prepare(directory: Path) -> None:
        fields = {**json.loads((directory / "store.json").read_bytes()), **changed}
        del fields["check"]
        (directory / "store.json").write_text(json.dumps({**fields, "check": superblock._check(fields)}))

    return prepare


def directory_for(name: str) -> Prepare:
    def prepare(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).mkdir()

    return prepare


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        pytest.param(lambda d: os.mkfifo(d / name_of(99)), "not a plain file", id="pipe"),
        pytest.param(lambda d: link_to_victim(d / name_of(99)), "not a plain file", id="linked segment"),
        pytest.param(lambda d: link_to_victim(d / "lock"), "not a plain file", id="linked lock"),
        pytest.param(lambda d: link_to_victim(d / "store.json"), "not a plain file", id="linked settings"),
        pytest.param(directory_for(name_of(99)), "not a plain file", id="directory for a segment"),
        pytest.param(directory_for("store.json"), "not a plain file", id="directory for settings"),
        pytest.param(lambda d: (d / name_of(NUMBERS_END - 1)).touch(), "impossible number", id="number at the end"),
        pytest.param(lambda d: os.truncate(d / "store.json", 2**40), "damaged", id="settings of 1 TiB"),
        pytest.param(lambda d: os.truncate(d / "store.json", 0), "store.json .*damaged", id="emptied settings"),
        pytest.param(settings(segment_bytes=float("inf")), "damaged", id="endless segments"),
        pytest.param(settings(budget_bytes=10**30), "damaged", id="budget beyond all disks"),
        pytest.param(settings(quotas={"t": -5}), "damaged", id="negative quota"),
        pytest.param(lambda d: (d / "store.json").unlink(), "restore store.json", id="settings gone"),
    ],
)
def test_what_cannot_be_opened_says_so_and_is_not_touched(
    prepare: Prepare, message: str, open_here: OpenLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = filled(open_here, tmp_path, count=2)
    prepare(directory)
    with pytest.raises(StoreError, match=message):
        open_here(budget="", segment="")
    for order in ("stat", "check"):
        assert main(["store", order, str(directory)]) in (0, 2)  # an error on one line, or figures; never a traceback
    assert "Traceback" not in capsys.readouterr().err
    victim = tmp_path / "victim"
    assert not victim.exists() or victim.read_bytes() == b"precious" * 50_000


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda d: (d / f"{2**63:016x}.seg").touch(), id="number 2^63"),
        pytest.param(lambda d: (d / f"{2**64 - 1:016x}.seg").touch(), id="number 2^64-1"),
        pytest.param(lambda d: os.truncate(d / "snapshot", 2**40), id="snapshot of 1 TiB"),
        pytest.param(lambda d: (d / "snapshot").write_bytes(b""), id="empty snapshot"),
    ],
)
def test_what_is_not_ours_is_left_out(prepare: Prepare, open_here: OpenLog, tmp_path: Path) -> None:
    prepare(filled(open_here, tmp_path, count=2))
    store = open_here()
    assert fetch(store, HERE, "v0", SIZE) and fetch(store, HERE, "v1", SIZE)
    assert store.write_from(HERE, [offer(HERE, "more", SIZE)]) == [WriteOutcome.STORED]
    store.audit()


def test_names_above_the_last_number_are_no_segments() -> None:
    assert number_of(name_of(NUMBERS_END - 1)) == NUMBERS_END - 1
    assert [number_of(name_of(number)) for number in (0, NUMBERS_END, 2**63, 2**64 - 1)] == [None] * 4


@pytest.mark.parametrize("seq", [2**62, 2**63, 2**64 - 1])
def test_a_header_with_an_absurd_number_is_not_believed(seq: int, open_here: OpenLog, tmp_path: Path) -> None:
    directory = filled(open_here, tmp_path, count=2)
    (segment,) = directory.glob("*.seg")
    seed, content = json.loads((directory / "store.json").read_bytes())["seed"], bytearray(segment.read_bytes())
    header_bytes = struct.unpack_from("<I", content, 24)[0]
    struct.pack_into("<Q", content, 56, seq)
    struct.pack_into("<Q", content, 8, xxhash.xxh3_64_intdigest(memoryview(content)[16:header_bytes], seed))
    segment.write_bytes(content)
    (directory / "snapshot").unlink()
    store = open_here()
    assert store.contains(HERE, [key("v0"), key("v1")]) == [False, True]
    assert store.write_from(HERE, [offer(HERE, "more", SIZE)]) == [WriteOutcome.STORED]


class Sick(Disk):
    """Can allocate nothing and remove nothing while it is ill."""

    ill = False

    def allocate(self, fd: int, size: int) -> None:
        self._ail()
        super().allocate(fd, size)

    def unlink(self, path: Path) -> None:
        self._ail()
        super().unlink(path)

    def _ail(self) -> None:
        if self.ill:
            raise OSError(errno.EIO, "ill")


def test_a_creation_that_failed_half_way_is_got_over(tmp_path: Path) -> None:
    def open_() -> LogStore:
        return open_directory(
            tmp_path / "store", clock=ManualClock(), budget_bytes=2**20, segment_bytes=64 * 1024, direct=Direct.OFF, disk=disk
        )

    disk = Sick()
    store = open_()
    disk.ill = True
    outcomes = [store.write_from(HERE, [offer(HERE, f"ill{at}", 20_000)])[0] for at in range(6)]
    assert WriteOutcome.FAILED in outcomes
    disk.ill = False
    store.snapshot()  # names what was left: what comes after it must be found all the same
    well = [f"well{at}" for at in range(6)]
    assert [store.write_from(HERE, [offer(HERE, name, 20_000)])[0] for name in well] == [WriteOutcome.STORED] * 6
    store.audit()
    crashed(store)
    store = open_()
    assert all(fetch(store, HERE, name, 20_000) for name in well)
    store.close()


def test_check_tells_of_a_lost_segment_and_of_a_broken_snapshot(
    open_here: OpenLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = filled(open_here, tmp_path)
    assert main(["store", "check", str(directory)]) == 0
    whole = (directory / "snapshot").read_bytes()
    (directory / "snapshot").write_bytes(whole[:-1])
    assert main(["store", "check", str(directory)]) == 1
    assert "saved index cannot be used" in capsys.readouterr().out
    (directory / "snapshot").write_bytes(whole)
    sorted(directory.glob("*.seg"))[0].unlink()
    assert main(["store", "check", str(directory)]) == 1
    assert "the file is missing" in capsys.readouterr().out
    assert main(["store", "check", "--repair", str(directory)]) == 0
    assert main(["store", "check", str(directory)]) == 0


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def repair(directory: Path) -> None:
    assert main(["store", "check", str(directory)]) == 1
    assert main(["store", "check", "--repair", str(directory)]) == 0
    assert main(["store", "check", str(directory)]) == 0


def test_repair_keeps_values_that_are_whole_behind_a_damaged_header(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here(segment="256KiB", budget="4MiB")
    names = [f"{batch}/{at}" for batch in range(3) for at in range(8)]
    for batch in range(3):
        store.write_from(HERE, [offer(HERE, f"{batch}/{at}", 9000) for at in range(8)])
    store.close()
    directory = tmp_path / "store"
    flip(sorted(directory.glob("*.seg"))[0], 40)
    repair(directory)
    (directory / "snapshot").unlink()
    store = open_here(segment="", budget="")
    assert all(fetch(store, HERE, name, 9000) for name in names)
    store.audit()


def test_repair_does_not_forget_a_delete_whose_header_is_damaged(open_here: OpenLog, tmp_path: Path) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "x", 9000)])
    assert store._state.active is not None
    end = store._state.active.end
    store.delete(HERE, [key("x")])
    store.write_from(HERE, [offer(HERE, "y", 9000)])
    store.close()
    directory = tmp_path / "store"
    flip(sorted(directory.glob("*.seg"))[0], end + 40)
    repair(directory)
    (directory / "snapshot").unlink()
    assert open_here().contains(HERE, [key("x"), key("y")]) == [False, True]


def test_a_directory_without_a_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary").touch()
    with pytest.raises(ConfigError, match="not empty"):
        open_directory(tmp_path / "mine", clock=ManualClock(), budget_bytes=2**30)


class Synced(Disk):
    """Remembers which directories were made to last."""

    def __init__(self) -> None:
        self.synced: list[Path] = []

    def sync_directory(self, path: Path) -> None:
        self.synced.append(path)
        super().sync_directory(path)


def test_a_new_directory_lasts_with_all_those_above_it(tmp_path: Path) -> None:
    disk, directory = Synced(), tmp_path / "a" / "b" / "store"
    disk.make_directory(directory)
    assert set(disk.synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    disk.synced.clear()
    disk.make_directory(directory)
    assert not disk.synced


class BadBlocks(Disk):
    """Cannot read what is as long as the values of this test, while it is ill."""

    ill = False

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.ill and any(len(buffer) == SIZE for buffer in buffers):
            raise OSError(errno.EIO, "bad block")
        return super().read(fd, buffers, offset)


def test_a_value_that_could_not_be_carried_stays_deleted(tmp_path: Path) -> None:
    def open_() -> LogStore:
        return open_directory(
            tmp_path / "store", clock=ManualClock(), budget_bytes=2**20, segment_bytes=64 * 1024, direct=Direct.OFF, disk=disk
        )

    disk = BadBlocks()
    store = open_()
    store.write_from(HERE, [offer(HERE, "x", SIZE)])
    (row,) = store._state.index.rows_of(HERE.digest).values()
    segment, rows = store._state.segments.table[1], np.array([row])
    disk.ill = True
    store._alone(lambda: int(store._writer.reclaim.move(segment, rows)))
    assert store.contains(HERE, [key("x")]) == [False]
    disk.ill = False
    store.delete(HERE, [key("x")])
    crashed(store)
    store = open_()
    assert store.contains(HERE, [key("x")]) == [False]
    store.close()


def test_how_bytes_move_is_tried_once_there_is_room_for_it(tmp_path: Path) -> None:
    def open_(direct: Direct) -> LogStore:
        return open_directory(
            tmp_path / "store", clock=SystemClock(), budget_bytes=32 << 20, segment_bytes=4 << 20, direct=direct
        )

    store = open_(Direct.OFF)
    assert store.measured.write_bytes_per_s > 0
    store.write_from(HERE, [offer(HERE, f"v{at}", 500_000) for at in range(6)])
    store.close()
    store = open_(Direct.AUTO)
    assert store.measured.write_bytes_per_s == 0  # the active segment is too full to try
    store.write_from(HERE, [offer(HERE, f"w{at}", 500_000) for at in range(3)])
    assert store.measured.write_bytes_per_s > 0
    assert all(fetch(store, HERE, f"v{at}", 500_000) for at in range(6))
    store.close()


class OnlyCached(Disk):
    def open(self, path: Path, *, writable: bool = True, direct: bool = False) -> int:
        if direct:
            raise OSError(errno.EINVAL, "not here")
        return super().open(path, writable=writable)


def test_direct_on_is_never_silently_off(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no direct I/O"):
        open_directory(tmp_path / "store", clock=ManualClock(), budget_bytes=2**20, direct=Direct.ON, disk=OnlyCached())


def test_opening_many_segments_looks_at_each_once(open_here: OpenLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(open_here, tmp_path)
    asked: list[int] = []
    ask = Segments.oldest_elsewhere

    def counted(self: Segments, segment: Segment) -> int:
        asked.append(segment.id)
        return ask(self, segment)

    monkeypatch.setattr(Segments, "oldest_elsewhere", counted)
    open_here()
    assert not asked  # it compares one with all others: only for those that hold nothing
