"""Memory of a machine: what is free, what control groups leave of it, huge pages. Reads files of the kernel."""

from __future__ import annotations

import re
from pathlib import Path

from stepwell.base.units import format_bytes
from stepwell.cli.doctor.finding import Finding, broken, fine, slow
from stepwell.transfer.copy_engine import free_bytes

LEAST_FREE_BYTES = 1 << 30
_GROUPS = "sys/fs/cgroup"
_HUGE = "sys/kernel/mm/transparent_hugepage/enabled"


def memory(root: Path = Path("/")) -> Finding:
    free = free_bytes(root)
    found = f"{format_bytes(free)} free"
    if free < LEAST_FREE_BYTES:
        return broken("memory", found, "end other programs, or take a larger machine: weights and the host tier must fit")
    return fine("memory", found)


def group_limit(root: Path = Path("/")) -> Finding:
    """The smallest limit of the groups that this process is in. The outermost is what `free_bytes` sees; those further in end a
    server that believes it has more.
    """
    group = _own_group(root)
    limits = {path: limit for path in group if (limit := _number(path / "memory.max")) is not None}
    if not limits:
        return fine("cgroup", "no limit of memory")
    path, limit = min(limits.items(), key=lambda each: each[1])
    found = f"{format_bytes(limit)} at most ({path / 'memory.max'})"
    if limit < free_bytes(root):
        return slow("cgroup", found, "give --device-memory and --host-memory that fit with the weights, or raise the limit")
    return fine("cgroup", found)


def huge_pages(root: Path = Path("/")) -> Finding:
    try:
        chosen = re.search(r"\[(\w+)\]", (root / _HUGE).read_text())
    except OSError:
        chosen = None
    if chosen is None:
        return slow("huge pages", "this kernel has none", "use a kernel with transparent huge pages: copies are faster with them")
    if chosen[1] == "never":
        return slow("huge pages", "never", f"echo madvise > /{_HUGE}: the host tier is mapped and copied faster")
    return fine("huge pages", chosen[1])


def _own_group(root: Path) -> list[Path]:
    """The folders of this process's group and of all around it."""
    top = root / _GROUPS
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [top]
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    if ".." in name.split("/"):  # of a namespace further out: nothing that can be seen from here
        return [top]
    own = top / name
    return [own, *(each for each in own.parents if each.is_relative_to(top))]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
