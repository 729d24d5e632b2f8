"""Runs one pass of a model over the chunks of several requests. Decides nothing.

Keeps the model, its pages, and where each request's open groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.ids import LeaseId
from stepwell.base.prompt import unpack
from stepwell.engine.graphs import Graphs
from stepwell.engine.models.base import Decoder
from stepwell.engine.passes.batch import Batch, RequestRows
from stepwell.engine.passes.open_groups import OpenGroups
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.spilled import Spilled
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.request import Chunk
from stepwell.jobs.executors import Arriving
from stepwell.tiers.lease import Lease, LeaseState

PutUnread = Callable[[torch.Tensor, Sequence[Chunk]], torch.Tensor]  # tokens of a pass, with those that only the device knows


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

    def wait(self) -> None:
        """Until the device has done everything it was given. One that broke does nothing more, and is not waited for."""
        if self.model.device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.model.device)

    @property
    def goes_ahead(self) -> bool:
        """Whether a pass may begin before the host has read what comes of the one before."""
        return self._steady

    def run(
        self, chunks: Sequence[Chunk], on_stream: Callable[[torch.Tensor], None] | None = None, *,
        put_unread: PutUnread | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Computes the chunks, and returns logits for those that complete what their request has so far, in their order.

        One row for a request's last token, and one for each that is proposed after it. `on_stream` is given the stream of all
        tokens behind the last layer. `put_unread` knows the tokens of chunks that follow a pass which nobody has read.
        """
        self._slots.sweep()
        arriving = list(dict.fromkeys(load for chunk in chunks for load in chunk.arriving))
        batch = self._batch([self._segment(chunk) for chunk in chunks], arriving)
        if put_unread is not None:
            batch.tokens_N = put_unread(batch.tokens_N, chunks)
        last = len(self.model.layers) - 1
        try:
            if on_stream is None:
                return self._forward(batch)
            return self.model.forward(batch, lambda layer, x_NC: on_stream(x_NC) if layer == last else None)
        except BaseException:
            if self._pages.spilling is not None:
                self._pages.spilling.join()  # before others get the pages that its fetches write to
            raise

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

    def _segment(self, chunk: Chunk) -> RequestRows:
        request = chunk.request
        lease = request.lease
        assert lease is not None, f"{request} was planned without a lease"
        assert lease.ready or chunk.arriving, f"{request} was planned without its bytes"
        return RequestRows(
            tokens=_tokens_of(chunk, lease),
            position=chunk.start,
            prefix_pages=lease.prefix_pages,
            window_pages=lease.window_pages,
            first_window=lease.first_window,
            point_page=int(lease.point_pages[0]) if len(lease.point_pages) else None,
            slot=self._slots.of(lease),
            resumes=chunk.start == lease.resume,
            num_logits=1 + len(chunk.proposed) if chunk.completes else 0,
            hot_numbers=lease.hot_numbers,
            picks_from=0 if self.model.selector is None else request.prompt_tokens,
        )


def _tokens_of(chunk: Chunk, lease: Lease) -> Sequence[int] | npt.NDArray[np.int32]:
    """Those of a chunk; of one that follows, something in place of the token that only the device knows."""
    if chunk.follows:
        return (0,)
    if chunk.decodes:
        return [chunk.request.tokens[-1], *chunk.proposed]
    return unpack(lease.packed)[chunk.start : chunk.end]  # a list of so many would be read one by one


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
