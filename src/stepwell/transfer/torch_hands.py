"""Hands over torch tensors: host memory (pinned where there is CUDA) and a device, copied on a stream of their own.

The only file of this floor that imports torch, and only when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from stepwell.base.ids import Kind, Tier
from stepwell.base.plan import Copy, Plan
from stepwell.base.spec import ModelSpec
from stepwell.memory.layout import ArenaLayout

if TYPE_CHECKING:
    import torch


class TorchMemory:
    """A block of bytes on a torch device, cut as its arena's layout says."""

    def __init__(self, spec: ModelSpec, layout: ArenaLayout, device: str = "cpu") -> None:
        import torch

        pinned = device == "cpu" and torch.cuda.is_available()
        block = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._rows = {
            kind: block[: layout.rows(kind) * stride].view(-1, stride)[:, : spec.object_bytes(kind)]
            for kind, stride in layout.strides.items()
        }

    def rows(self, kind: Kind) -> torch.Tensor:
        """All pages of a kind, `[page id][byte]`."""
        return self._rows[kind]


class TorchHands:
    """Copies between torch memories; on CUDA one asynchronous copy a page, all on one side stream."""

    def __init__(self, memories: Mapping[Tier, TorchMemory]) -> None:
        import torch

        self._memories = memories
        on_cuda = any(memory.rows(Kind.PREFIX).is_cuda for memory in memories.values())
        self._stream = torch.cuda.Stream() if on_cuda else None  # type: ignore[no-untyped-call]

    def run(self, plan: Plan) -> None:
        import torch

        stream = self._stream
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for copy in plan.copies:
                self._copy(copy)
        if stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
            done.synchronize()

    def _copy(self, copy: Copy) -> None:
        source = self._memories[copy.source.tier].rows(copy.source.kind)
        target = self._memories[copy.target.tier].rows(copy.target.kind)
        for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
            target[write].copy_(source[read], non_blocking=True)
