"""The memory of a tier, and copies between tiers. Decides nothing, and does not know which pages are in use.

A tier is one block of memory on each rank, seen as an ordinary table of pages for each kind. Host memory is mapped once,
page-aligned and touched at the start, so that no later write faults. Memory that cannot be allocated is a ConfigError that says
how much is free.

`CopyEngine` is the interface. A rank has one; all ranks run the same plans over the same page ids.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import Plan
from stepwell.base.units import format_bytes
from stepwell.memory.layout import ArenaLayout, payload_bytes

SETTINGS = "device_bytes or host_bytes"  # of a CacheConfig

Work: TypeAlias = Callable[[], None]
Bytes = npt.NDArray[np.uint8]


class PageMemory:
    """A block of host memory divided as its arena's layout says: its own, or a given one that other processes may have mapped."""

    def __init__(self, spec: ModelSpec, layout: ArenaLayout, block: memoryview | None = None) -> None:
        self._block = mapped(layout.size_bytes) if block is None else block[: layout.size_bytes]
        flat = np.frombuffer(self._block, np.uint8)
        self.spec = spec
        self._rows = {
            kind: flat[: layout.rows(kind) * stride].reshape(-1, stride)[:, : payload_bytes(spec, layout.tier, kind)]
            for kind, stride in layout.strides.items()
        }

    def rows(self, kind: Kind) -> Bytes:
        """All pages of a kind, `[page id][byte]`; writing through it writes the memory."""
        return self._rows[kind]

    @property
    def block(self) -> memoryview:
        """All of it, for stores that require registered memory."""
        return memoryview(self._block)

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy."""
        return memoryview(self._rows[kind][page])


def mapped(size_bytes: int) -> mmap.mmap:
    """New host memory, allocated completely now. Raises ConfigError if it cannot be allocated."""
    try:
        block = mmap.mmap(-1, size_bytes)
    except (OSError, OverflowError) as error:
        raise refusal(size_bytes, "host", error) from error
    touch(block)
    return block


def touch(block: mmap.mmap | memoryview) -> None:
    """Writes zeros to every memory page now, so that none of them faults during a request. For new memory only."""
    np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 0


def map_now(block: mmap.mmap) -> None:
    """Like `touch`, for memory that another process has created and uses: reads every memory page, and changes none.

    Otherwise the first use of each page faults here too: reading 64 MiB into unmapped pages takes three times the CPU.
    """
    np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE].max()


class CopyEngine(Protocol):
    """Copies for one rank."""

    def begin(self, plan: Plan) -> Work:
        """Accepts a plan, on the engine's thread, and returns the work of carrying it out.

        The work runs on a worker thread, in parallel with other plans; no two plans write the same page. It makes every copy and
        returns when all bytes are in place, or raises if one could not be made. Work that the engine queued on its device
        before this call must finish before the first byte is copied.
        """
        ...


class NumpyCopyEngine:
    """Copies between memories that NumPy can index."""

    def __init__(self, memories: Mapping[Tier, PageMemory]) -> None:
        self._memories = memories

    def begin(self, plan: Plan) -> Work:
        return lambda: self._run(plan)

    def _run(self, plan: Plan) -> None:
        for copy in plan.copies:
            source, target = (self._memories[span.tier] for span in (copy.source, copy.target))
            assert not copy.turns(source.spec), f"{copy} is not a copy of bytes"
            first, onto, size = copy.common(source.spec)
            source_rows = source.rows(copy.source.kind)[:, first : first + size]
            target_rows = target.rows(copy.target.kind)[:, onto : onto + size]
            for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
                target_rows[write] = source_rows[read]


# ---- how much memory there is -------------------------------------------------------------------


def must_fit(needed_bytes: int, *, settings: str = SETTINGS) -> None:
    """Raises ConfigError, saying what would fit and which settings to lower, before more memory is allocated than is free."""
    free = free_bytes()
    if needed_bytes > free:
        raise ConfigError(
            f"the tiers take {format_bytes(needed_bytes)} of this machine's memory, and {format_bytes(free)} are free: "
            f"lower {settings}"
        )


def refusal(size_bytes: int, where: str, why: Exception) -> ConfigError:
    """The error to raise when the system refuses a tier's memory, even if enough seemed to be free."""
    reason = (str(why).splitlines() or [type(why).__name__])[0]
    return ConfigError(
        f"{format_bytes(size_bytes)} of {where} memory cannot be allocated ({reason:.200}); {format_bytes(free_bytes())} "
        f"of host memory are free: give the tiers less memory ({SETTINGS}), or check ulimit -v"
    )


def free_bytes(root: Path = Path("/")) -> int:
    """Host memory available without swapping: what Linux reports as available, within a container's limit."""
    available = _entry(root / "proc/meminfo", "MemAvailable:")
    free = available * 1024 if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = root / "sys/fs/cgroup"
    limit, used = _entry(group / "memory.max"), _entry(group / "memory.current")
    if limit is not None and used is not None:  # cached files count as used, and are dropped when memory is needed
        free = min(free, max(limit - used + (_entry(group / "memory.stat", "inactive_file") or 0), 0))
    return free


def _entry(path: Path, name: str = "") -> int | None:
    """The number after a name in one of the kernel's files, or of a file that is a number; None if there is none."""
    try:
        lines = path.read_text().splitlines()
        return next(int(line.removeprefix(name).split()[0]) for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
