"""`stepwell doctor`: checks this machine for what a server needs, prints what it found and what to change.

Checks memory (free, limits of control groups, huge pages), the installed packages, the GPU as torch sees it, and the place of a
store: the disk beneath a log, measured for a moment, or a Mooncake master that answers. Leaves nothing behind: the measured file
has no name, and no store is opened.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from stepwell import __version__
from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.extras import install
from stepwell.base.meters import Clock, SystemClock
from stepwell.base.units import format_bytes
from stepwell.cli.command import Command
from stepwell.transfer.copy_engine import free_bytes


class Health(Enum):
    FINE = "fine"
    SLOW = "could be better"  # a server runs, but slower
    BROKEN = "broken"  # a server would fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`change` says what to do; empty if nothing."""

    check: str
    health: Health
    found: str
    change: str = ""

    def __post_init__(self) -> None:
        assert (self.health is Health.FINE) == (not self.change), f"{self} must say what to change, or be fine"


def fine(check: str, found: str) -> Finding:
    return Finding(check=check, health=Health.FINE, found=found)


def slow(check: str, found: str, change: str) -> Finding:
    return Finding(check=check, health=Health.SLOW, found=found, change=change)


def broken(check: str, found: str, change: str) -> Finding:
    return Finding(check=check, health=Health.BROKEN, found=found, change=change)


LEAST_FREE_BYTES = 1 << 30
_GROUPS = "sys/fs/cgroup"
_HUGE = "sys/kernel/mm/transparent_hugepage/enabled"


def memory(root: Path = Path("/")) -> Finding:
    free = free_bytes(root)
    found = f"{format_bytes(free)} free"
    if free < LEAST_FREE_BYTES:
        return broken("memory", found, "end other programs, or use a larger machine: weights and the host tier must fit")
    return fine("memory", found)


def group_limit(root: Path = Path("/")) -> Finding:
    """The smallest memory limit of this process's control groups. `free_bytes` sees only the outermost one; an inner limit kills
    a server that relies on more.
    """
    group = _own_group(root)
    limits = {path: limit for path in group if (limit := _number(path / "memory.max")) is not None}
    if not limits:
        return fine("cgroup", "no memory limit")
    path, limit = min(limits.items(), key=lambda each: each[1])
    found = f"{format_bytes(limit)} at most ({path / 'memory.max'})"
    if limit < free_bytes(root):
        return slow(
            "cgroup", found, "set --device-memory and --host-memory so that they fit with the weights, or raise the limit"
        )
    return fine("cgroup", found)


def huge_pages(root: Path = Path("/")) -> Finding:
    try:
        chosen = re.search(r"\[(\w+)\]", (root / _HUGE).read_text())
    except OSError:
        chosen = None
    if chosen is None:
        return slow("huge pages", "this kernel has none", "use a kernel with transparent huge pages: they make copies faster")
    if chosen[1] == "never":
        return slow("huge pages", "never", f"echo madvise > /{_HUGE}: the host tier is mapped and copied faster")
    return fine("huge pages", chosen[1])


def _own_group(root: Path) -> list[Path]:
    """The directories of this process's control group and its parents."""
    top = root / _GROUPS
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [top]
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    if ".." in name.split("/"):  # outside of this cgroup namespace
        return [top]
    own = top / name
    return [own, *(each for each in own.parents if each.is_relative_to(top))]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


# ---- packages --------------------------------------------------------------------------------------


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("torch", "safetensors", "tokenizers", "gguf", "jinja2", "fastapi", "pydantic", "uvicorn", "prometheus-client"),
    "guided": ("llguidance",),
    "events": ("pyzmq", "msgspec"),
    "otel": ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
_ALWAYS = ("numpy", "rich", "xxhash")
_GPU_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl")


def packages() -> Iterator[Finding]:
    """One finding for required packages, and one per extra. A missing package is an error only for `serve`."""
    own = {"stepwell": __version__, "Python": platform.python_version()}
    yield fine("versions", _listed(own | {name: _version(name) or "?" for name in _ALWAYS}))
    for extra, names in EXTRAS.items():
        found = {name: _version(name) for name in names}
        there = {name: number for name, number in found.items() if number is not None}
        missing = [name for name in names if name not in there]
        if not missing:
            yield fine(extra, _listed(there))
            continue
        say = broken if extra == "serve" else slow
        yield say(extra, f"not installed: {', '.join(missing)}", install(extra))


def gpu(root: Path = Path("/")) -> Iterator[Finding]:
    """A driver that torch cannot use is an error; a machine without a driver has no GPU."""
    has_driver = any((root / file).exists() for file in _GPU_FILES)
    try:
        from stepwell.engine.building.gpus import gpus
    except (ImportError, OSError) as error:  # a package is missing, or a library that one is linked with
        yield broken("CUDA", f"torch cannot be imported: {error}", install("serve"))
        return
    seen = gpus()
    if not seen.names:
        if not has_driver:
            yield fine("CUDA", "no NVIDIA driver: models run on the CPU")
            return
        what = "torch was built without CUDA" if seen.cuda is None else f"torch (CUDA {seen.cuda}) sees no GPU"
        yield broken("CUDA", what, "install a torch for the driver's CUDA version; in a container, pass the GPU (--gpus all)")
        return
    yield fine("CUDA", f"{', '.join(seen.names)}; CUDA {seen.cuda}")
    yield _kernels()


