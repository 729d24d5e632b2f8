"""A simulated device queue: passes are queued, and computed as late as possible, when the engine reads one of them.

    host     queue 0   queue 1   read 0   queue 2   read 1            what `LateDevice.log` has, in this order
    device                       (0)                (1)               computed here, and not before

So a pass that is queued before its predecessor is read cannot depend on its result, and no code can have looked at its output
before it is read. Copies between memories are not queued: they take what is there. For engines on a CPU, without requests for
logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from stepwell.engine import Engine
from stepwell.engine.ops.drawing import Draw, pick
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.to_host import HostCopy
from stepwell.engine.passes.batch import Batch
from stepwell.engine.requests.request import Chunk
from stepwell.engine.running.unread import Unread

NOTHING_YET = -7  # in place of tokens that are not computed yet


class LateDevice:
    """In place of an engine's own device, which reads one pass later from now on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []  # "queue" or "read", and the number of the pass
        self.passes: list[list[Chunk]] = []
        self._work: list[list[Callable[[], object]]] = []  # of each pass, in order
        self._places: list[tuple[int, torch.Tensor]] = []  # tokens of the next pass, and where they are found once it is computed
        self._vocab, self._forward, self._run = engine.vocab_size, engine._runner._forward, engine._runner.run
        engine.passing.reads_later = True
        engine._runner._forward = self._queue
        monkeypatch.setattr(engine._runner, "run", self._noted)
        monkeypatch.setattr(engine._runner, "start", partial(self._start, engine))
        monkeypatch.setattr(Unread, "put_into", lambda before, token_N, chunks: self._put_into(before, token_N, chunks))

    def read_late(self) -> list[int]:
        """The passes that were read after the next one was queued."""
        reads = {number: at for at, (kind, number) in enumerate(self.log) if kind == "read"}
        return [number for number, at in reads.items() if ("queue", number + 1) in self.log[:at]]

    def compute_upto(self, number: int) -> None:
        self.log.append(("read", number))
        for work in self._work[: number + 1]:
            while work:
                work.pop(0)()

    def _start(self, engine: Engine, chunks: Sequence[Chunk], before: Unread | None) -> Unread:
        logits = engine._runner.run(chunks, put_unread=None if before is None else before.put_into)
        return Unread.of(chunks, logits, Kernels(pick=self._pick, to_host=self._to_host))

    def _noted(self, chunks: Sequence[Chunk], **more: Any) -> torch.Tensor:
        self.passes.append([*chunks])
        return self._run(chunks, **more)

    def _put_into(self, before: Unread, token_N: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        follow = [(at, before.rows[chunk.request.id]) for at, chunk in enumerate(chunks) if chunk.follows]
        self._places = [(at, before.token_B[row : row + 1]) for at, row in follow]
        return token_N

    def _queue(self, batch: Batch) -> torch.Tensor:
        places, self._places = self._places, []
        logits_BV = torch.full((len(batch.wanted), self._vocab), torch.nan)

        def compute() -> None:
            for at, token_1 in places:
                assert int(token_1) != NOTHING_YET, "a pass was computed before the one it goes on from"
                batch.tokens_N[at] = int(token_1.clamp_min(0))
            logits_BV.copy_(self._forward(batch))

        self.log.append(("queue", len(self._work)))
        self._work.append([compute, batch.copy_points])
        batch.copy_points = lambda: None  # type: ignore[method-assign]
        return logits_BV

    def _pick(self, logits_BV: torch.Tensor, draws: Sequence[Draw | None]) -> torch.Tensor:
        token_B = torch.full((len(logits_BV),), NOTHING_YET)
        self._work[-1].append(lambda: token_B.copy_(pick(logits_BV, draws)))
        return token_B

    def _to_host(self, numbers_N: torch.Tensor) -> HostCopy:
        return _LateRead(self, len(self._work) - 1, numbers_N)


class _LateRead(HostCopy):
    def __init__(self, device: LateDevice, number: int, numbers_N: torch.Tensor) -> None:
        super().__init__(numbers_N, numbers_N.device)
        self._device, self._number = device, number

    def read(self) -> list[int]:
        self._device.compute_upto(self._number)
        return super().read()
