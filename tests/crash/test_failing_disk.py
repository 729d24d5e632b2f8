"""Operations that fail without a crash: an outcome for the callers of that moment, and the store goes on."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from crash_disk import CrashDisk, Crashed, Loss
from life import BUDGET_BYTES, SPACES, Life, held, open_at
from test_power_loss import HERE, TURNS, check, operations

from stepwell.base.errors import StoreError
from stepwell.store.api import WriteOutcome
from stepwell.store.log.state.segments import NEW_NAME
from stepwell.testing.store_contract import fetch, key, offer


def test_any_operation_may_fail_and_a_crash_later_serves_nothing_torn(tmp_path: Path) -> None:
    for at in range(8, operations(2) + 1, 2):
        disk = CrashDisk(crash_at=at + 12, budget_bytes=BUDGET_BYTES)
        disk.fail_at = {at: errno.EIO if at % 4 else errno.ENOSPC}
        life = Life(disk, HERE, 2)
        try:
            life.live(TURNS)
        except Crashed:
            pass
        except StoreError:  # it could not be reopened: a clear answer, and nothing is lost by it
            disk.fail_at = {}
        directory = tmp_path / str(at)
        disk.left_behind(directory, list(Loss)[at % len(Loss)], Random(at))
        try:
            check(directory, life, life.must_survive())
        except AssertionError as error:
            raise AssertionError(f"{at=}: {error}") from error


@pytest.mark.parametrize(("number", "outcome"), [(errno.EIO, WriteOutcome.FAILED), (errno.ENOSPC, WriteOutcome.NO_ROOM)])
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_write_that_fails_is_an_outcome_and_the_next_one_is_kept(
    number: int, outcome: WriteOutcome, operation: str, tmp_path: Path
) -> None:
    disk = CrashDisk()
    store = open_at(HERE, disk)
    store.write_from(SPACES[0], [offer(SPACES[0], "before")])
    disk.fail_at = {disk.operations + (1 if operation == "write" else 2): number}
    two = [offer(SPACES[0], "a", 5000), offer(SPACES[0], "b", 5000)]
    assert store.write_from(SPACES[0], two) == [outcome] * 2
    assert store.contains(SPACES[0], [key("a"), key("b")]) == [False, False]
    assert store.write_from(SPACES[0], [offer(SPACES[0], "after")]) == [WriteOutcome.STORED]
    assert store.counters["no_room"] == (2 if outcome is WriteOutcome.NO_ROOM else 0)
    disk.left_behind(tmp_path / "left", Loss.ALL, Random(1))
    with closing(open_at(tmp_path / "left")) as again:
        assert fetch(again, SPACES[0], "before") and fetch(again, SPACES[0], "after")
        assert again.contains(SPACES[0], [key("a"), key("b")]) == [False, False], "what failed is not believed later"


def test_a_disk_that_always_fails_costs_no_value_that_is_there() -> None:
    disk = CrashDisk()
    store = open_at(HERE, disk)
    life = Life(disk, HERE, 5)
    life.store = store
    for _ in range(40):
        life.write()
    before = held(store, life.ledger)
    disk.fail_at = dict.fromkeys(range(disk.operations + 1, disk.operations + 10_000), errno.EIO)
    for turn in range(50):
        assert store.write_from(SPACES[0], [offer(SPACES[0], f"late {turn}", 5000)]) == [WriteOutcome.FAILED]
    lost = before - held(store, life.ledger)
    assert len(lost) <= len(before) // 2, f"{len(lost)} of {len(before)} values were given up for writes that all failed"
    disk.fail_at = {}
    assert store.write_from(SPACES[0], [offer(SPACES[0], "at last", 5000)]) == [WriteOutcome.STORED]
    store.audit()


def test_a_full_disk_goes_on_with_the_files_it_has() -> None:
    disk = CrashDisk()
    store = open_at(HERE, disk)
    life = Life(disk, HERE, 6)
    life.store = store
    while len(store._state.segments.table) < 4:
        life.write()
    full = disk.total_bytes(HERE)

    def no_room(path: Path) -> int:
        raise OSError(errno.ENOSPC, "the disk is full")

    disk.create = no_room  # type: ignore[method-assign]
    for _ in range(100):
        life.write()
    assert store.counters["no_room"] == 0 and disk.total_bytes(HERE) == full
    assert len(held(store, life.ledger)) > 20
    store.audit()


def test_a_disk_full_from_the_start_is_no_room_and_no_crash() -> None:
    disk = CrashDisk()
    create = disk.create

    def only_small_files(path: Path) -> int:
        if path.name == NEW_NAME:
            raise OSError(errno.ENOSPC, "the disk is full")
        return create(path)

    disk.create = only_small_files  # type: ignore[method-assign]
    store = open_at(HERE, disk)
    assert store.write_from(SPACES[0], [offer(SPACES[0], "x")]) == [WriteOutcome.NO_ROOM]
    with pytest.raises(StoreError, match="disk is full"):
        store.clear(SPACES[0].digest)
    disk.create = create  # type: ignore[method-assign]
    assert store.write_from(SPACES[0], [offer(SPACES[0], "x")]) == [WriteOutcome.STORED]
