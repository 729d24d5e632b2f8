"""Memory that was freed goes back to the system, again and again, until the server ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
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


# Twelve threads that allocate at once, and how many heaps there are then: glibc counts them in an XML of its own.
COUNTS_HEAPS = """
import ctypes, sys, threading
from stepwell.cli.heap import have_few_heaps
have_few_heaps()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
together = threading.Barrier(12)

def allocate():
    together.wait()
    libc.malloc(10_000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.parametrize(("setting", "most"), [(None, 2), ("1", 1)])
def test_there_are_few_heaps_however_many_threads(tmp_path: Path, setting: str | None, most: int) -> None:
    if glibc_trim() is None:
        pytest.skip("this is not glibc")
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if setting is not None:
        environment["MALLOC_ARENA_MAX"] = setting
    subprocess.run([sys.executable, "-c", COUNTS_HEAPS, str(tmp_path / "info")], env=environment, check=True)
    assert 1 <= (tmp_path / "info").read_text().count("<heap ") <= most


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
