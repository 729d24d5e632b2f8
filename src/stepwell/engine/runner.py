"""Runs one pass of a model over the chunks of several requests. Decides nothing.

Keeps the model, its pages, and where each request's open groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from stepwell.base.ids import LeaseId
from stepwell.engine.graphs import Graphs
from stepwell.engine.models.base import Decoder
from stepwell.engine.passes.batch import Batch, RequestRows
from stepwell.engine.passes.open_groups import OpenGroups
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.spilled import Spilled
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.request import Chunk, Request
from stepwell.jobs.executors import Arriving
from stepwell.tiers.lease import Lease, LeaseState


class Runner:
    def __init__(self, model: Decoder, pages: DevicePages) -> None:
        self.model = model
        self._pages = pages
        self._slots = Slots(OpenGroups(pages, device=model.device))
        self._steady = bool(model.steady) and model.device.type == "cuda"
        self._forward = Graphs(model).forward if self._steady else model.forward

    @property
    def spilling(self) -> SpillReport | None:
        """What came of rows that may be on the host alone; None for models whose rows do not spill."""
        return None if self._pages.spilling is None else self._pages.spilling.report()

    def on_device(self) -> AbstractContextManager[object]:
        """Kernels of libraries run on the device that is current, whatever device their tensors are on."""
        return torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext()

    @property
    def goes_ahead(self) -> bool:
        """Whether a step may begin before the host has read the tokens it goes on from."""
        return self._steady

    def follow(self, requests: Sequence[Request], token_B: torch.Tensor) -> torch.Tensor:
        """One more token of each request: the one after all it has, which only the device knows. Returns their logits."""
        segments = [self._segment(request, (0,), len(request.tokens)) for request in requests]
        batch = self._batch(segments)
        batch.tokens_N = token_B
        return self._forward(batch)

    def run(self, chunks: Sequence[Chunk], on_stream: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        """Computes the chunks, and returns logits for those that complete what their request has so far, in their order.

        One row for a request's last token, and one for each that is proposed after it. `on_stream` is given the stream of all
        tokens behind the last layer.
        """
        self._slots.sweep()
        arriving = list(dict.fromkeys(load for chunk in chunks for load in chunk.arriving))
        batch = self._batch([self._chunk(chunk) for chunk in chunks], arriving)
        if on_stream is None:
            return self._forward(batch)
        last = len(self.model.layers) - 1
        return self.model.forward(batch, lambda layer, x_NC: on_stream(x_NC) if layer == last else None)

    def look_at_host(self, lease: Lease, tokens: int) -> None:
        """Computes a request's token behind all others as if the rows of its first page were on the host alone, so that kernels
        for that are built. They need not be there, nor any other: nothing comes of it.
        """
        spilling = self._pages.spilling
        assert spilling is not None, "rows of this model do not spill"
        segment = RequestRows(
            tokens=(0,), position=tokens - 1, prefix_pages=lease.prefix_pages, window_pages=lease.window_pages,
            hot_numbers=lease.hot_numbers, num_logits=1,
        )  # fmt: skip
        batch = self._batch([segment])
        batch.prepare()
        with spilling.pretend_on_host(int(lease.prefix_pages[0])):
            batch.spilled = Spilled(batch, spilling, frozenset())
            self.model.compute(batch)

    def _batch(self, segments: Sequence[RequestRows], arriving: Sequence[Arriving] = ()) -> Batch:
        return Batch(
            segments,
            self._pages,
            device=self.model.device,
            dtype=self.model.dtype,
            open_groups=self._slots.open_groups,
            arriving=arriving,
        )

    def _chunk(self, chunk: Chunk) -> RequestRows:
        request = chunk.request
        assert request.runs or chunk.arriving, f"{request} was planned without its bytes"
        tokens = [*request.tokens[request.position : chunk.end], *chunk.proposed]
        return self._segment(request, tokens, request.position, num_logits=1 + len(chunk.proposed) if chunk.completes else 0)

    def _segment(self, request: Request, tokens: Sequence[int], position: int, *, num_logits: int = 1) -> RequestRows:
        lease = request.lease
        assert lease is not None, f"{request} was planned without a lease"
        return RequestRows(
            tokens=tokens,
            position=position,
            prefix_pages=lease.prefix_pages,
            window_pages=lease.window_pages,
            first_window=lease.first_window,
            point_page=int(lease.point_pages[0]) if len(lease.point_pages) else None,
            slot=self._slots.of(lease),
            resumes=position == lease.resume,
            num_logits=num_logits,
            hot_numbers=lease.hot_numbers,
            picks_from=0 if self.model.selector is None else request.prompt_tokens,
        )


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
