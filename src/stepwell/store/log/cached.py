"""How much of a file the machine has in its page cache: asks the kernel (`cachestat`, Linux 6.5), never reads a byte.

Where the kernel cannot be asked, nothing is known to be cached.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

_CACHESTAT = 451  # the same number on every machine that has it


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Answer(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted"))


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Whether all of a range is in the page cache now. Both ends are multiples of a block."""
    call, answer = _call(), _Answer()
    if call is None or call(_CACHESTAT, fd, ctypes.byref(_Range(offset, size)), ctypes.byref(answer), 0):
        return False
    return bool(answer.cached * mmap.PAGESIZE >= size)


@cache
def _call() -> Callable[..., int] | None:
    return ctypes.CDLL(None).syscall if sys.platform == "linux" else None
