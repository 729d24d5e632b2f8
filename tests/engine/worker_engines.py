"""Engines whose ranks are real processes, over checkpoints in folders; and engines of one rank over the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.drafted import tensors_of
from engine.families import checkpoint, wide_checkpoint
from engine.ranked import write_checkpoint
from stepwell.base.config import PlacementConfig, StoreConfig
from stepwell.engine import Engine, EngineConfig, Limits
from stepwell.engine.build import open_and_build
from stepwell.engine.workers.worker_setup import WorkerLimits

PAGE = 16
WIDE = "wide-"  # before a family: with heads as wide as kernels of libraries want them
WIDE_MEMORY = {"device_memory": "8MiB", "host_memory": "32MiB"}
PATIENT = WorkerLimits(silent_s=60, pass_s=300, start_s=600)  # for machines that are busy with something else


def folder_of(family: str, root: Path) -> Path:
    wide = family.removeprefix(WIDE)
    made, folder = checkpoint(family) if wide == family else wide_checkpoint(wide), root / family
    if not folder.exists():
        write_checkpoint(folder, made.config, tensors_of(made))
    return folder


def open_engine(family: str, root: Path, ranks: int, **more: Any) -> Engine:
    """Pages of 16 tokens, or what the family needs; a checkpoint every two."""
    settings: dict[str, Any] = {
        "device": "cpu", "device_memory": "2MiB", "host_memory": "8MiB", "tensor_parallel": ranks,
        "placement": PlacementConfig(interval_tokens=64), "limits": Limits(chunk_tokens=48, max_running=4),
        "store_config": StoreConfig(checkpoint_delay_s=0), "store_options": {"budget": "64MiB"} if "store" in more else {},
    } | ({"worker_limits": PATIENT} if ranks > 1 else {}) | more  # fmt: skip
    return open_and_build(str(folder_of(family, root)), EngineConfig(**settings))[1]
