"""Runs one pass of a model over the chunks of several requests. Decides nothing; keeps nothing but the model and its pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepwell.engine.batch import Batch, Segment
from stepwell.engine.models.base import Decoder
from stepwell.engine.pages import DevicePages
from stepwell.engine.scheduler import Chunk


class Runner:
    def __init__(self, model: Decoder, pages: DevicePages) -> None:
        self.model = model
        self._pages = pages

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Computes the chunks, and returns logits for those that complete what their request has so far, in their order."""
        segments = [_segment(chunk) for chunk in chunks]
        return self.model.forward(Batch(segments, self._pages, device=self.model.device, dtype=self.model.dtype))


def _segment(chunk: Chunk) -> Segment:
    request, lease = chunk.request, chunk.request.lease
    assert lease is not None and lease.ready, f"{request} was planned without its bytes"
    return Segment(
        tokens=request.tokens[lease.position : chunk.end],
        position=lease.position,
        prefix_pages=lease.prefix_pages,
        window_pages=lease.window_pages,
        first_window=lease.first_window,
        point_page=int(lease.point_pages[0]) if len(lease.point_pages) else None,
        wants_logits=chunk.completes,
    )
