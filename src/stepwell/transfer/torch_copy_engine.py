"""A copy engine over torch tensors: host memory (pinned where there is CUDA) and a device, copied on a stream of their own.

The only file of this floor that imports torch, and only when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import Plan, Purpose
from stepwell.memory.layout import ArenaLayout
from stepwell.transfer.copy_engine import Work, refusal

if TYPE_CHECKING:
    import torch


class TorchMemory:
    """A block of bytes on a torch device, cut as its arena's layout says."""

    def __init__(self, spec: ModelSpec, layout: ArenaLayout, device: str = "cpu") -> None:
        import torch

        pinned = device == "cpu" and torch.cuda.is_available()
        try:
            self._block = block = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        except (RuntimeError, OverflowError) as error:  # only some of CUDA's refusals have a class of their own
            raise refusal(layout.size_bytes, "pinned host" if pinned else device, error) from error
        self._rows = {
            kind: block[: layout.rows(kind) * stride].view(-1, stride)[:, : spec.object_bytes(kind)]
            for kind, stride in layout.strides.items()
        }

    def rows(self, kind: Kind) -> torch.Tensor:
        """All pages of a kind, `[page id][byte]`."""
        return self._rows[kind]

    @property
    def block(self) -> memoryview:
        """All of it, for stores that must know memory before they may use it. Of host memory only."""
        return memoryview(self._block.numpy())  # type: ignore[arg-type]

    def view(self, kind: Kind, page: int) -> memoryview:
        """One page's bytes, without a copy. Of host memory only."""
        return memoryview(self._rows[kind][page].numpy())  # type: ignore[arg-type]


class TorchCopyEngine:
    """Copies between torch memories. On CUDA one asynchronous copy a page, saves on one stream and the rest on another.

    `engine_stream` is where the engine's kernels run; by default the stream that is current when a plan begins.
    """

    def __init__(self, memories: Mapping[Tier, TorchMemory], *, engine_stream: torch.cuda.Stream | None = None) -> None:
        import torch

        self._memories = memories
        self._engine_stream = engine_stream
        devices = [memory.rows(Kind.PREFIX).device for memory in memories.values()]
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._streams: dict[bool, torch.cuda.Stream] = {}
        if self._device is not None:
            for saving in (False, True):
                self._streams[saving] = torch.cuda.Stream(self._device)

    def begin(self, plan: Plan) -> Work:
        if self._device is None:
            return lambda: self._copy_all(plan)
        import torch

        before = torch.cuda.Event()
        before.record(self._engine_stream or torch.cuda.current_stream(self._device))
        return lambda: self._run_on_stream(plan, before)

    def _run_on_stream(self, plan: Plan, before: torch.cuda.Event) -> None:
        """Copies after what the engine had queued, and waits for the copies alone."""
        import torch

        stream = self._streams[plan.purpose is Purpose.SAVE]
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            stream.wait_event(before)
            self._copy_all(plan)
            done.record(stream)
        done.synchronize()

    def _copy_all(self, plan: Plan) -> None:
        for copy in plan.copies:
            source = self._memories[copy.source.tier].rows(copy.source.kind)
            target = self._memories[copy.target.tier].rows(copy.target.kind)
            for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
                target[write].copy_(source[read], non_blocking=True)
