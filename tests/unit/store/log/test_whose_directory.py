"""Whose directory it is: one opener at a time, whatever others remove; nothing is acknowledged in a directory that is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from log_fixtures import OpenLog

from stepwell.base.errors import StoreError
from stepwell.base.ids import Level
from stepwell.base.meters import ManualClock
from stepwell.store.api import Read, WriteOutcome
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format import superblock
from stepwell.store.log.inspect import owner
from stepwell.store.log.opening import open_directory
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct
from stepwell.testing.store_contract import fetch, key, offer, space

HERE = space("here")


def open_at(directory: Path, disk: Disk | None = None) -> LogStore:
    return open_directory(
        directory, clock=ManualClock(), budget_bytes=2**20, segment_bytes=64 * 1024, direct=Direct.OFF, disk=disk
    )


# ---- an opening that fails ------------------------------------------------------------------------


def full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, "the disk is full")


def broken(*_: object, **__: object) -> int:
    raise MemoryError


@pytest.mark.parametrize(
    ("name", "fails"),
    [("pwrite", full), ("pwrite", broken), ("ftruncate", broken), ("pwritev", full), ("fdatasync", broken), ("rename", full)],
)
def test_an_opening_that_fails_gives_the_lock_back(
    name: str, fails: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        try:
            open_at(tmp_path / "store").close()
        except (StoreError, MemoryError):
            pass
        else:
            assert (name, fails) == ("pwrite", full), "only the note of its owner failed, which keeps no process out"
    assert len(os.listdir("/proc/self/fd")) == before
    with closing(open_at(tmp_path / "store")) as store:
        assert store.write_from(HERE, [offer(HERE, "x")]) == [WriteOutcome.STORED]


# ---- two openers ----------------------------------------------------------------------------------


def remove_lock(directory: Path) -> None:
    (directory / "lock").unlink()


def replace_lock(directory: Path) -> None:
    remove_lock(directory)
    (directory / "lock").write_text("1\n")


@pytest.mark.parametrize("harm", [remove_lock, replace_lock])
def test_without_its_lock_file_a_directory_still_has_one_opener(
    harm: Callable[[Path], None], open_here: OpenLog, tmp_path: Path
) -> None:
    store = open_here()
    harm(tmp_path / "store")
    with pytest.raises(StoreError, match="close it there, or use another directory here"):
        open_at(tmp_path / "store")
    assert owner(tmp_path / "store", Disk()) is not None
    assert store.write_from(HERE, [offer(HERE, "x")]) == [WriteOutcome.STORED]
    store.close()
    assert owner(tmp_path / "store", Disk()) is None
    with closing(open_at(tmp_path / "store")) as again:
        assert fetch(again, HERE, "x")


def test_where_directories_cannot_be_locked_a_replaced_lock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def as_nfs_does(fd: int, how: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EBADF, "not open for writing")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    with closing(open_at(tmp_path / "store")) as first:
        assert first.write_from(HERE, [offer(HERE, "first")]) == [WriteOutcome.STORED]
        with pytest.raises(StoreError, match="is open in process"):
            open_at(tmp_path / "store")
        remove_lock(tmp_path / "store")
        with closing(open_at(tmp_path / "store")) as second:
            assert second.write_from(HERE, [offer(HERE, "second")]) == [WriteOutcome.STORED]
            with pytest.raises(StoreError, match="removed or replaced"):
                first.write_from(HERE, [offer(HERE, "lost")])
    with closing(open_at(tmp_path / "store")) as store:
        assert store.contains(HERE, [key("first"), key("second"), key("lost")]) == [True, True, False]


# ---- a directory that is gone ---------------------------------------------------------------------


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def move_away(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def replace_by_another(directory: Path) -> None:
    move_away(directory)
    open_at(directory).close()


@pytest.mark.parametrize("harm", [remove, move_away, replace_by_another])
def test_nothing_is_acknowledged_once_the_directory_is_gone(
    harm: Callable[[Path], None], open_here: OpenLog, tmp_path: Path
) -> None:
    store, directory = open_here(), tmp_path / "store"
    store.write_from(HERE, [offer(HERE, "before")])
    harm(directory)
    verbs: list[Callable[[], object]] = [
        lambda: store.write_from(HERE, [offer(HERE, "after")]),
        lambda: store.delete(HERE, [key("before")]),
        lambda: store.clear(HERE.digest),
        store.snapshot,
    ]
    for verb in verbs:
        with pytest.raises(StoreError, match="removed or replaced"):
            verb()
    assert store.contains(HERE, [key("after")]) == [False]
    there = sorted(directory.iterdir()) if directory.exists() else []
    store.close()
    assert there == (sorted(directory.iterdir()) if directory.exists() else []), "another's directory is left alone"


class Removed(Disk):
    """Has something removed while a value is on its way to the disk."""

    harm: Callable[[], None] | None = None

    def sync(self, fd: int) -> None:
        super().sync(fd)
        harm, self.harm = self.harm, None
        if harm is not None:
            harm()


def test_a_directory_removed_while_a_value_is_written_is_noticed_before_it_is_acknowledged(tmp_path: Path) -> None:
    disk = Removed()
    store = open_at(tmp_path / "store", disk)
    disk.harm = lambda: remove(tmp_path / "store")
    with pytest.raises(StoreError, match="removed or replaced"):
        store.write_from(HERE, [offer(HERE, "x")])
    store.close()


def test_a_segment_removed_while_it_is_written_costs_that_write_and_the_store_goes_on(tmp_path: Path) -> None:
    disk = Removed()
    with closing(open_at(tmp_path / "store", disk)) as store:
        disk.harm = lambda: next((tmp_path / "store").glob("*.seg")).unlink()
        with pytest.raises(StoreError, match="was removed from"):
            store.write_from(HERE, [offer(HERE, "x", 9000)])
        assert store.contains(HERE, [key("x")]) == [False]
        assert store.write_from(HERE, [offer(HERE, "y", 9000)]) == [WriteOutcome.STORED]
    with closing(open_at(tmp_path / "store")) as store:
        assert fetch(store, HERE, "y", 9000)


def test_segments_removed_under_an_open_store_do_not_keep_it_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "most_open", lambda _: 2)  # so that the files are not kept open
    with closing(open_at(tmp_path / "store")) as store:
        for at in range(20):
            assert store.write_from(HERE, [offer(HERE, f"v{at}", 20_000)]) == [WriteOutcome.STORED]
        for path in sorted((tmp_path / "store").glob("*.seg"))[:-1]:
            path.unlink()
        outcomes = [store.write_from(HERE, [offer(HERE, f"w{at}", 20_000)])[0] for at in range(60)]
        assert outcomes[-20:] == [WriteOutcome.STORED] * 20, f"{outcomes.count(WriteOutcome.FAILED)} writes failed"
        assert fetch(store, HERE, "w59", 20_000)
        store.audit()


def test_a_store_opened_by_a_relative_path_outlives_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(open_at(Path("store"))) as store:
        monkeypatch.chdir("/")
        for at in range(30):
            assert store.write_from(HERE, [offer(HERE, f"v{at}", 9000)]) == [WriteOutcome.STORED]
    assert (tmp_path / "store" / superblock.NAME).exists()


# ---- a directory that is gone ---------------------------------------------------------------------

VERBS: dict[str, Callable[[LogStore], object]] = {
    "contains": lambda store: store.contains(HERE, [key("x")]),
    "read": lambda store: store.read_into(HERE, [Read(key("x"), memoryview(bytearray(1000)))]),
    "write": lambda store: store.write_from(HERE, [offer(HERE, "y")]),
    "delete": lambda store: store.delete(HERE, [key("x")]),
    "relevel": lambda store: store.relevel(HERE, [key("x")], Level.EXPENDABLE),
    "clear": lambda store: store.clear(HERE.digest),
    "size": lambda store: store.size(),
    "largest spaces": lambda store: store.largest_spaces(1),
    "snapshot": lambda store: store.snapshot(),
    "stat": lambda store: store.stat(),
    "repair": lambda store: store.repair(lambda _: None),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_a_log_whose_directory_is_gone_answers_or_raises_a_store_error(verb: str, tmp_path: Path) -> None:
    store = open_at(tmp_path / "store")
    assert store.write_from(HERE, [offer(HERE, "x")]) == [WriteOutcome.STORED]
    shutil.rmtree(tmp_path / "store")
    if verb in ("write", "delete", "clear", "snapshot", "stat", "repair"):
        with pytest.raises(StoreError, match=str(tmp_path / "store")):
            VERBS[verb](store)
    else:
        VERBS[verb](store)
    store.close()
