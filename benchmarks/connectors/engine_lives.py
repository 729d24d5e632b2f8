"""What the lives of engines share: prompts asked one after the other, their CPU time, and files that have stopped growing.

Runs with the interpreter of the engine, so it imports little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepwell.store.log.disk.files import Disk
from stepwell.store.log.format.superblock import NAME
from stepwell.store.log.inspect import stat_directory

STILL_S, PATIENCE_S = 5.0, 120.0  # threads of an engine on a busy machine pause for seconds

Answer = tuple[int, list[int], float]  # tokens found, tokens answered, log probability


def asked(prompts: list[list[int]], ask: Callable[[list[int]], Answer]) -> dict[str, Any]:
    """Wall and CPU seconds of each prompt, and its answer."""
    found: dict[str, Any] = {"seconds": [], "cpu_s": [], "cached": [], "answers": []}
    for prompt in prompts:
        began_s, worked_s = time.perf_counter(), _cpu_s()
        cached, tokens, logprob = ask(prompt)
        found["seconds"].append(time.perf_counter() - began_s)
        found["cpu_s"].append(_cpu_s() - worked_s)
        found["cached"].append(cached)
        found["answers"].append([tokens, round(logprob, 4)])
    return found


def _cpu_s() -> float:
    """This process and its children. On a machine that others use it varies less than seconds do."""
    import psutil  # the engine's interpreter has it

    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def size_of(directory: Path) -> int:
    """Bytes of the stored values. The files of a log are longer than its values, so it is asked."""
    logs = [found.parent for found in directory.rglob(NAME)]
    if logs:
        return sum(stat_directory(log, Disk()).value_bytes for log in logs)
    sizes = []
    for file in _files(directory):
        with suppress(FileNotFoundError):  # it was a temporary one
            sizes.append(file.stat().st_size)
    return sum(sizes)


def settled(directory: Path, work: Callable[[], object]) -> int:
    """Calls `work` until the files have not grown for a while; returns their size. Raises TimeoutError if they always grow."""
    began = changed = time.monotonic()
    size = size_of(directory)
    while (now := time.monotonic()) - changed < STILL_S:
        if now - began > PATIENCE_S:
            raise TimeoutError(f"{directory} still grows after {PATIENCE_S:g} s")
        work()
        time.sleep(0.05)
        if size_of(directory) != size:
            size, changed = size_of(directory), time.monotonic()
    return size


def chill(directory: Path) -> None:
    """Drops the files from the page cache, so that the next process reads them from the disk."""
    for file in _files(directory):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(directory: Path) -> Iterator[Path]:
    return (file for file in directory.rglob("*") if file.is_file())
