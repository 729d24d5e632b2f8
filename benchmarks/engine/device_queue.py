"""What an engine's host does beside its device: when passes are queued, and when the host has seen their ends.

    device   | pass 1 |  waits  | pass 2 |               pass 2 was queued after pass 1 was read
    device   | pass 1 | pass 2 |                         pass 2 was queued before

`Watched` notes both on any engine. `FakeDevice` puts a device of its own in place of the model: passes that take a while, one
behind the other, and compute nothing. So the host's share can be measured without a GPU. Both are for measurements alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from stepwell.engine import Engine
from stepwell.engine.ops.to_host import HostCopy, ToHost
from stepwell.engine.passes.batch import Batch

Forward = Callable[[Batch], torch.Tensor]


@dataclass(slots=True)
class Pass:
    """One pass: whether it has prompts, when it was queued, and when the host had read what came of it (0: not yet)."""

    prompts: bool
    queued_s: float
    read_s: float = 0.0


@dataclass(slots=True)
class Waits:
    """How long the device had nothing queued between passes that have prompts, as far as the host can tell."""

    passes: int = 0
    waited_s: float = 0.0
    queued_before_read: int = 0


@dataclass(slots=True)
class Watched:
    """An engine whose passes are noted. `forget` begins anew."""

    passes: list[Pass] = field(default_factory=list)

    @classmethod
    def over(cls, engine: Engine) -> Watched:
        made = cls()
        hook(engine, made._forward(engine._runner._forward), made._to_host(engine._runner.model.kernels.to_host))
        return made

    def forget(self) -> None:
        self.passes.clear()

    def waits(self) -> Waits:
        """Of all pairs of passes of which both have prompts, or the first one has."""
        found = Waits()
        for one, other in zip(self.passes, self.passes[1:], strict=False):
            if one.prompts and one.read_s:
                found.passes += 1
                found.waited_s += max(other.queued_s - one.read_s, 0.0)
                found.queued_before_read += other.queued_s < one.read_s
        return found

    def _forward(self, forward: Forward) -> Forward:
        def noted(batch: Batch) -> torch.Tensor:
            self.passes.append(Pass(batch.num_singles < len(batch.segments), time.perf_counter()))
            return forward(batch)

        return noted

    def _to_host(self, to_host: ToHost) -> ToHost:
        return lambda numbers_N: _NotedCopy(to_host(numbers_N), self.passes[-1])


class _NotedCopy:
    """Numbers on their way to the host, and the pass they are of."""

    def __init__(self, copy: HostCopy, of: Pass) -> None:
        self._copy, self._of = copy, of

    def read(self) -> list[int]:
        numbers = self._copy.read()
        self._of.read_s = time.perf_counter()
        return numbers


class FakeDevice:
    """Passes that take `pass_s` each with prompts, and `step_s` without, one behind the other. Every token is 0."""

    def __init__(self, engine: Engine, *, pass_s: float, step_s: float) -> None:
        self._pass_s, self._step_s = pass_s, step_s
        self._ends_s = 0.0  # when all that was queued is done
        self._vocab = engine.vocab_size
        engine.passing.reads_later = True  # as on CUDA
        hook(engine, self._forward, self._to_host)

    def _forward(self, batch: Batch) -> torch.Tensor:
        batch.paging(None)  # the numbers that every model's pass brings to the device
        prompts = batch.num_singles < len(batch.segments)
        self._ends_s = max(time.perf_counter(), self._ends_s) + (self._pass_s if prompts else self._step_s)
        return torch.zeros(len(batch.wanted), self._vocab)

    def _to_host(self, numbers_N: torch.Tensor) -> HostCopy:
        return _LateCopy(numbers_N, self._ends_s)


class _LateCopy(HostCopy):
    def __init__(self, numbers_N: torch.Tensor, there_s: float) -> None:
        super().__init__(numbers_N, numbers_N.device)
        self._there_s = there_s

    def read(self) -> list[int]:
        while (left_s := self._there_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return super().read()


def hook(engine: Engine, forward: Forward, to_host: Callable[[torch.Tensor], object]) -> None:
    """Puts these in place of what an engine computes with, and of what brings its tokens to the host."""
    engine._runner._forward = forward
    model = engine._runner.model
    engine._runner.model = replace(model, kernels=replace(model.kernels, to_host=to_host))  # type: ignore[arg-type]
