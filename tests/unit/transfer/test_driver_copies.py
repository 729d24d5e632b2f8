"""Lists of copies: in short calls of the driver, every copy once, and errors reported. The driver is a stand-in here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from stepwell.transfer import driver_copies
from stepwell.transfer.driver_copies import FIRST, MOST, DriverCopies


class Function:
    """A function of the driver: notes what it was called with, and what it answers."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[object, ...]] = []
        self.argtypes: list[object] = []

    def __call__(self, *args: object) -> int:
        self.calls.append(args)
        return self.answer


class Copying(Function):
    """Moves the bytes at once."""

    def __call__(self, *args: object) -> int:
        targets, sources, sizes, count = (int(each) for each in args[:4])  # type: ignore[call-overload]
        lists = [np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(each)) for each in (targets, sources, sizes)]
        for target, source, size in zip(*(each.tolist() for each in lists), strict=True):
            ctypes.memmove(target, source, size)
        return super().__call__(*args)


class Version(Function):
    def __call__(self, *args: object) -> int:
        args[0]._obj.value = self.answer  # type: ignore[attr-defined]
        return 0


def driver(monkeypatch: pytest.MonkeyPatch, version: int, **functions: Function) -> SimpleNamespace:
    made = SimpleNamespace(
        cuCtxGetCurrent=Function(), cuCtxSetCurrent=Function(), cuDriverGetVersion=Version(version), **functions
    )  # fmt: skip
    monkeypatch.setattr(driver_copies.ctypes, "CDLL", lambda name: made)
    return made


@pytest.mark.parametrize(
    ("version", "name", "arguments"), [(12090, "cuMemcpyBatchAsync", 9), (13000, "cuMemcpyBatchAsync_v2", 8)]
)
@pytest.mark.parametrize("count", [0, 1, FIRST, FIRST + 1, FIRST + MOST, 1000])
def test_every_copy_is_made_once(version: int, name: str, arguments: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    there = driver(monkeypatch, version, **{name: Copying()})
    random = np.random.default_rng(count)
    source, target = random.integers(0, 256, 50 * 1000, np.uint8), np.zeros(50 * 1000, np.uint8)
    starts, sizes = np.arange(count, dtype=np.uint64) * np.uint64(50), random.integers(1, 50, count).astype(np.uint64)
    wanted = np.zeros_like(target)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        wanted[start : start + size] = source[start : start + size]
    DriverCopies().queue(starts + np.uint64(source.ctypes.data), starts + np.uint64(target.ctypes.data), sizes, 77)
    assert np.array_equal(target, wanted)
    calls = getattr(there, name).calls
    assert all(len(call) == arguments == len(getattr(there, name).argtypes) and call[-1] == 77 for call in calls)
    assert [call[3] for call in calls] == ([min(FIRST, count)] if count else []) + [
        min(MOST, count - first) for first in range(FIRST, count, MOST)
    ]
    assert bool(there.cuCtxSetCurrent.calls) == bool(count), "a thread that has used no device has no context"


def test_what_the_driver_lacks_or_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, 12040)
    with pytest.raises(OSError, match=r"of CUDA 12\.04, and batched copies need 12\.8 or newer"):
        DriverCopies()
    driver(monkeypatch, 13020, cuMemcpyBatchAsync_v2=Function(answer=1))
    one = np.ones(1, np.uint64)
    with pytest.raises(RuntimeError, match="error 1"):
        DriverCopies().queue(one, one, one, 0)
