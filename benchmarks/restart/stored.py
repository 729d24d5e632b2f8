"""What a long prompt of DeepSeek-V4-Flash's shape takes in memory and on disk. Nothing is computed: the bytes are only moved."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from stepwell import CacheConfig, ModelSpec, Tier, build_cache
from stepwell.base.config import PlacementConfig, StoreConfig
from stepwell.base.ids import CACHED_KINDS
from stepwell.base.spec.families import from_config
from stepwell.base.spec.presets import preset
from stepwell.cache.build import layouts_for, numpy_memories
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.scheduling.footprint import footprint
from stepwell.jobs.executors import ThreadCopyExecutor
from stepwell.store.log.store import LogStore
from stepwell.store.registry import open_store
from stepwell.transfer.copy_engine import NumpyCopyEngine

GOAL_BYTES = 4.2e9
TOKENS, INTERVAL = 131_072, 8_192
MEMORY_BYTES = 768 << 20


def stored_bytes(directory: Path) -> list[dict[str, Any]]:
    """One row for each way of laying V4-Flash's layers out that is written of."""
    import transformers

    by_default = transformers.AutoConfig.for_model("deepseek_v4").to_dict()
    specs = {
        "as transformers has them (20 C4, 23 C128)": from_config(by_default, kv_dtype="fp8", model_dtype="bf16"),
        "as the preset has them (2 windows, 21 C4, 20 C128)": preset("deepseek-v4-flash", kv_dtype="fp8"),
    }
    return [{"layers": name, **_measure(spec, directory / f"v4-{at}")} for at, (name, spec) in enumerate(specs.items())]


def _measure(spec: ModelSpec, directory: Path) -> dict[str, Any]:
    config = CacheConfig(
        device_bytes=MEMORY_BYTES,
        host_bytes=MEMORY_BYTES,
        placement=PlacementConfig(interval_tokens=INTERVAL),
    )
    memories = numpy_memories(spec, layouts_for(spec, config))
    measured = footprint(DevicePages(spec, {kind: torch.from_numpy(memories[Tier.DEVICE].rows(kind)) for kind in CACHED_KINDS}))
    cache = build_cache(
        spec, config, executor=ThreadCopyExecutor([NumpyCopyEngine(memories)]), model="bytes", host_pages=[memories[Tier.HOST]]
    )
    store = open_store(f"log:{directory}", options={"budget": "2GiB"})
    assert isinstance(store, LogStore)
    cache.store.attach(store, StoreConfig(checkpoint_delay_s=0))
    random = Random(0)
    prompt = [random.randrange(100_000) for _ in range(TOKENS + 1)]  # one is always computed: the last boundary is at TOKENS
    with cache.acquire(cache.lookup(prompt)) as lease:
        while lease.position < len(prompt):
            upto = min(cache.next_stop(lease) or len(prompt), len(prompt))
            cache.grow(lease, upto)
            cache.commit(lease, upto)
            _settle(cache)
    _settle(cache)
    taken = store.stat().disk_bytes  # of values, with what fills up their last blocks
    cache.close()
    store.close()
    return {
        "tokens": TOKENS,
        "bytes_per_token": float(measured.bytes_per_token),
        "spec_bytes_per_token": float(spec.bytes_per_token),
        "checkpoint_bytes": measured.checkpoint_bytes,
        "spec_checkpoint_bytes": spec.checkpoint_bytes(),
        "stored_per_million": taken / TOKENS * 1e6,
    }


def _settle(cache: Any) -> None:
    while (report := cache.step()).running or report.storing:
        time.sleep(0.001)
