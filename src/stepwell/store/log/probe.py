"""Which way of moving bytes is faster on this disk, through the page cache or past it: tried once at every opening.

A few MiB, about a tenth of a second at most. Writes into the unused end of the active segment, where nothing is
believed, and never grows a file. A disk that cannot be tried goes through the page cache, untimed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from stepwell.base.clock import Clock
from stepwell.base.errors import ConfigError
from stepwell.store.log.aligned import Scratch
from stepwell.store.log.disk import BLOCK_BYTES, Disk
from stepwell.store.log.segments import Segment
from stepwell.store.log.state import LogState, Ways

_MOST_BYTES, _LEAST_BYTES = 8 << 20, 1 << 20
_ROUNDS = 3  # the best counts
_AT_MOST_S = 0.1
_CLEARLY = 1.3  # times faster the page cache must be: past it, a fifth of the CPU and no memory is used


class Direct(Enum):
    """Whether bytes go past the page cache."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def probe(state: LogState, direct: Direct, clock: Clock) -> Ways:
    """Tries both ways, as far as the options allow. Raises ConfigError when direct=on cannot be."""
    segments, active = state.segments, state.active
    segments.direct = direct is not Direct.OFF
    if active is None:
        return Ways()
    segments.open(active)
    if direct is Direct.ON and active.direct_fd < 0:
        raise ConfigError(f"the file system of {state.directory} has no direct I/O; use direct=auto or direct=off")
    room = (state.budget.segment_bytes - active.end) // BLOCK_BYTES * BLOCK_BYTES
    size = min(_MOST_BYTES, room)
    always = direct is Direct.ON
    if size < _LEAST_BYTES:
        return Ways(direct_writes=always, direct_reads=always)
    try:
        return _try(state.disk, active, state.budget.segment_bytes - size, size, always, clock)
    except OSError:
        return Ways(direct_writes=always, direct_reads=always)


def _try(disk: Disk, segment: Segment, offset: int, size: int, always: bool, clock: Clock) -> Ways:
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
    return Ways(
        direct_writes=direct_writes, direct_reads=direct_reads, write_bytes_per_s=write_rate, read_bytes_per_s=read_rate
    )  # fmt: skip
