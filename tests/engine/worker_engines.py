"""Engines whose ranks are real processes, over checkpoints in folders; engines of one rank over the same; what both answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine.drafted import tensors_of
from engine.families import checkpoint, four_checkpoint, wide_checkpoint
from engine.ranked import write_checkpoint
from stepwell.base.config import PlacementConfig, PrefetchPolicy, StoreConfig
from stepwell.engine import Answer, Engine, EngineConfig, Limits
from stepwell.engine.building.build import open_and_build
from stepwell.engine.workers.worker_setup import WorkerLimits

WIDE, FOUR = "wide-", "four-"  # before a family: with heads as wide as kernels of libraries want them; for four ranks
MADE = {"": checkpoint, WIDE: wide_checkpoint, FOUR: four_checkpoint}
WIDE_MEMORY = {"device_memory": "8MiB", "host_memory": "32MiB"}
FETCHED = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
TOLERANCE = 1e-4  # of logprobs: two ranks add up in another order than one
PATIENT = WorkerLimits(silent_s=60, pass_s=300, start_s=600)  # for machines that are busy with something else


def folder_of(family: str, root: Path) -> Path:
    shape, dash, name = family.rpartition("-")
    made, folder = MADE[shape + dash](name), root / family
    if not folder.exists():
        write_checkpoint(folder, made.config, tensors_of(made))
    return folder


def open_engine(family: str, root: Path, ranks: int, **more: Any) -> Engine:
    """Pages as the family has them, of 64 tokens or (V4) 256; a checkpoint every 64 tokens where pages allow it."""
    settings: dict[str, Any] = {
        "device": "cpu", "device_memory": "2MiB", "host_memory": "8MiB", "tensor_parallel": ranks,
        "placement": PlacementConfig(interval_tokens=64), "limits": Limits(chunk_tokens=48, max_running=4),
        "store_config": StoreConfig(checkpoint_delay_s=0), "store_options": {"budget": "64MiB"} if "store" in more else {},
    } | ({"worker_limits": PATIENT} if ranks > 1 else {}) | more  # fmt: skip
    return open_and_build(str(folder_of(family, root)), EngineConfig(**settings))[1]


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


def answers(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    return [engine.generate(each, max_tokens=8, logprobs=2, ignore_eos=True) for each in prompts]


def same(ours: list[Answer], theirs: list[Answer]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        apart = max(abs(a.logprob - b.logprob) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        assert apart < TOLERANCE, f"logprobs differ by {apart}"
