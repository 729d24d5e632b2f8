"""Pages between host memory and tensors beside the model: what a plan names on the engine's side are pages that are staged here.

Copies run where they are asked for and have ended when that returns. On CUDA they go to and from pinned memory, one page a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import NO_PAGES, Copy, PageIds, Plan
from stepwell.tiers.external import EnginePages
from stepwell.transfer.copy_engine import Work
from stepwell.transfer.torch_memory import TorchMemory

Staged = Mapping[Kind, torch.Tensor]  # `[B, N, byte]`: N pages of a kind for each of B prompts


class StagedCopyEngine:
    """The copy engine of one rank: host memory, and the pages that are staged at the moment."""

    def __init__(self, host: TorchMemory) -> None:
        self._host = host
        self._staged: dict[Kind, torch.Tensor] = {}

    @contextmanager
    def staging(self, staged: Staged) -> Iterator[None]:
        """Plans that begin meanwhile are about these pages: page `n` of prompt `b` is called `b * N + n`."""
        self._staged = {kind: pages_BNX.flatten(0, 1) for kind, pages_BNX in staged.items()}
        try:
            yield
        finally:
            self._staged = {}

    def begin(self, plan: Plan) -> Work:
        return partial(self._run, plan)

    def _run(self, plan: Plan) -> None:
        for copy in plan.copies:
            if len(copy.source.ids):
                self._copy(copy)
        devices = {pages.device for pages in self._staged.values() if pages.device.type == "cuda"}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _copy(self, copy: Copy) -> None:
        source, target = (self._pages(span.tier, span.kind) for span in (copy.source, copy.target))
        for ids, pages in ((copy.source.ids, source), (copy.target.ids, target)):
            if ids.min() < 0 or ids.max() >= len(pages):
                raise IndexError(f"pages {ids.min()} to {ids.max()} were named, and there are {len(pages)}")
        for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
            target[write].copy_(source[read], non_blocking=True)

    def _pages(self, tier: Tier, kind: Kind) -> torch.Tensor:
        return self._staged[kind] if tier is Tier.ENGINE else self._host.rows(kind)


def names(staged: Staged, prompt: int, *, first_page: int = 0) -> EnginePages:
    """What one prompt's staged pages are called. Those before `first_page` are not staged."""
    found = {kind: _names(pages_BNX, prompt) for kind, pages_BNX in staged.items()}
    return EnginePages(
        prefix=found.get(Kind.PREFIX, NO_PAGES),
        windows=found.get(Kind.WINDOW, NO_PAGES),
        points=found.get(Kind.POINT, NO_PAGES),
        first_page=first_page,
    )


def _names(pages_BNX: torch.Tensor, prompt: int) -> PageIds:
    count = pages_BNX.shape[1]
    return np.arange(prompt * count, (prompt + 1) * count, dtype=np.int32)
