"""Runs one pass of a model over the chunks of several requests. Decides nothing.

Keeps the model, its pages, and the slots of open groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.errors import NoRoom, StepwellError
from stepwell.base.ids import LeaseId
from stepwell.base.prompt import unpack
from stepwell.cache.facade import Cache
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.models.base import Decoder
from stepwell.engine.ops.guarded import Report
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.open_groups import OpenGroups
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.passes.spilled import Spilled
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.requests.request import Chunk
from stepwell.engine.running.graphs import Graphs
from stepwell.engine.running.unread import Unread
from stepwell.engine.sampling.choices import Choices, WaitForChoices, choosing_for, try_every_cut
from stepwell.jobs.executors import Arriving
from stepwell.tiers.lease import Lease, LeaseState

RANK_LOST = "the answer was lost with rank "  # and its number: the begin of an error that clients may read

PutUnread = Callable[[torch.Tensor, Sequence[Chunk]], torch.Tensor]  # tokens of a pass, with those that only the device knows


class PassesLost(StepwellError):
    """The ranks that run passes are gone, and with them the content of the device. The message names the rank and the cause."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class PassFailed(StepwellError):
    """One pass failed on ranks that can continue with the next. The message names the rank and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """What an engine has to know about the model that its passes run."""

    vocab_size: int
    on_cuda: bool
    selector: Selector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReport:
    """The state of ranks in processes of their own."""

    state: str  # starting, running or down
    pids: tuple[int, ...]  # by rank; none while they are down
    losses: int  # how often they were lost
    last_loss: str | None  # which rank was lost last, and why


class Passes(Protocol):
    """What runs passes for an engine: a model in this process (`Runner`), or ranks in others (`workers/ranked_runner.py`)."""

    @property
    def facts(self) -> Facts: ...

    @property
    def kernels(self) -> Report:
        """What runs each operation, for people."""
        ...

    @property
    def spilling(self) -> SpillReport | None: ...

    @property
    def ranks(self) -> RanksReport | None: ...

    def on_device(self) -> AbstractContextManager[object]: ...

    def wait(self) -> None:
        """Waits until no pass in flight writes to pages any more."""
        ...

    def drop_graphs(self) -> bool:
        """After a pass that ran out of memory: frees captured graphs. False if there are none, and nothing would be gained."""
        ...

    def poll(self) -> bool:
        """Before each step: whether passes can run now. Raises PassesLost once for each loss; `end` follows."""
        ...

    def choose(self, chunks: Sequence[Chunk]) -> WaitForChoices:
        """Computes the chunks, and chooses the tokens that follow."""
        ...

    def warm_up(self, cache: Cache, max_alone: int) -> None:
        """Builds kernels that the first requests would wait for."""
        ...

    def end(self) -> None:
        """After PassesLost: ends what remains of them. Raises RuntimeError if something does not end."""
        ...

    def restart(self) -> bool:
        """After `end`, once the content of the device was dropped: starts new ranks without waiting; returns whether it does."""
        ...

    def close(self) -> None: ...


class SlotSource(Protocol):
    """Where slots come from: memory of a model in this process, or only their numbers."""

    @property
    def needed(self) -> bool: ...

    def take(self) -> int: ...

    def give_back(self, slot: int) -> None: ...


class Runner:
    def __init__(self, model: Decoder, pages: DevicePages) -> None:
        self.model = model
        self._pages = pages
        self._open_groups = OpenGroups(pages, device=model.device)
        self._slots = Slots(self._open_groups)
        self._steady = bool(model.graph_windows) and model.device.type == "cuda"
        self._graphs = Graphs(model) if self._steady else None
        self._forward = model.forward if self._graphs is None else self._graphs.forward

    @property
    def facts(self) -> Facts:
        model = self.model
        return Facts(vocab_size=model.vocab_size, on_cuda=model.device.type == "cuda", selector=model.selector)

    @property
    def kernels(self) -> Report:
        return self.model.kernels.report

    @property
    def ranks(self) -> RanksReport | None:
        return None

    @property
    def spilling(self) -> SpillReport | None:
        """What happened to rows that may be on the host alone; None for models whose rows do not spill."""
        return None if self._pages.spilling is None else self._pages.spilling.report()

    def on_device(self) -> AbstractContextManager[object]:
        """Kernels of libraries run on the current device, whatever device their tensors are on."""
        return torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext()

    def wait(self) -> None:
        """Waits until the device has done all queued work. A device that failed does nothing more, and is not waited for."""
        if self.model.device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.model.device)

    def drop_graphs(self) -> bool:
        self.wait()
        return self._graphs is not None and self._graphs.drop()

    @property
    def goes_ahead(self) -> bool:
        """Whether a pass may begin before the host has read the result of the previous one."""
        return self._steady

    def poll(self) -> bool:
        """Also switches passes to kernels that were compiled meanwhile, and drops graphs captured with others."""
        if self.model.kernels.settle() and self._graphs is not None:
            self.wait()
            self._graphs.clear()
        return True

    def end(self) -> None:
        raise AssertionError("passes in this process are not lost without it")

    def restart(self) -> bool:
        raise AssertionError("passes in this process are not lost without it")

    def close(self) -> None:
        if self.model.kernels.compiling is not None:
            self.model.kernels.compiling.close()

    def choose(self, chunks: Sequence[Chunk]) -> WaitForChoices:
        return self.choices(chunks, self.run(chunks))

    def choices(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> WaitForChoices:
        """Tokens for the chunks of a pass; waits for them."""
        return partial(Choices, logits, choosing_for(chunks), self.model.kernels)

    def start(self, chunks: Sequence[Chunk], before: Unread | None) -> Unread:
        """A pass that is read after the next one was started. `before` is the one in flight."""
        logits = self.run(chunks, put_unread=None if before is None else before.put_into)
        return Unread.of(chunks, logits, self.model.kernels)

    def warm_up(self, cache: Cache, max_alone: int) -> None:
        """Compiles the sampling kernels; if rows may spill, also runs one token past the selection budget, if that fits in
        memory.
        """
        tokens = [0] * (self.model.selected + 2 * cache.spec.page_tokens)
        with self.on_device():
            if cache.spec.spill is not None and len(tokens) <= max_alone:
                with suppress(NoRoom), cache.acquire(cache.lookup(tokens), publish=False) as lease:
                    cache.grow(lease, len(tokens))
                    self.look_at_host(lease, len(tokens))
            try_every_cut(self.model.kernels.pick, self.model.vocab_size, self.model.device)

    def run(
        self, chunks: Sequence[Chunk], on_stream: Callable[[torch.Tensor], None] | None = None, *,
        put_unread: PutUnread | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Computes the chunks, and returns logits for those that complete what their request has so far, in their order.

        One row for a request's last token, and one for each proposed token after it; before them rows for the tokens of a prompt
        whose logprobs are requested. `on_stream` gets the hidden states of all tokens after the last layer. `put_unread` fills in
        the tokens of chunks that follow a pass in flight.
        """
        self._slots.sweep()
        arriving = list(dict.fromkeys(load for chunk in chunks for load in chunk.arriving))
        batch = self._batch([self._segment(chunk) for chunk in chunks], arriving)
        if put_unread is not None:
            batch.tokens_N = put_unread(batch.tokens_N, chunks)
        last = len(self.model.layers) - 1
        if on_stream is None:
            compiling = self.model.kernels.compiling
            records = compiling is None or not compiling.pending
            logits = self._forward(batch) if records else self.model.forward(batch)
        else:
            logits = self.model.forward(batch, lambda layer, x_NC: on_stream(x_NC) if layer == last else None)
        batch.copy_points()
        if batch.spilled is not None:
            batch.spilled.count()
        return logits

    def look_at_host(self, lease: Lease, tokens: int) -> None:
        """Computes a request's token after all others as if the rows of its first page were on the host alone, so that kernels
        for that are built. No rows need to be there: the result is not used.
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
            batch.spilled = Spilled(spilling, batch.segments, batch.paging(None), frozenset())
            self.model.compute(batch)

    def _batch(self, segments: Sequence[RequestRows], arriving: Sequence[Arriving] = ()) -> Batch:
        return Batch(
            segments,
            self._pages,
            device=self.model.device,
            dtype=self.model.dtype,
            open_groups=self._open_groups,
            arriving=arriving,
            send=self.model.kernels.send,
        )

    def _segment(self, chunk: Chunk) -> RequestRows:
        return rows_of(chunk, self._slots, picks=self.model.selector is not None)


def rows_of(chunk: Chunk, slots: Slots, *, picks: bool) -> RequestRows:
    """A request's part of a pass, from its lease and its chunk. `picks` if a selector does."""
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
        point_copy=chunk.point_copy,
        slot=slots.of(lease),
        resumes=chunk.start == lease.resume,
        num_logits=chunk.num_logits,
        hot_numbers=lease.hot_numbers,
        picks_from=request.prompt_tokens if picks else 0,
    )


def _tokens_of(chunk: Chunk, lease: Lease) -> Sequence[int] | npt.NDArray[np.int32]:
    """The tokens of a chunk; if it follows a pass in flight, a placeholder for the token that only the device knows."""
    if chunk.follows:
        return (0,)
    if chunk.decodes:
        return [chunk.request.tokens[-1], *chunk.proposed]
    return unpack(lease.packed)[chunk.start : chunk.end]  # a list would be read one by one


class Slots:
    """A slot of open groups for every lease that computes, until it is closed; none for models that leave no groups open."""

    def __init__(self, open_groups: SlotSource) -> None:
        self.open_groups = open_groups
        self._held: dict[LeaseId, tuple[Lease, int]] = {}

    def of(self, lease: Lease) -> int | None:
        if not self.open_groups.needed:
            return None
        if lease.id not in self._held:
            self._held[lease.id] = lease, self.open_groups.take()
        return self._held[lease.id][1]

    def sweep(self) -> None:
        """Releases the slots of closed leases."""
        for lease, slot in list(self._held.values()):
            if lease.state is LeaseState.CLOSED:
                del self._held[lease.id]
                self.open_groups.give_back(slot)
