"""Ranks of a toy model over one host memory, with device pages of their own."""

from __future__ import annotations

from functools import cache

import numpy as np

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.spec import ModelSpec, Point, Prefix, Window
from stepwell.base.spec.states import Cut, StateSpec
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.memory.layout import lay_out
from stepwell.transfer.shard_copies import ShardCopyEngine
from stepwell.transfer.torch_memory import TorchMemory

BYTES = 1 << 18
ALIGNMENT = 512


@cache
def spec() -> ModelSpec:
    """Heads, latents that all ranks keep, a window of fewer heads than ranks, and channels that are cut in two ways."""
    cuts = (Cut(num_bytes=32, units=4), Cut(num_bytes=8, units=1), Cut(num_bytes=16, units=2))
    return ModelSpec(
        name="toy",
        page_tokens=4,
        states=(
            StateSpec(name="kv", shape=Prefix(), layers=3, row_bytes=64, dtype="fp32", shards=4),
            StateSpec(name="latent", shape=Prefix(), layers=2, row_bytes=24, dtype="fp32"),
            StateSpec(name="swa", shape=Window(tokens=4), layers=2, row_bytes=32, dtype="fp32", shards=2),
            StateSpec(name="conv", shape=Point(), layers=2, row_bytes=112, dtype="fp32", cuts=cuts),
        ),
    )


def span(tier: Tier, kind: Kind, *ids: int) -> Span:
    return Span(tier=tier, kind=kind, ids=np.array(ids, np.int32))


def run(engines: list[ShardCopyEngine], source: Span, target: Span) -> None:
    plan = Plan(job=JobId(1), purpose=Purpose.SAVE, copies=(Copy(source=source, target=target),))
    for engine in reversed(engines):  # in whatever order they come to it
        engine.begin(plan)()


class Ranks:
    """`count` ranks over one host memory, with device pages of their own."""

    def __init__(self, count: int, host: TorchMemory, device: str = "cpu") -> None:
        mine = spec().for_ranks(count)
        layout = lay_out(mine, tier=Tier.DEVICE, budget_bytes=BYTES, alignment=ALIGNMENT)
        self.devices = [TorchMemory(mine, layout, device) for _ in range(count)]
        self.engines = [ShardCopyEngine(spec(), memory, host, rank=rank, ranks=count) for rank, memory in enumerate(self.devices)]


def host_memory() -> TorchMemory:
    return TorchMemory(spec(), lay_out(spec(), tier=Tier.HOST, budget_bytes=BYTES, alignment=ALIGNMENT))
