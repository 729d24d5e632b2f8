"""What the system keeps of a file in its page cache, from `cachestat` of Linux 6.5 and later.

Python has no name for that call. Where the kernel or a sandbox does not know it, nothing counts as cached. Reads nothing; any
thread.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

_CALL_NUMBER = 451  # the same on every architecture
_WORD = ctypes.c_uint64


class _Range(ctypes.Structure):
    _fields_ = (("offset", _WORD), ("size", _WORD))


class _Counts(ctypes.Structure):
    """Numbers of pages, filled in by the kernel."""

    _fields_ = (("cached", _WORD), ("dirty", _WORD), ("writeback", _WORD), ("evicted", _WORD), ("recently_evicted", _WORD))


# The GIL is kept: the call takes microseconds, and to acquire the GIL again would take longer.
_syscall = ctypes.PyDLL(None).syscall if sys.platform == "linux" else None


def holds(fd: int, offset: int, size: int) -> bool:
    """Whether all pages of a range are in the page cache."""
    if _syscall is None or size <= 0:
        return False
    counts = _Counts()
    asked = ctypes.c_uint(fd), ctypes.byref(_Range(offset, size)), ctypes.byref(counts), ctypes.c_uint(0)
    num_pages = -(-(offset + size) // mmap.PAGESIZE) - offset // mmap.PAGESIZE
    return _syscall(ctypes.c_long(_CALL_NUMBER), *asked) == 0 and int(counts.cached) >= num_pages
