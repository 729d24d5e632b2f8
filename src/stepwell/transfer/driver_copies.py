"""Many copies in one call of the CUDA driver, from version 12.8 on: `cuMemcpyBatchAsync`.

The device's copy engines carry them out, so concurrent passes are not slowed down, and the host takes half a microsecond for
each instead of ten. Addresses are not checked: the caller has done so. Orders and waits for nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = "libcuda.so.1"
FIRST, MOST = 32, 64  # copies of one call: the engines begin when the call returns, and launches of passes wait for it

Numbers = npt.NDArray[np.uint64]
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("source_order", ctypes.c_int), ("source_place", ctypes.c_int * 2), ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )  # fmt: skip


_IN_STREAM_ORDER = 1  # sources are read when the stream reaches the copy, not before


class DriverCopies:
    """Raises OSError if there is no such call. Create it with the device's context current; then use it from any thread."""

    def __init__(self) -> None:
        driver = ctypes.CDLL(LIBRARY)  # calls release the GIL
        self._context = _ADDRESS()
        self._set_current = driver.cuCtxSetCurrent
        self._set_current.argtypes = [_ADDRESS]
        _check("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._attributes, self._from_the_first, self._failed = _Attributes(source_order=_IN_STREAM_ORDER), _SIZE(0), _SIZE(0)
        behind: list[Any] = [ctypes.byref(self._attributes), ctypes.byref(self._from_the_first), 1]
        types: list[Any] = [_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS]
        version = ctypes.c_int(0)
        _check("cuDriverGetVersion", driver.cuDriverGetVersion(ctypes.byref(version)))
        if version.value < 12080:
            raise OSError(f"{LIBRARY} is of CUDA {version.value / 1000:g}, and batched copies need 12.8 or newer")
        if version.value >= 13000:
            self._call = driver.cuMemcpyBatchAsync_v2
        else:  # it reports which copy failed
            self._call = driver.cuMemcpyBatchAsync
            behind.append(ctypes.byref(self._failed))
            types.append(_ADDRESS)
        self._behind, self._call.argtypes = behind, types

    def queue(self, sources: Numbers, targets: Numbers, sizes: Numbers, stream: int) -> None:
        """Queues on a stream the copy of `sizes[i]` bytes from address `sources[i]` to `targets[i]`, for every i, in any order.

        Raises RuntimeError if the driver refuses; some of the copies may be queued then.
        """
        count = len(sizes)
        if not count:
            return
        _check("cuCtxSetCurrent", self._set_current(self._context))
        lists = [np.ascontiguousarray(each, np.uint64) for each in (targets, sources, sizes)]
        addresses = [each.ctypes.data for each in lists]
        first, step = 0, FIRST
        while first < count:
            at = (address + first * 8 for address in addresses)
            _check("cuMemcpyBatchAsync", self._call(*at, min(step, count - first), *self._behind, stream))
            first, step = first + step, MOST


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name}: error {status}")
