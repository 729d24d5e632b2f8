"""Keeps what a process has freed from piling up: few heaps, and what is free in them goes back to the system every half minute.
With glibc alone; elsewhere it does nothing.

glibc keeps what threads free in up to eight heaps a core, each with holes of its own, and returns only what lies at a heap's end.
So a server that has been busy holds tens of MiB that it does not use, and more with every hour.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import time
from collections.abc import Callable
from threading import Event, Thread

EVERY_S = 30.0
MOST_HEAPS = 2  # most threads take turns anyway, as Python has them do
_M_ARENA_MAX = -8  # of malloc.h

log = logging.getLogger(__name__)


def have_few_heaps() -> None:
    """To be called before there are threads. An operator's own setting counts."""
    if (
        _is_glibc()
        and "MALLOC_ARENA_MAX" not in os.environ
        and "glibc.malloc.arena_max" not in os.environ.get("GLIBC_TUNABLES", "")
    ):
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, MOST_HEAPS)


def glibc_trim() -> Callable[[], None] | None:
    """What gives free memory back; None without glibc. Takes milliseconds, in which other threads may go on."""
    if not _is_glibc():
        return None
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


class HeapTrimmer:
    """Calls `trim` on a thread of its own from `start` to `close`."""

    def __init__(self, trim: Callable[[], None] | None, *, every_s: float = EVERY_S) -> None:
        self._trim = trim
        self._every_s = every_s
        self._closed = Event()
        self._thread = Thread(target=self._run, name="heap", daemon=True)

    def start(self) -> None:
        if self._trim is not None:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._trim is not None, "it was not to start"
        while not self._closed.wait(self._every_s):
            began_s = time.perf_counter()
            self._trim()
            log.debug("free memory was given back in %.1f ms", (time.perf_counter() - began_s) * 1e3)
