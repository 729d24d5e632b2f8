"""Memory that cannot be had is said at the start, with what there is and what to lower; nothing half-built is left behind."""

from __future__ import annotations

import mmap
from errno import ENOMEM
from pathlib import Path

import pytest
import torch

from stepwell import CacheConfig, ConfigError, build_cache
from stepwell.base.errors import StoreError
from stepwell.cache.build import layouts_for
from stepwell.store.mooncake.client import Client
from stepwell.store.mooncake.store import MooncakeStore
from stepwell.transfer.copy_engine import free_bytes
from stepwell.transfer.torch_memory import TorchMemory
from toys import FULL, HYBRID

SMALL = 1 << 20
LAYOUT = layouts_for(FULL, CacheConfig(device_bytes=None, host_bytes=SMALL))


def refuse(number: int, size: int, **options: int) -> mmap.mmap:
    raise OSError(ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes"), [(1 << 50, None), (1 << 50, SMALL), (SMALL, 1 << 50), (SMALL, 1 << 62), (None, 1 << 70)]
)
def test_tiers_larger_than_the_machine_are_refused_with_what_there_is(device_bytes: int | None, host_bytes: int | None) -> None:
    with pytest.raises(ConfigError, match=r"take 1024\.0 TiB|take 1\.0 PiB|take .*PiB") as refusal:
        build_cache(HYBRID, CacheConfig(device_bytes=device_bytes, host_bytes=host_bytes))
    assert "free" in str(refusal.value) and "lower device_bytes or host_bytes" in str(refusal.value)


def test_memory_that_the_system_refuses_is_no_raw_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.transfer.copy_engine.mmap.mmap", refuse)
    with pytest.raises(ConfigError, match=r"1\.0 MiB .*Cannot allocate memory.* are free.*device_bytes or host_bytes"):
        build_cache(FULL, CacheConfig(device_bytes=SMALL, host_bytes=SMALL))


def test_torch_memory_that_cannot_be_had_is_no_raw_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (layout,) = LAYOUT.values()

    def no_room(*size: int, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB\nand a long story")

    monkeypatch.setattr(torch, "zeros", no_room)
    monkeypatch.setattr("stepwell.transfer.torch_memory.mmap.mmap", refuse)
    with pytest.raises(ConfigError, match=r"1\.0 MiB .*cuda:0.*CUDA out of memory.*device_bytes") as refusal:
        TorchMemory(FULL, layout, "cuda:0")
    assert "long story" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"1\.0 MiB .*(cpu|pinned host memory).*host_bytes"):
        TorchMemory(FULL, layout)


def test_a_real_torch_refusal_is_said_too() -> None:
    (layout,) = layouts_for(FULL, CacheConfig(device_bytes=None, host_bytes=1 << 60)).values()
    with pytest.raises(ConfigError, match=r"PiB"):
        TorchMemory(FULL, layout)


def machine(root: Path, available_kb: int, **group: str) -> Path:
    for path, text in (
        ("proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:   {available_kb} kB\n"),
        *((f"sys/fs/cgroup/memory.{name}", text) for name, text in group.items()),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    assert free_bytes(machine(tmp_path / "bare", 1000)) == 1000 * 1024
    assert free_bytes(machine(tmp_path / "unlimited", 1000, max="max\n", current="5\n")) == 1000 * 1024
    limited = machine(tmp_path / "limited", 1000, max="500000\n", current="300000\n", stat="anon 1\ninactive_file 100000\n")
    assert free_bytes(limited) == 300_000, "cached files count as free"
    assert free_bytes(machine(tmp_path / "over", 1000, max="5\n", current="7\n")) == 0
    assert free_bytes(machine(tmp_path / "loose", 1, max="500000\n", current="3\n")) == 1024
    assert free_bytes(tmp_path / "nothing known") > 0


def test_staging_that_cannot_be_had_leaves_no_client_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raw:
        closed = False

        def close(self) -> None:
            self.closed = True

    raw = Raw()
    monkeypatch.setattr("stepwell.store.mooncake.lanes.mmap.mmap", refuse)
    with pytest.raises(StoreError, match="staging_bytes"):
        MooncakeStore(lambda: Client(raw, list, address="nowhere:0"), staging_bytes=1 << 50)
    assert raw.closed
