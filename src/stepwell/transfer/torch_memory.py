"""The bytes of one tier as a torch tensor: on a device, or on the host and then pinned if there is CUDA.

Pinned memory is mapped once, in huge pages where the system has them, touched by several threads, and registered with CUDA.
`PinnedAhead` does so in the background. Memory that cannot be allocated is a ConfigError. Imports torch, so it is imported when
it is used. Copies nothing, and does not know which pages are in use.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from weakref import finalize

import numpy as np
import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.units import format_bytes
from stepwell.memory.layout import ArenaLayout, payload_bytes
from stepwell.transfer.copy_engine import refusal

log = logging.getLogger(__name__)

TOUCHED_AT_ONCE = 256 << 20  # bytes that one thread touches before it takes the next part
TOUCHING_THREADS = 16  # more would wait for each other in the kernel


class TorchMemory:
    """A block of bytes on a torch device, divided as its arena's layout says."""

    def __init__(
        self, spec: ModelSpec, layout: ArenaLayout, device: str = "cpu", given: memoryview | None = None, *, pin: bool = True,
        ahead: PinnedAhead | None = None,
    ) -> None:  # fmt: skip
        """`given` is host memory to use, which other processes may have mapped too. If there is CUDA it is pinned, unless no GPU
        uses it: pinning takes memory of the GPU too. `ahead` is pinned memory whose allocation has begun, of sufficient size.
        """
        pinned = pin and device == "cpu" and torch.cuda.is_available()
        try:
            if ahead is not None:
                self._block = block = ahead.take()[: layout.size_bytes]
            elif given is not None:
                self._block = block = _given_bytes(given[: layout.size_bytes], pinned=pinned)
            else:
                self._block = block = pinned_bytes(layout.size_bytes) if pinned else _zeros(layout.size_bytes, device)
        except (RuntimeError, OverflowError) as error:  # only some of CUDA's refusals have a class of their own
            raise refusal(layout.size_bytes, "pinned host" if pinned else device, error) from error
        self.spec = spec
        self._rows = {
            kind: block[: layout.rows(kind) * stride].view(-1, stride)[:, : payload_bytes(spec, layout.tier, kind)]
            for kind, stride in layout.strides.items()
        }

    def rows(self, kind: Kind) -> torch.Tensor:
        """All pages of a kind, `[page id][byte]`."""
        return self._rows[kind]

    @property
    def bytes_B(self) -> torch.Tensor:
        """All of it."""
        return self._block

    @property
    def block(self) -> memoryview:
        """All of it, for stores that require registered memory. For host memory only."""
        return memoryview(self._block.numpy())  # type: ignore[arg-type]

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy. For host memory only."""
        return memoryview(self._rows[kind][page].numpy())  # type: ignore[arg-type]


def pinned_bytes(size_bytes: int) -> torch.Tensor:
    """Zeroed host memory that CUDA can access: registered by us, or else allocated by torch. Raises torch's exceptions."""
    try:
        return _registered(size_bytes)
    except (OSError, OverflowError, RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        log.warning("%s could not be registered with CUDA, so torch allocates them: %s", format_bytes(size_bytes), error)
        return _zeros(size_bytes, "cpu", pinned=True)


class PinnedAhead:
    """Pinned host memory that is allocated in a background thread, while weights are loaded."""

    def __init__(self, size_bytes: int, *, pinned: Callable[[int], torch.Tensor] = pinned_bytes) -> None:
        self._taken: Future[torch.Tensor] = Future()
        Thread(target=self._take, args=(size_bytes, pinned), name="stepwell-host-memory", daemon=True).start()

    def take(self) -> torch.Tensor:
        """Waits for the memory. Raises torch's exceptions."""
        return self._taken.result()

    def _take(self, size_bytes: int, pinned: Callable[[int], torch.Tensor]) -> None:
        try:
            self._taken.set_result(pinned(size_bytes))
        except BaseException as error:  # worker boundary: `take` raises it
            self._taken.set_exception(error)


def touch(flat: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Makes the system allocate every page of new memory now, not during a request. Writes zeros, with several threads."""
    threads = max(min(os.cpu_count() or 1, TOUCHING_THREADS), 1)
    with ThreadPoolExecutor(threads) as pool:
        parts = range(0, len(flat), TOUCHED_AT_ONCE)
        list(pool.map(lambda at: flat[at : at + TOUCHED_AT_ONCE : mmap.PAGESIZE].fill(0), parts))  # without the GIL


def _given_bytes(given: memoryview, *, pinned: bool) -> torch.Tensor:
    flat = np.frombuffer(given, np.uint8)
    if pinned:
        _register(flat)
    return torch.from_numpy(flat)


def _registered(size_bytes: int) -> torch.Tensor:
    """Memory of our own, registered for as long as a tensor refers to it."""
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # may get huge pages
    with suppress(AttributeError, OSError):  # not every system has huge pages, nor permits them
        block.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(block, np.uint8)
    touch(flat)
    _register(flat)
    return torch.from_numpy(flat)


def _register(flat: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Pins memory for as long as the array exists."""
    failed = int(torch.cuda.cudart().cudaHostRegister(flat.ctypes.data, len(flat), 0))
    if failed:
        with suppress(RuntimeError, AssertionError):  # CUDA keeps the error for the next call that checks
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister: error {failed}")
    # torch keeps the array as long as a tensor refers to it, and the array keeps the mapping.
    finalize(flat, _unregister, flat.ctypes.data).atexit = False  # the end of the process unregisters too


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _zeros(size_bytes: int, device: str, *, pinned: bool = False) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
