"""`log:DIR`: from options to an open store. Reads no environment.

budget=100GiB      everything in the directory together; required the first time, remembered, can be changed
segment=256MiB     size of one file; fixed once the directory is created
direct=auto        on, off, or whichever is faster here
quota.NAME=10GiB   limit on one tenant's values, each with its entry; `none` removes it

Quotas are remembered until an opening sets some: those then replace all earlier ones.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes, parse_bytes
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.disk.locking import LOCK_NAME, DirectoryLock, leave_in_forks
from stepwell.store.log.format import segment_list, snapshot, superblock
from stepwell.store.log.format.segment_list import NUMBERS_END, SegmentList, number_of
from stepwell.store.log.format.superblock import Superblock
from stepwell.store.log.recovery.recover import Recovered, recover
from stepwell.store.log.state.log_state import LogState
from stepwell.store.log.state.segments import NEW_NAME, Segments, State, choose_budget
from stepwell.store.log.store import LogStore
from stepwell.store.log.writing.upkeep import Direct, save_snapshot
from stepwell.store.registry import Opening

log = logging.getLogger(__name__)
_QUOTA = "quota."


class InUse(StoreError):
    """Another process has the directory open."""

    def __init__(self, directory: Path, who: str) -> None:
        super().__init__(
            f"{directory} is open in {who}; close it there, or use another directory here; several processes "
            f"of one machine can use one log at once where all of them open it as shared-log:{directory}"
        )
        self.who = who


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The requested options of a log; None where the caller set none."""

    directory: Path
    budget_bytes: int | None = None
    segment_bytes: int | None = None
    direct: Direct = Direct.AUTO
    quotas: Mapping[str, int | None] = field(default_factory=dict)


def open_log(opening: Opening) -> LogStore:
    """Raises ConfigError for options that cannot work, StoreError for a directory that cannot be opened."""
    return open_with(read_options(opening, "log"), clock=opening.clock)


def read_options(opening: Opening, name: str, *others: str) -> LogOptions:
    """The options of a log, for a store of this name, which may accept other options too. Raises ConfigError."""
    quota_names = [option for option in opening.options if option.startswith(_QUOTA)]
    budget, segment, direct, *quotas = opening.take("budget", "segment", "direct", *quota_names, *others)[: 3 + len(quota_names)]
    if not opening.location:
        raise ConfigError(f"a log store needs a directory: {name}:DIR")
    amounts = {option.removeprefix(_QUOTA): amount for option, amount in zip(quota_names, quotas, strict=True)}
    return LogOptions(
        directory=Path(opening.location).absolute(),  # stays valid if the working directory changes
        budget_bytes=parse_bytes(budget) if budget is not None else None,
        segment_bytes=parse_bytes(segment) if segment is not None else None,
        direct=_direct(direct or Direct.AUTO.value),
        quotas={name: None if size == "none" else parse_bytes(size) for name, size in amounts.items() if size is not None},
    )


def open_with(options: LogOptions, *, clock: Clock, before_recovery: Callable[[], None] | None = None) -> LogStore:
    """Raises like `open_log`. `before_recovery` runs with the directory locked, and may raise StoreError."""
    return open_directory(
        options.directory, budget_bytes=options.budget_bytes, segment_bytes=options.segment_bytes, direct=options.direct,
        quotas=dict(options.quotas), clock=clock, before_recovery=before_recovery,
    )  # fmt: skip


def open_directory(
    directory: Path,
    *,
    clock: Clock,
    budget_bytes: int | None = None,
    segment_bytes: int | None = None,
    direct: Direct = Direct.AUTO,
    quotas: dict[str, int | None] | None = None,
    disk: Disk | None = None,
    before_recovery: Callable[[], None] | None = None,
) -> LogStore:
    """Opens a directory for this process, and creates it if there is none. Raises like `open_log`."""
    disk, directory = disk or Disk(), directory.absolute()  # stays valid if the working directory changes
    try:
        lock = take_lock(disk, directory)
        try:
            block = _settle(disk, directory, budget_bytes, segment_bytes, quotas or {})
            if before_recovery is not None:
                before_recovery()
            found = recover(disk, directory, block)
            must_be_plausible(directory, found)
            state = state_of(disk, directory, block, found)
            state.directory_lock = lock
            try:
                _tidy(state, found.doubtful)
                store = LogStore(state, direct=direct, clock=clock)
                if found.last_number > max((segment.id for segment in found.segments), default=0):
                    save_snapshot(state)  # the last segment was lost: drop its values before new ones are recorded
                leave_in_forks(store)
                return store
            except BaseException:
                state.segments.close_all()
                raise
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise StoreError(f"the log store in {directory} cannot be opened: {_why(error, directory)}") from error


def _why(error: OSError, directory: Path) -> str:
    """What to do if the directory is the cause; else the system's message."""
    if isinstance(error, FileExistsError | NotADirectoryError) and not directory.is_dir():
        return "there is a file of that name; name a directory"
    if isinstance(error, PermissionError):
        return "permission denied; name a directory that this user can write to"
    if not directory.exists():
        return f"the directory cannot be created ({error.strerror}); name one that this user can create and write to"
    return str(error)


def without_superblock(directory: Path) -> str:
    return (
        f"{directory} holds segments of a log store, but its {superblock.NAME} is missing, and nothing can be read without the "
        f"secret in that file; restore {superblock.NAME}, or move the directory away and start with a new one"
    )


