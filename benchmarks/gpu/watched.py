"""When passes are queued, and when the host has read what they computed: how long the device has nothing queued.

device   | pass 1 |  waits  | pass 2 |               pass 2 was queued after pass 1 was read
device   | pass 1 | pass 2 |                         pass 2 was queued before
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from stepwell.engine import Engine
from stepwell.engine.ops.to_host import HostCopy, ToHost
from stepwell.engine.passes.batch import Batch

Forward = Callable[[Batch], torch.Tensor]


@dataclass(slots=True)
class Pass:
    """Whether it has prompts, when it was queued, and when the host had read its tokens (0: not yet)."""

    prompts: bool
    queued_s: float
    read_s: float = 0.0


class Watched:
    """Notes the passes of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.passes: list[Pass] = []
        runner = engine._runner
        runner._forward = self._forward(runner._forward)
        kernels = replace(runner.model.kernels, to_host=self._to_host(runner.model.kernels.to_host))  # type: ignore[arg-type]
        runner.model = replace(runner.model, kernels=kernels)

    def waited_s(self) -> float:
        """How long the device had nothing queued after passes with prompts, as seen by the host."""
        pairs = zip(self.passes, self.passes[1:], strict=False)
        return sum(max(other.queued_s - one.read_s, 0.0) for one, other in pairs if one.prompts and one.read_s)

    def _forward(self, forward: Forward) -> Forward:
        def noted(batch: Batch) -> torch.Tensor:
            self.passes.append(Pass(batch.num_singles < len(batch.segments), time.perf_counter()))
            return forward(batch)

        return noted

    def _to_host(self, to_host: ToHost) -> Callable[[torch.Tensor], _NotedCopy]:
        return lambda numbers_N: _NotedCopy(to_host(numbers_N), self.passes[-1])


class _NotedCopy:
    """Numbers on their way to the host, and the pass that computed them."""

    def __init__(self, copy: HostCopy, of: Pass) -> None:
        self._copy, self._of = copy, of

    def read(self) -> list[int]:
        numbers = self._copy.read()
        self._of.read_s = time.perf_counter()
        return numbers