def _kernels() -> Finding:
    found = {name: _version(name) for name in ("triton", "flashinfer-python", "fla-core")}
    missing = [name for name, number in found.items() if number is None]
    if shutil.which("nvcc") is None and find_spec("flashinfer_jit_cache") is None:
        missing.append("nvcc")
    if missing:
        change = f"{install('cuda')}, and put CUDA's compiler (nvcc) on the path"
        return slow("kernels", f"not installed: {', '.join(missing)}; plain torch is used instead", change)
    return fine("kernels", _listed({name: number or "?" for name, number in found.items()}))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


# ---- stores ----------------------------------------------------------------------------------------


PROBE_BYTES = 64 << 20
PROBE_S = 2.0  # for each way
SLOW_BYTES_PER_S = 200 << 20
LEAST_DISK_BYTES = 1 << 30
_BLOCK = 4 << 20
_STAT_BLOCK = 512  # of st_blocks, whatever the file system's own are
_ON_DISK = ("log", "shared-log")


def check_store(where: str, environment: Mapping[str, str], clock: Clock) -> Iterator[Finding]:
    """Findings about a store, as in `log:DIR`. Raises ConfigError for an unknown one."""
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
        yield fine("store", f"{name} needs no check")


def disk(directory: Path, clock: Clock) -> Finding:
    """A short probe of the disk of a log. An existing log has its space already, even on a full disk."""
    at = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    free, ours = shutil.disk_usage(at).free, _log_bytes(directory)
    space = f"{format_bytes(free)} free" + (f", and a log of {format_bytes(ours)}" if ours else "")
    if free + ours < LEAST_DISK_BYTES:
        return broken("disk", f"{at}: {space}", "free space, or choose another directory")
    probe_bytes = min(PROBE_BYTES, free // 2 // _BLOCK * _BLOCK)
    try:
        write, read = _speeds(at, probe_bytes, clock)
    except OSError as error:
        return broken(
            "disk", f"{at} cannot be written: {error.strerror}", "let this user write there, or choose another directory"
        )
    if not probe_bytes:
        return slow("disk", f"{at}: {space}, too little to measure its speed", "free space, or give the log a smaller budget")
    found = f"{at} writes {format_bytes(write)}/s, reads {format_bytes(read)}/s, {space}"
    if min(write, read) < SLOW_BYTES_PER_S:
        return slow("disk", found, "use a local NVMe disk: computing a prompt is faster than reading it from a slow disk")
    return fine("disk", found)


def _log_bytes(directory: Path) -> int:
    """Disk space of an existing log's segments, which it reuses; 0 without a log, or if it cannot be read."""
    from stepwell.store.log.format.segment_list import number_of

    try:
        with os.scandir(directory) as entries:
            found = [each for each in entries if number_of(each.name) is not None and each.is_file(follow_symlinks=False)]
            return sum(each.stat(follow_symlinks=False).st_blocks * _STAT_BLOCK for each in found)
    except OSError:
        return 0


def _speeds(directory: Path, most_bytes: int, clock: Clock) -> tuple[int, int]:
    """Write and read speed in bytes per second. Raises OSError."""
    block = os.urandom(_BLOCK)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began, written = clock.now(), 0
        while written < most_bytes and clock.now() - began < PROBE_S:
            written += file.write(block)
            os.fdatasync(file.fileno())
        write_s = clock.now() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
        file.seek(0)
        began, read = clock.now(), 0
        while clock.now() - began < PROBE_S and (piece := file.read(_BLOCK)):
            read += len(piece)
        read_s = clock.now() - began
    return int(written / max(write_s, 1e-9)), int(read / max(read_s, 1e-9))


def mooncake(location: str, environment: Mapping[str, str]) -> Finding:
    """Whether the wheel loads and a master listens."""
    from stepwell.cli.engine_options import mooncake_options
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
        "mooncake", f"masters are found through {master}, not checked" if "://" in master else f"a master listens at {master}"
    )


# ---- command ---------------------------------------------------------------------------------------


EXIT_BROKEN = 1
_MARKS = {Health.FINE: "ok", Health.SLOW: "--", Health.BROKEN: "!!"}
_STATUSES = "exit status: 0 if a server can run here; 1 if something is broken; 2 if a check failed to run"


def configure(parser: ArgumentParser) -> None:
    parser.epilog = _STATUSES
    parser.add_argument(
        "--store", metavar="STORE", help="also check a store, as in `stepwell serve`: log:DIR, mooncake:[FILE] ..."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: Namespace) -> int:
    findings = list(examine(args.store, os.environ, SystemClock()))
    if args.json:
        print(json.dumps({"broken": _broken(findings), "findings": [_row(each) for each in findings]}, indent=2))
    else:
        for each in findings:
            print(f"{_MARKS[each.health]}  {each.check:<14}  {each.found}")
            if each.change:
                print(f"    {'':<14}  change: {each.change}")
    return EXIT_BROKEN if _broken(findings) else 0


def examine(store: str | None, environment: Mapping[str, str], clock: Clock) -> Iterator[Finding]:
    """All findings. Raises ConfigError for an unknown store."""
    if store is not None:
        yield from check_store(store, environment, clock)
    yield memory()
    yield group_limit()
    yield huge_pages()
    yield from gpu()
    yield from packages()


def _broken(findings: Sequence[Finding]) -> bool:
    return any(each.health is Health.BROKEN for each in findings)


def _row(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "health": finding.health.name.lower(), "found": finding.found, "change": finding.change}


COMMAND = Command(name="doctor", summary="Check this machine, and print what to change.", configure=configure, run=run)
