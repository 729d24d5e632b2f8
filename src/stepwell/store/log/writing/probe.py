"""Which way of moving bytes is faster on this disk, through the page cache or past it: tried once after every opening.

A few MiB, about a tenth of a second at most. Writes into the unused end of the active segment, where nothing is
believed, and never grows a file; when that has no room for it, the next one is waited for. Until then, and where segments
are too small to tell, bytes go through the page cache, untimed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum

from stepwell.base.clock import Clock
from stepwell.base.errors import ConfigError
from stepwell.store.log.disk.aligned import Scratch
from stepwell.store.log.disk.files import BLOCK_BYTES, Disk
from stepwell.store.log.format import superblock
from stepwell.store.log.state.log_state import IoMode, LogState
from stepwell.store.log.state.segments import Segment, State

_MOST_BYTES, _LEAST_BYTES = 8 << 20, 1 << 20
_ROUNDS = 3  # the best counts
_AT_MOST_S = 0.1
_CLEARLY = 1.3  # times faster the page cache must be: past it, a fifth of the CPU and no memory is used


class Direct(Enum):
    """Whether bytes go past the page cache."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Probe:
    """Tries both ways, as far as the options allow, and has the log move bytes the better way. Only for the one writer."""

    def __init__(self, state: LogState, direct: Direct, clock: Clock) -> None:
        """Raises ConfigError when direct=on cannot be."""
        self._state, self._clock, self._always = state, clock, direct is Direct.ON
        self._size = min(_MOST_BYTES, state.budget.segment_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES)
        self._waiting = self._size >= _LEAST_BYTES
        if self._always:
            _must_have_direct(state)
        state.segments.direct = direct is not Direct.OFF
        state.io_mode = IoMode(direct_writes=self._always, direct_reads=self._always)
        self.run()

    def run(self) -> None:
        """Does it when it was not done yet and there is room."""
        state, active = self._state, self._state.active
        offset = state.budget.segment_bytes - self._size
        if not self._waiting or active is None or active.state is not State.ACTIVE or active.end > offset:
            return
        self._waiting = False
        try:
            with state.lock:
                state.segments.open(active)
            state.io_mode = _try(state.disk, active, offset, self._size, self._always, self._clock)
        except OSError:  # it stays as it is, untimed
            state.counters.add("failed_probes")


def _must_have_direct(state: LogState) -> None:
    try:
        state.disk.close(state.disk.open(state.directory / superblock.NAME, writable=False, direct=True))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ConfigError(f"the file system of {state.directory} has no direct I/O; use direct=auto or direct=off") from error


def _try(disk: Disk, segment: Segment, offset: int, size: int, always: bool, clock: Clock) -> IoMode:
    buffer = Scratch().take(size)
    buffer[:] = b"\xa5" * size  # not zeros: some disks store those for free
    by_cache, by_direct = segment.fd, segment.direct_fd

    def write(fd: int) -> None:
        disk.write(fd, [buffer], offset)
        disk.sync(segment.fd)

    def read(fd: int) -> None:
        disk.forget_cached(segment.fd, offset, size)
        disk.read(fd, [buffer], offset)

    best_s: dict[tuple[Callable[[int], None], int], float] = {}
    started_s = clock.now()
    for _ in range(_ROUNDS):
        for work in (write, read):
            for fd in (by_direct,) if always else (by_cache, by_direct):
                if fd >= 0:
                    begun_s = clock.now()
                    work(fd)
                    took_s = clock.now() - begun_s
                    best_s[work, fd] = min(took_s, best_s.get((work, fd), took_s))
        if clock.now() - started_s > _AT_MOST_S / _ROUNDS:
            break

    def choice(work: Callable[[int], None]) -> tuple[bool, int]:
        took = {fd == by_direct: took_s for (tried, fd), took_s in best_s.items() if tried is work}
        direct = True in took and (False not in took or took[True] <= _CLEARLY * took[False])
        return direct, int(size / took[direct]) if took[direct] > 0 else 0

    (direct_writes, write_rate), (direct_reads, read_rate) = choice(write), choice(read)
    return IoMode(
        direct_writes=direct_writes, direct_reads=direct_reads, write_bytes_per_s=write_rate, read_bytes_per_s=read_rate
    )  # fmt: skip
