"""Whether a store would work from here: the disk beneath a log, measured for a moment, and a Mooncake master that answers.

Leaves nothing behind: what is written has no name, and no store is opened.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import Clock
from stepwell.base.units import format_bytes
from stepwell.cli.doctor.finding import Finding, broken, fine, slow

PROBE_BYTES = 64 << 20
PROBE_S = 2.0  # for each way
SLOW_BYTES_PER_S = 200 << 20
LEAST_DISK_BYTES = 1 << 30
_BLOCK = 4 << 20
_STAT_BLOCK = 512  # of st_blocks, whatever the file system's own are
_ON_DISK = ("log", "shared-log")


def store(where: str, environment: Mapping[str, str], clock: Clock) -> Iterator[Finding]:
    """Findings about the store that `where` names, as in `log:DIR`. Raises ConfigError for one that is not known."""
    from stepwell.store.registry import find_opener

    find_opener(where)
    name, _, location = where.partition(":")
    if name in _ON_DISK:
        if not location:
            raise ConfigError(f"--store {name}: needs a directory, as in {name}:/var/cache/stepwell")
        yield disk(Path(location), clock)
    elif name == "mooncake":
        yield mooncake(location, environment)
    else:
        yield fine("store", f"{name} has nothing to check")


def disk(directory: Path, clock: Clock) -> Finding:
    """A short probe where the store is, or would be made. A log that is there already has room of its own, on a full disk too."""
    at = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    free, ours = shutil.disk_usage(at).free, _log_bytes(directory)
    room = f"{format_bytes(free)} free" + (f" beside a log of {format_bytes(ours)}" if ours else "")
    if free + ours < LEAST_DISK_BYTES:
        return broken("disk", f"{at}: {room}", "make room, or choose another directory")
    probe_bytes = min(PROBE_BYTES, free // 2 // _BLOCK * _BLOCK)
    try:
        write, read = _speeds(at, probe_bytes, clock)
    except OSError as error:
        return broken(
            "disk", f"{at} cannot be written: {error.strerror}", "let this user write there, or choose another directory"
        )
    if not probe_bytes:
        return slow("disk", f"{at}: {room}, too little to measure its speed", "make room, or give the log a smaller budget")
    found = f"{at} writes {format_bytes(write)}/s, reads {format_bytes(read)}/s, {room}"
    if min(write, read) < SLOW_BYTES_PER_S:
        return slow("disk", found, "use a local NVMe disk: from a slow one, prompts are sooner computed than read")
    return fine("disk", found)


def _log_bytes(directory: Path) -> int:
    """What the segments of a log there take up on the disk, which it writes over; 0 where there is none, or it cannot be read."""
    from stepwell.store.log.format.segment_list import number_of

    try:
        with os.scandir(directory) as entries:
            found = [each for each in entries if number_of(each.name) is not None and each.is_file(follow_symlinks=False)]
            return sum(each.stat(follow_symlinks=False).st_blocks * _STAT_BLOCK for each in found)
    except OSError:
        return 0


def _speeds(directory: Path, most_bytes: int, clock: Clock) -> tuple[int, int]:
    """Bytes a second, written to the disk and read from it again. Raises OSError."""
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began, written = clock.now(), 0
        while written < most_bytes and clock.now() - began < PROBE_S:
            written += file.write(block)
            os.fdatasync(file.fileno())
        write_s = clock.now() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, not memory
        file.seek(0)
        began, read = clock.now(), 0
        while clock.now() - began < PROBE_S and (piece := file.read(_BLOCK)):
            read += len(piece)
        read_s = clock.now() - began
    return int(written / max(write_s, 1e-9)), int(read / max(read_s, 1e-9))


def mooncake(location: str, environment: Mapping[str, str]) -> Finding:
    """Whether the wheel loads and somebody listens where the master should be."""
    from stepwell.cli.mooncake_config import mooncake_options
    from stepwell.store.mooncake.client import knock, load_wheel
    from stepwell.store.mooncake.opening import CONFIG_PATH, config_of
    from stepwell.store.registry import Opening

    options = mooncake_options(environment)
    if location:
        options.pop(CONFIG_PATH, None)
    try:
        config = config_of(Opening(location=location, options=options))
        load_wheel()
        knock(config)
    except ConfigError as error:
        return broken("mooncake", "cannot be used", str(error))
    except StoreError as error:
        return broken("mooncake", "no master", str(error))
    master = config.master_server_address
    return fine(
        "mooncake", f"masters are found by {master}, not asked here" if "://" in master else f"a master listens at {master}"
    )
