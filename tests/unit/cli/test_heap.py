"""Memory that was freed goes back to the system, again and again, until the server ends."""

from __future__ import annotations

import ctypes
from pathlib import Path
from threading import Event

import pytest

from stepwell.cli.heap import HeapTrimmer, glibc_trim
from waiting import PATIENCE_S

COUNT, SIZE = 1000, 100_000  # below what malloc maps for itself


def anonymous_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def test_what_malloc_keeps_goes_back_to_the_system() -> None:
    trim = glibc_trim()
    if trim is None:
        pytest.skip("this is not glibc")
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(SIZE) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks[:-1]:  # the last is the end of the heap, so malloc gives nothing back by itself
        libc.free(block)
    before = anonymous_bytes()
    trim()
    given_back = before - anonymous_bytes()
    libc.free(blocks[-1])
    assert given_back > COUNT * SIZE / 2


def test_it_goes_on_until_it_is_closed() -> None:
    times, several = [], Event()

    def trim() -> None:
        times.append(1)
        if len(times) == 3:
            several.set()

    trimmer = HeapTrimmer(trim, every_s=0.001)
    trimmer.start()
    assert several.wait(PATIENCE_S)
    trimmer.close()
    ended = len(times)
    assert not trimmer._thread.is_alive() and len(times) == ended


def test_where_there_is_nothing_to_call_nothing_runs() -> None:
    trimmer = HeapTrimmer(None)
    trimmer.start()
    assert not trimmer._thread.is_alive()
    trimmer.close()
