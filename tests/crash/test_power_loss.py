"""The power goes at every single operation of a busy life; what was promised is still there, and nothing else is."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from crash_disk import CrashDisk, Crashed, Loss
from life import BUDGET_BYTES, SPACES, Life, bytes_on_disk, held, open_at

from stepwell.store.api import WriteOutcome
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format import superblock
from stepwell.store.log.inspect import check_directory
from stepwell.testing.store_contract import fetch, offer

TURNS = 50
SEEDS = range(8 if "STEPWELL_EXAMPLES" in os.environ else 2)
HERE = Path("/in/memory")


def crash(seed: int, crash_at: int) -> tuple[CrashDisk, Life]:
    disk = CrashDisk(crash_at=crash_at, budget_bytes=BUDGET_BYTES)
    life = Life(disk, HERE, seed)
    with pytest.raises(Crashed):
        life.live(TURNS)
    return disk, life


def check(directory: Path, life: Life, must: set[tuple[int, str]]) -> None:
    """Looks at what was left behind from outside, opens it: only to look, then to write, then without the snapshot."""
    if superblock.NAME in os.listdir(directory):
        found = check_directory(directory, Disk(), lambda _: None).damage
        assert not found, f"what a crash left is taken for damage: {found}"
    open_at(directory).close()
    with closing(open_at(directory)) as store:
        store.audit()
        there = held(store, life.ledger)
        assert must <= there, f"acknowledged, and lost: {sorted(must - there)}"
        assert not there & life.ledger.gone, f"deleted, and back: {sorted(there & life.ledger.gone)}"
        columns = store._state.index.columns
        assert set(columns.level[columns.held()].tolist()) <= {life.level}, "values came back with another level"
        assert store.write_from(SPACES[0], [offer(SPACES[0], "after", 5000)]) == [WriteOutcome.STORED]
        assert bytes_on_disk(directory) <= BUDGET_BYTES
        there = held(store, life.ledger)
    (directory / "snapshot").unlink()
    with closing(open_at(directory)) as store:
        store.audit()
        again = held(store, life.ledger)
        assert there <= again and fetch(store, SPACES[0], "after", 5000), f"lost without the snapshot: {sorted(there - again)}"
        assert not again & life.ledger.gone, f"back without the snapshot: {sorted(again & life.ledger.gone)}"
        assert store.counters["damaged_gaps"] == 0, "what a crash tore is not damage"
    assert bytes_on_disk(directory) <= BUDGET_BYTES


def operations(seed: int) -> int:
    disk = CrashDisk(budget_bytes=BUDGET_BYTES)
    Life(disk, HERE, seed).live(TURNS)
    return disk.operations


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_at_any_operation_loses_nothing_promised_and_serves_nothing_torn(seed: int, tmp_path: Path) -> None:
    for crash_at in range(1, operations(seed) + 1):
        loss = list(Loss)[(crash_at + seed) % len(Loss)]
        disk, life = crash(seed, crash_at)
        directory = tmp_path / str(crash_at)
        disk.left_behind(directory, loss, Random(crash_at))
        try:
            check(directory, life, life.must_survive())
        except AssertionError as error:
            raise AssertionError(f"{seed=} {crash_at=} {loss=}: {error}") from error


def test_what_a_killed_process_left_in_memory_is_safe_once_it_is_served_again(tmp_path: Path) -> None:
    for crash_at in range(1, operations(3) + 1, 5):
        disk, life = crash(3, crash_at)
        disk.crash_at = None  # only the process died: the machine still has everything that was written
        store = open_at(HERE, disk)
        there = held(store, life.ledger)
        directory = tmp_path / str(crash_at)
        disk.left_behind(directory, Loss.ALL, Random(crash_at))  # and now the power goes as well
        with closing(open_at(directory)) as again:
            lost = there - held(again, life.ledger)
            assert not lost, f"{crash_at=}: served, and lost: {sorted(lost)}"
