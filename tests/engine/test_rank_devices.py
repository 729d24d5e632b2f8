"""Which device each rank gets, what connects them, and how they share memory: GPUs are made up, and nothing is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepwell.base.errors import ConfigError
from stepwell.engine import EngineConfig
from stepwell.engine.building import settings
from stepwell.engine.building.settings import backend_for, check_settings, device_bytes_of, device_of, rank_devices, ranks_on_one
from stepwell.engine.ranks import Ranks

GB = 10**9


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GB, 140 * GB))


def ranked(count: int = 2, **more: Any) -> EngineConfig:
    return EngineConfig(tensor_parallel=count, host_memory="1MiB", **more)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "devices", "backend"),
    [
        ("auto", ("cuda:0", "cuda:1"), "nccl"),
        ("cuda", ("cuda:0", "cuda:1"), "nccl"),
        ("cuda:1,cuda:0", ("cuda:1", "cuda:0"), "nccl"),
        ("cuda:0,cuda:0", ("cuda:0", "cuda:0"), "gloo"),
        ("cpu", ("cpu", "cpu"), "gloo"),
    ],
)
def test_ranks_have_a_device_each_and_are_connected_by_what_can(device: str, devices: tuple[str, ...], backend: str) -> None:
    config = ranked(device=device)
    assert rank_devices(config) == devices and backend_for(devices) == backend
    assert device_of(config).split(":")[0] == devices[0].split(":")[0]


@pytest.mark.usefixtures("two_gpus")
def test_ranks_on_one_gpu_share_its_memory() -> None:
    shared, apart = ranked(device="cuda:1,cuda:1"), ranked(device="cuda")
    assert ranks_on_one(rank_devices(shared)) == 2 and ranks_on_one(rank_devices(apart)) == 1
    assert device_bytes_of(apart, "cuda") == 88 * GB and device_bytes_of(shared, "cuda:1") == 44 * GB
    assert device_bytes_of(ranked(device="cuda:1,cuda:1", device_memory="50%"), "cuda:1", free=80 * GB) == 20 * GB
    assert device_bytes_of(ranked(device="cuda:1,cuda:1", device_memory=GB), "cuda:1") == GB, "as much was asked for each"
    check_settings(ranked(device="cuda:1,cuda:1"))
    with pytest.raises(ConfigError, match=r"for each of 2 ranks does not fit: .* are free on cuda:1"):
        check_settings(ranked(device="cuda:1,cuda:1", device_memory=60 * GB))
    check_settings(ranked(device="cuda", device_memory=60 * GB))


@pytest.mark.usefixtures("two_gpus")
def test_every_gpu_must_have_room_for_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the first one's memory count for all, nor do the ranks of the fullest count for each."""
    free = {"cuda:0": 100 * GB, "cuda:1": 50 * GB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 140 * GB))
    check_settings(ranked(device="cuda"))  # by default as much as the one with least has
    check_settings(ranked(3, device="cuda:1,cuda:0,cuda:0", device_memory=45 * GB))
    with pytest.raises(ConfigError, match=r"does not fit: .* are free on cuda:1"):
        check_settings(ranked(device="cuda", device_memory=60 * GB))


@pytest.mark.parametrize("memory", ["60%", None])
def test_ranks_on_a_cpu_share_its_memory(memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "free_bytes", lambda: 4 * GB)
    alone, shared = (EngineConfig(tensor_parallel=count, device="cpu", device_memory=memory) for count in (1, 8))
    assert device_bytes_of(shared, "cpu") == device_bytes_of(alone, "cpu") // 8


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("count", "device", "says"),
    [
        (4, "cuda", "needs as many GPUs, and torch sees 2; .* as in --device cuda:0,cuda:0,cuda:0,cuda:0"),
        (2, "cuda:1", "need a device each: give --device cuda, or one for each, as in cuda:0,cuda:1; got cuda:1"),
        (2, "cuda:0,cuda:1,cuda:0", "several devices are one for each rank"),
        (1, "cuda:0,cuda:1", "several devices are one for each rank"),
        (2, "cuda:0,cuda:2", "is 'cuda:2', and torch sees 2 GPUs"),
        (2, "cpu,cuda:0", "several devices are one for each rank"),
        (2, "cuda:0,", "must be auto"),
        (2, "cuda:0,cuda:00", "must be auto"),
        (1, "cuda:", "must be auto"),
        (1, "cpu:0", "must be auto"),
    ],
)
def test_devices_that_cannot_be_are_refused_with_what_to_do(count: int, device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_settings(ranked(count, device=device))


def test_logits_that_nobody_wants_are_not_gathered() -> None:
    """Every rank knows that there are none, so none of them calls the others."""
    ranks = Ranks(rank=1, size=4)  # never connected: a call would fail
    assert ranks.all_gather(torch.zeros(0, 8)).shape == (0, 32)
    assert ranks.all_reduce(torch.zeros(0, 8)).shape == (0, 8)
    assert ranks.calls.begun == 0
