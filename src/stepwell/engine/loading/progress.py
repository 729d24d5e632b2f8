"""How far the weights are read, said in the log every few seconds. Large models take minutes to load."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import prod

import torch

from stepwell.base.meters import Clock
from stepwell.engine.loading.weights import Region, TensorSource

EVERY_S = 5.0

log = logging.getLogger(__name__)


class WatchedSource:
    """Another source, whose reads are counted. Tensors that a model does not need are never read: it may end below 100 %."""

    def __init__(self, source: TensorSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._began_s = self._said_s = clock.now()
        self._read = 0  # numbers
        self._all: int | None = None  # once it is asked for

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        tensor = self._source.read(name, region)
        self._read += tensor.numel()
        now_s = self._clock.now()
        if now_s - self._said_s >= EVERY_S:
            self._said_s = now_s
            log.info("weights: %d %% read after %.0f s", 100 * self._read // self._size(), now_s - self._began_s)
        return tensor

    def _size(self) -> int:
        if self._all is None:
            self._all = sum(prod(self._source.shape(name)) for name in self._source.names())
        return max(self._all, self._read)
