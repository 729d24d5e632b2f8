"""A directory examined from outside: figures and checks without opening the store, and repair, which opens it.

The examination takes no lock and changes nothing, so it works while another process has the directory open. A repair
needs the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import SystemClock
from stepwell.base.store_key import StoreKey
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format import superblock
from stepwell.store.log.format.segment_list import number_of
from stepwell.store.log.opening import holder, must_be_plausible, open_directory, state_of, without_superblock
from stepwell.store.log.recovery.check import CheckReport, check, lost_files
from stepwell.store.log.recovery.recover import Recovered, recover
from stepwell.store.log.recovery.stat import LogStat, stat_of
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.writing.upkeep import Direct


def owner(directory: Path, disk: Disk) -> str | None:
    """The process that has a directory open, in words; None if there is none."""
    try:
        return (holder(disk, directory) or "another process") if disk.is_locked(directory) else None
    except OSError as error:
        raise _unreadable(directory, error) from error


def look(directory: Path, disk: Disk) -> LogState:
    """The current state of the log in a directory. Raises ConfigError if there is none, StoreError if it cannot be read."""
    return _look(directory, disk)[0]


def _look(directory: Path, disk: Disk) -> tuple[LogState, Recovered]:
    try:
        block = superblock.read(disk, directory) if directory.is_dir() else None
        if block is None:
            lost = directory.is_dir() and any(map(number_of, disk.names(directory)))
            raise ConfigError(without_superblock(directory) if lost else f"there is no log store in {directory}")
        found = recover(disk, directory, block)
        must_be_plausible(directory, found)
        return state_of(disk, directory, block, found), found
    except OSError as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: OSError) -> StoreError:
    return StoreError(f"the log store in {directory} cannot be read: {error}")


def stat_directory(directory: Path, disk: Disk) -> LogStat:
    """Raises like `look`."""
    state = look(directory, disk)
    try:
        return stat_of(state)
    except OSError as error:
        raise _unreadable(directory, error) from error


def check_directory(directory: Path, disk: Disk, on_progress: Callable[[int], None], key: StoreKey | None = None) -> CheckReport:
    """Without the key of the stamps, this does not check who wrote the values. Raises like `look`."""
    state, found = _look(directory, disk)
    try:
        report = check(state, on_progress, key=key)
    except OSError as error:
        raise _unreadable(directory, error) from error
    lost = lost_files(found)
    if lost and owner(directory, disk) is not None:  # it may have renamed files meanwhile
        lost = [one for one in lost_files(_look(directory, disk)[1]) if one in lost]
    return replace(report, damage=(*lost, *report.damage))


def repair_directory(directory: Path, disk: Disk, on_progress: Callable[[int], None], key: StoreKey | None = None) -> CheckReport:
    """Checks the log and drops what is damaged for good, so that the rest can be used. Returns the damage found and what remains.

    Raises ConfigError if there is no store, StoreError if another process has it open or the disk fails.
    """
    _, found = _look(directory, disk)  # before anything is created or locked
    try:
        with closing(open_directory(directory, clock=SystemClock(), direct=Direct.OFF, disk=disk)) as store:
            report = store.repair(on_progress, key)
    except OSError as error:
        raise StoreError(f"the log store in {directory} could not be repaired: {error}") from error
    left = (*lost_files(_look(directory, disk)[1]), *report.left)
    return replace(report, damage=(*lost_files(found), *report.damage), left=left)
