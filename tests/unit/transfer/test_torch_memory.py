"""Pinned memory of our own: registered once, unregistered when the last tensor over it is gone, torch's where that fails."""

from __future__ import annotations

import gc
import logging
import mmap
import re
from pathlib import Path
from threading import Event

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell import CacheConfig, ConfigError, Kind  # noqa: E402
from stepwell.cache.build import layouts_for  # noqa: E402
from stepwell.transfer import torch_memory  # noqa: E402
from stepwell.transfer.torch_memory import PinnedAhead, TorchMemory, pinned_bytes, touch  # noqa: E402
from toys import FULL  # noqa: E402
from waiting import PATIENCE_S  # noqa: E402

SIZE = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Cudart:
    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


def test_memory_is_registered_as_long_as_a_tensor_is_left_over_it(cudart: Cudart) -> None:
    (layout,) = layouts_for(FULL, CacheConfig(device_bytes=None, host_bytes=SIZE)).values()
    memory = TorchMemory(FULL, layout)
    assert cudart.registered == {memory.bytes_B.data_ptr(): SIZE}
    assert memory.bytes_B.data_ptr() % 4096 == 0 and not memory.bytes_B.any()
    memory.view(Kind.PREFIX, 3)[0] = 77
    assert memory.rows(Kind.PREFIX)[3][0] == 77 and memory.block[3 * layout.strides[Kind.PREFIX]] == 77
    rows = memory.rows(Kind.PREFIX)
    del memory
    gc.collect()
    assert cudart.registered and rows[3][0] == 77
    del rows
    gc.collect()
    assert not cudart.registered


def test_memory_that_cannot_be_registered_is_torchs(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart.error = 2
    asked = []

    def zeros(size_bytes: int, device: str, *, pinned: bool = False) -> torch.Tensor:
        asked.append((size_bytes, device, pinned))
        return torch.zeros(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(torch_memory, "_zeros", zeros)
    with caplog.at_level(logging.WARNING):
        assert len(pinned_bytes(SIZE)) == SIZE
    assert asked == [(SIZE, "cpu", True)] and "error 2" in caplog.text


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this system has no huge pages")
def test_huge_pages_are_asked_for(cudart: Cudart) -> None:
    memory = pinned_bytes(4 * SIZE)
    address, asked, mine = memory.data_ptr(), None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mine = int(found[1], 16) <= address < int(found[2], 16)
        elif mine and line.startswith("VmFlags:"):
            asked = "hg" in line.split()
    assert asked


def test_memory_that_is_taken_ahead_is_used_and_not_taken_twice() -> None:
    asked, go_on = [], Event()

    def pinned(size_bytes: int) -> torch.Tensor:
        asked.append(size_bytes)
        assert go_on.wait(PATIENCE_S)
        return torch.zeros(size_bytes, dtype=torch.uint8)

    (layout,) = layouts_for(FULL, CacheConfig(device_bytes=None, host_bytes=SIZE)).values()
    ahead = PinnedAhead(SIZE, pinned=pinned)  # which does not wait
    go_on.set()
    memory = TorchMemory(FULL, layout, ahead=ahead)
    assert asked == [SIZE] and len(memory.bytes_B) == layout.size_bytes <= SIZE


def test_memory_that_cannot_be_had_ahead_is_refused_where_it_is_used() -> None:
    def refused(size_bytes: int) -> torch.Tensor:
        raise RuntimeError("no memory")

    (layout,) = layouts_for(FULL, CacheConfig(device_bytes=None, host_bytes=SIZE)).values()
    with pytest.raises(ConfigError, match="no memory"):
        TorchMemory(FULL, layout, ahead=PinnedAhead(SIZE, pinned=refused))


def test_every_page_of_new_memory_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_memory, "TOUCHED_AT_ONCE", 4 * mmap.PAGESIZE)
    flat = np.full(10 * mmap.PAGESIZE, 7, np.uint8)
    touch(flat)
    assert not flat[:: mmap.PAGESIZE].any()
