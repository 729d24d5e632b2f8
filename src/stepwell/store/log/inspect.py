"""A directory looked at from outside: figures and checks without a store of one's own, and repair with one.

Looking takes no lock and changes nothing, so it works while another process has the directory open. Repairing
needs the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from stepwell.base.clock import SystemClock
from stepwell.base.errors import ConfigError, StoreError
from stepwell.store.log import superblock
from stepwell.store.log.check import CheckReport, check
from stepwell.store.log.disk import Disk
from stepwell.store.log.opening import LOCK_NAME, holder, open_directory, state_of
from stepwell.store.log.probe import Direct
from stepwell.store.log.recovery import recover
from stepwell.store.log.stat import LogStat, stat_of
from stepwell.store.log.state import LogState


def owner(directory: Path, disk: Disk) -> str | None:
    """Which process has a directory open, in words; None when none has."""
    return (holder(disk, directory) or "another process") if disk.is_locked(directory / LOCK_NAME) else None


def look(directory: Path, disk: Disk) -> LogState:
    """The log in a directory, as it is now. Raises ConfigError where there is none, StoreError where it cannot be read."""
    block = superblock.read(disk, directory) if directory.is_dir() else None
    if block is None:
        raise ConfigError(f"there is no log store in {directory}")
    try:
        return state_of(disk, directory, block, recover(disk, directory, block))
    except OSError as error:
        raise StoreError(f"the log store in {directory} cannot be read: {error}") from error


def stat_directory(directory: Path, disk: Disk) -> LogStat:
    return stat_of(look(directory, disk))


def check_directory(directory: Path, disk: Disk, on_progress: Callable[[int], None]) -> CheckReport:
    state = look(directory, disk)
    try:
        return check(state, on_progress)
    except OSError as error:
        raise StoreError(f"the log store in {directory} cannot be read: {error}") from error


def repair_directory(directory: Path, disk: Disk, on_progress: Callable[[int], None]) -> CheckReport:
    """Checks, and drops what is damaged for good, so that the rest serves. Returns what was found.

    Raises ConfigError where there is no store, StoreError when another process has it open.
    """
    look(directory, disk)  # before anything is made or locked
    with closing(open_directory(directory, clock=SystemClock(), direct=Direct.OFF, disk=disk)) as store:
        return store.repair(on_progress)
