"""The bytes of one tier on one rank: one block, seen as an ordinary table of pages for each kind.

Host memory is mapped once, page-aligned and touched at the start, so that no later write faults. What cannot be had is a
ConfigError that says how much there is. Knows nothing of which pages are in use.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.units import format_bytes
from stepwell.memory.layout import ArenaLayout

Bytes = npt.NDArray[np.uint8]
SETTINGS = "device_bytes or host_bytes"  # of a CacheConfig


class PageMemory:
    """A block of host memory cut as its arena's layout says."""

    def __init__(self, spec: ModelSpec, layout: ArenaLayout) -> None:
        try:
            self._block = mmap.mmap(-1, layout.size_bytes)
        except (OSError, OverflowError) as error:
            raise refusal(layout.size_bytes, "host", error) from error
        flat = np.frombuffer(self._block, np.uint8)
        flat[:: mmap.PAGESIZE] = 0  # touch every page of the machine now, not under a request
        self._rows = {
            kind: flat[: layout.rows(kind) * stride].reshape(-1, stride)[:, : spec.object_bytes(kind)]
            for kind, stride in layout.strides.items()
        }

    def rows(self, kind: Kind) -> Bytes:
        """All pages of a kind, `[page id][byte]`; writing through it writes the memory."""
        return self._rows[kind]

    @property
    def block(self) -> memoryview:
        """All of it, for stores that must know memory before they may use it."""
        return memoryview(self._block)

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy."""
        return memoryview(self._rows[kind][page])


def must_fit(needed_bytes: int, *, settings: str = SETTINGS) -> None:
    """Raises ConfigError, saying what would fit and which settings to lower, before memory is taken that is not there."""
    free = free_bytes()
    if needed_bytes > free:
        raise ConfigError(
            f"the tiers take {format_bytes(needed_bytes)} of this machine's memory, and {format_bytes(free)} are free: "
            f"give less {settings}"
        )


def refusal(size_bytes: int, where: str, why: Exception) -> ConfigError:
    """What to say when the system refuses a tier's memory, whatever it looked like before."""
    reason = (str(why).splitlines() or [type(why).__name__])[0]
    return ConfigError(
        f"{format_bytes(size_bytes)} of {where} memory for a tier cannot be had ({reason:.200}); {format_bytes(free_bytes())} "
        f"of host memory are free: give less {SETTINGS} (device_memory or host_memory of an engine), or look at ulimit -v"
    )


def free_bytes(root: Path = Path("/")) -> int:
    """Host memory that can be had without swapping: what Linux says is available, and what a container's limit leaves of it."""
    available = _entry(root / "proc/meminfo", "MemAvailable:")
    free = available * 1024 if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = root / "sys/fs/cgroup"
    limit, used = _entry(group / "memory.max"), _entry(group / "memory.current")
    if limit is not None and used is not None:  # files that are cached count as used, and go when memory is wanted
        free = min(free, max(limit - used + (_entry(group / "memory.stat", "inactive_file") or 0), 0))
    return free


def _entry(path: Path, name: str = "") -> int | None:
    """The number behind a name in one of the kernel's files, or of a file that is a number; None where there is none."""
    try:
        lines = path.read_text().splitlines()
        return next(int(line.removeprefix(name).split()[0]) for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