def take_lock(disk: Disk, directory: Path) -> DirectoryLock:
    """Raises InUse if another process has the directory open."""
    disk.make_directory(directory)
    lock = disk.lock(directory)
    if lock is None:
        raise InUse(directory, holder(disk, directory) or "another process")
    return lock


def holder(disk: Disk, directory: Path) -> str | None:
    """The process that last opened a directory, in words."""
    content = (disk.read_file(directory / LOCK_NAME) or b"").strip()
    return f"process {int(content)}" if content.isdigit() else None


def _direct(text: str) -> Direct:
    try:
        return Direct(text)
    except ValueError:
        raise ConfigError(f"direct is one of {', '.join(way.value for way in Direct)}; got {text!r}") from None


def _settle(
    disk: Disk, directory: Path, budget_bytes: int | None, segment_bytes: int | None, quotas: dict[str, int | None]
) -> Superblock:
    """The superblock to open the directory with: its remembered settings, overridden by the requested ones. Remembers them."""
    known = superblock.read(disk, directory)
    if known is None:
        strangers = set(disk.names(directory)) - {LOCK_NAME, superblock.NAME + ".new"}
        if any(map(number_of, strangers)):
            raise StoreError(without_superblock(directory))
        if strangers:
            raise ConfigError(
                f"{directory} is not empty ({', '.join(sorted(strangers)[:3])}); give a new store an empty directory"
            )
        if budget_bytes is None:
            raise ConfigError(f"{directory} is new: say how large it may become, for example `budget=100GiB`")
    elif segment_bytes not in (None, known.segment_bytes):
        raise ConfigError(f"{directory} has segments of {known.segment_bytes} bytes, which cannot become {segment_bytes}")
    else:
        budget_bytes = known.budget_bytes if budget_bytes is None else budget_bytes
        segment_bytes = known.segment_bytes
    budget = choose_budget(budget_bytes, segment_bytes)
    remembered = known.quotas if known else {}
    block = Superblock(
        budget_bytes=budget.total_bytes,
        segment_bytes=budget.segment_bytes,
        seed=known.seed if known else secrets.randbits(64),
        quotas={tenant: size for tenant, size in (quotas or remembered).items() if size is not None},
    )
    choose_budget(block.budget_bytes, block.segment_bytes, superblock_bytes=superblock.size_of(block))
    if quotas:
        _warn_if_overbooked(directory, block)
    if block != known:
        superblock.write(disk, directory, block)
    return block


def _warn_if_overbooked(directory: Path, block: Superblock) -> None:
    promised = sum(block.quotas.values())
    if promised > block.budget_bytes:
        log.warning(
            "the quotas of %d tenants add up to %s, more than the %s of %s: tenants may lose values before they reach theirs",
            len(block.quotas), format_bytes(promised), format_bytes(block.budget_bytes), directory,
        )  # fmt: skip


def must_be_plausible(directory: Path, found: Recovered) -> None:
    """Raises StoreError for numbers that a log never reaches by itself: they would leave none for the next batches."""
    if found.strays:
        names = ", ".join(found.strays[:3])
        raise StoreError(f"{directory} holds {names}, with an impossible number: not a segment of this log store; move it away")
    if max(found.last_number, found.next_seq) >= NUMBERS_END // 2:
        raise StoreError(
            f"{directory} has a segment or a batch with an impossible number ({found.last_number}, {found.next_seq}); "
            "move such a file away, or start with another directory"
        )


def state_of(disk: Disk, directory: Path, block: Superblock, found: Recovered) -> LogState:
    """The state of a log that continues where it ended. Touches no file."""
    segments = Segments(disk, directory, block.segment_bytes, found.segments, last_number=found.last_number)
    budget = choose_budget(block.budget_bytes, block.segment_bytes, superblock_bytes=superblock.size_of(block))
    state = LogState(
        disk=disk, directory=directory, budget=budget, seed=block.seed, quotas=block.quotas, index=found.index,
        revoked=found.revoked, segment_list=found.segment_list or SegmentList(), segments=segments, next_seq=found.next_seq,
        settled=found.believed,
    )  # fmt: skip
    state.counters.add("recovered_values", found.index.num_values)
    state.counters.add("recovered_batches", found.batches_read)
    state.counters.add("damaged_gaps", len(found.damage))
    return state


def _tidy(state: LogState, doubtful: set[int]) -> None:
    """Removes what a crash left unfinished, makes the rest durable, and selects the segment to continue with."""
    for name in state.disk.names(state.directory):
        if name in (NEW_NAME, *(f"{one}.new" for one in (snapshot.NAME, segment_list.NAME, superblock.NAME))):
            state.disk.unlink(state.directory / name)
    segments = state.segments
    for number in doubtful:  # what was read there may be in memory only
        segment = segments.table[number]
        segments.open(segment)
        state.disk.sync(segment.fd)
    sound = [segment for segment in segments.table.values() if segments.sound(segment)]
    for segment in segments.table.values():
        if segment not in sound:  # truncated: the missing part is lost, and its space must be allocated again
            segments.restore_length(segment)
    if sound and sound[-1].id == segments.last_number:  # the snapshot covers everything before it
        state.active = sound[-1]
        state.active.state = State.ACTIVE
