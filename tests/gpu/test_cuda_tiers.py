"""A device tier in CUDA memory and a host tier in pinned memory, over a directory: what comes back is what was saved."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from not_run import NO_CUDA
from stepwell import (
    CacheConfig,
    Kind,
    Lease,
    ModelSpec,
    PlacementConfig,
    Point,
    Prefix,
    Sources,
    StateSpec,
    Tier,
    Window,
    build_cache,
    open_store,
)  # fmt: skip
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.cache.build import layouts_for
from stepwell.cache.facade import Cache
from waiting import settle, step_until

torch = pytest.importorskip("torch")

from stepwell.transfer.torch_copy_engine import TorchCopyEngine  # noqa: E402
from stepwell.transfer.torch_memory import TorchMemory  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]),
]

SPEC = ModelSpec(
    name="cuda-toy",
    page_tokens=16,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=4, row_bytes=1024, dtype="u8"),
        StateSpec(name="swa", shape=Window(tokens=24), layers=2, row_bytes=256, dtype="u8"),
        StateSpec(name="ssm", shape=Point(), layers=3, row_bytes=5000, dtype="u8"),
    ),
)
CONFIG = CacheConfig(
    device_bytes=4 << 20,
    host_bytes=32 << 20,
    placement=PlacementConfig(interval_tokens=64, decode_interval_tokens=0),
)
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)  # always worth it


def ready(cache: Cache, lease: Lease) -> None:
    step_until(cache, lambda: lease.ready or lease.failed)
    assert lease.ready, lease


def random_bytes(memory: TorchMemory, kind: Kind, ids: np.ndarray, seed: int) -> torch.Tensor:
    """Writes random bytes into pages, as an engine on its own stream would, and returns them."""
    rows = memory.rows(kind)
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (len(ids), rows.shape[1]), dtype=torch.uint8, generator=generator)
    rows[torch.from_numpy(ids.astype(np.int64)).to(rows.device)] = content.to(rows.device)
    if rows.is_cuda:
        torch.cuda.synchronize()
    return content


def read(memory: TorchMemory, kind: Kind, ids: np.ndarray) -> torch.Tensor:
    rows = memory.rows(kind)
    return rows[torch.from_numpy(ids.astype(np.int64)).to(rows.device)].cpu()


PROMPTS = [np.arange(129, dtype=np.int32) + 1000 * i for i in range(20)]  # more than the device holds
Saved = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def build(device: str, model: str = "random bytes") -> tuple[Cache, TorchMemory]:
    layouts = layouts_for(SPEC, CONFIG)
    memories = {tier: TorchMemory(SPEC, layout, device if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()}
    cache = build_cache(SPEC, CONFIG, copy_engines=[TorchCopyEngine(memories)], model=model, host_pages=[memories[Tier.HOST]])
    return cache, memories[Tier.DEVICE]


def compute_all(cache: Cache, on_device: TorchMemory) -> Saved:
    """Serves every prompt with random bytes for what a model would leave; returns the last of them."""
    saved = []
    for seed, prompt in enumerate(PROMPTS):
        with cache.acquire(cache.lookup(prompt)) as lease:
            ready(cache, lease)
            for stop in lease.stops:
                cache.grow(lease, stop)
                prefix = random_bytes(on_device, Kind.PREFIX, lease.prefix_pages[lease.position // 16 : stop // 16], seed)
                windows = random_bytes(on_device, Kind.WINDOW, lease.window_pages, seed + 100)
                point = random_bytes(on_device, Kind.POINT, lease.point_pages, seed + 200)
                cache.commit(lease, stop)
                ready(cache, lease)
            saved.append((prefix, windows[-2:], point))
        settle(cache)
    return saved


def resume_all(cache: Cache, on_device: TorchMemory, saved: Saved) -> Sources:
    """Serves every prompt again and compares what it resumes from; says where it came from in all."""
    total = np.zeros(3, int)
    for prompt, (prefix, windows, point) in zip(PROMPTS, saved, strict=True):
        ticket = cache.prefetch(cache.lookup(prompt))
        step_until(cache, lambda: ticket.ready)  # noqa: B023 - called at once
        with cache.acquire(cache.lookup(prompt), ticket=ticket) as lease:
            ready(cache, lease)
            assert lease.resume == 128
            total += lease.sources.device, lease.sources.host, lease.sources.store
            assert torch.equal(read(on_device, Kind.PREFIX, lease.prefix_pages[4:8]), prefix)
            assert torch.equal(read(on_device, Kind.WINDOW, lease.window_pages), windows)
            assert torch.equal(read(on_device, Kind.POINT, lease.point_pages), point)
        settle(cache)
    cache.audit()
    return Sources(device=int(total[0]), host=int(total[1]), store=int(total[2]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_evicted_to_the_host_comes_back_byte_for_byte(device: str) -> None:
    cache, on_device = build(device)
    saved = compute_all(cache, on_device)
    assert cache.counters["evicted_device_pages"] > 0
    assert resume_all(cache, on_device, saved).host > 0
    cache.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_cache_over_the_same_directory_has_every_byte(device: str, tmp_path: Path) -> None:
    with closing(open_store(f"log:{tmp_path}", options={"budget": "64MiB"})) as store:
        cache, on_device = build(device)
        cache.store.attach(store, WAIT)
        saved = compute_all(cache, on_device)
        cache.close()
    with closing(open_store(f"log:{tmp_path}")) as store:
        cache, on_device = build(device)
        cache.store.attach(store, WAIT)
        assert resume_all(cache, on_device, saved).store == 128 * len(PROMPTS)
        cache.close()
