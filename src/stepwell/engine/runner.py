"""Runs one pass of a model over the chunks of several requests. Decides nothing.

Keeps the model, its pages, and where each request's open groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stepwell.base.ids import LeaseId
from stepwell.engine.graphs import Graphs
from stepwell.engine.models.base import Decoder
from stepwell.engine.passes.batch import Batch, RequestRows
from stepwell.engine.passes.open_groups import OpenGroups
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.request import Chunk
from stepwell.tiers.lease import Lease, LeaseState


class Runner:
    def __init__(self, model: Decoder, pages: DevicePages) -> None:
        self.model = model
        self._pages = pages
        self._slots = Slots(OpenGroups(pages, device=model.device))
        self._forward = Graphs(model).forward if model.steady and model.device.type == "cuda" else model.forward

    def run(self, chunks: Sequence[Chunk], on_stream: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Computes the chunks, and returns logits for those that complete what their request has so far, in their order.

        One row for a request's last token, and one for each that is proposed after it. `on_stream` is given the stream of all
        tokens behind the last layer.
        """
        self._slots.sweep()
        segments = [_segment(chunk, self._slots) for chunk in chunks]
        batch = Batch(
            segments,
            self._pages,
            device=self.model.device,
            dtype=self.model.dtype,
            open_groups=self._slots.open_groups,
        )
        if on_stream is None:
            return self._forward(batch)
        last = len(self.model.layers) - 1
        return self.model.forward(batch, lambda layer, x_NC: on_stream(x_NC) if layer == last else None)


class Slots:
    """A slot of open groups for every lease that computes, until it is closed; none for models that leave no groups open."""

    def __init__(self, open_groups: OpenGroups) -> None:
        self.open_groups = open_groups
        self._held: dict[LeaseId, tuple[Lease, int]] = {}

    def of(self, lease: Lease) -> int | None:
        if not self.open_groups.needed:
            return None
        if lease.id not in self._held:
            self._held[lease.id] = lease, self.open_groups.take()
        return self._held[lease.id][1]

    def sweep(self) -> None:
        """Takes back the slots of leases that were closed."""
        for lease, slot in list(self._held.values()):
            if lease.state is LeaseState.CLOSED:
                del self._held[lease.id]
                self.open_groups.give_back(slot)


def _segment(chunk: Chunk, slots: Slots) -> RequestRows:
    request, lease = chunk.request, chunk.request.lease
    assert lease is not None and lease.ready, f"{request} was planned without its bytes"
    return RequestRows(
        tokens=[*request.tokens[lease.position : chunk.end], *chunk.proposed],
        position=lease.position,
        prefix_pages=lease.prefix_pages,
        window_pages=lease.window_pages,
        first_window=lease.first_window,
        point_page=int(lease.point_pages[0]) if len(lease.point_pages) else None,
        slot=slots.of(lease),
        resumes=lease.position == lease.resume,
        num_logits=1 + len(chunk.proposed) if chunk.completes else 0,
    )
