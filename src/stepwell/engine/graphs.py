"""Decode steps recorded once and played again (CUDA graphs): hundreds of small kernels then cost one launch.

A recording is for so many requests, and for page tables up to a length that grows in steps, so that one lasts for many tokens. A
shape is recorded when it is met again; the first time it is computed in the same shape, so that the bits do not depend on what
was recorded. A shape that cannot be recorded, for lack of memory say, goes on being computed. Only for models whose steps do the
same work whatever the numbers are (`Decoder.steady`); all other passes are computed as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepwell.engine.models.base import Decoder
from stepwell.engine.passes.batch import Batch, Paging, Singles

PAGES_STEP = 16  # by which page tables grow
MOST_RECORDINGS = 64

Shape = tuple[int, ...]  # requests, then the length of the page table of each kind of pages

log = logging.getLogger(__name__)


class Still(Batch):
    """What a model reads of a batch of singles, in tensors that stay where they are. `load` puts another batch into them."""

    def __init__(self, like: Batch, lengths: Mapping[int | None, int]) -> None:
        self.pages, self.device, self._dtype, self._first_seen, self.open_groups = like.pages, like.device, like.dtype, 0, None
        self.segments, self.num_singles, self.starts = like.segments, like.num_singles, like.starts
        self.tokens_N, self.positions_N, self.wanted = (
            each.clone() for each in (like.tokens_N, like.positions_N, like.wanted)
        )  # fmt: skip
        self._paging = {window: _stretched(like.paging(window), length) for window, length in lengths.items()}

    def load(self, batch: Batch) -> None:
        self.tokens_N.copy_(batch.tokens_N)
        self.positions_N.copy_(batch.positions_N)
        for window, mine in self._paging.items():
            theirs = batch.paging(window)
            mine.page_N.copy_(theirs.page_N)
            mine.row_N.copy_(theirs.row_N)
            _fill(mine.singles[0], theirs.singles[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    batch: Still
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def play(self, batch: Batch) -> torch.Tensor:
        self.batch.load(batch)
        self.graph.replay()
        return self.logits.clone()


class Graphs:
    """A model's passes, those of decode steps from recordings. One thread."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._met: set[Shape] = set()
        self._refused: set[Shape] = set()  # that could not be recorded; nobody tries again
        self._recordings: dict[Shape, Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(model.device)  # one for all: memory of the pool is lent again on its own stream alone

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        lengths = self._lengths(batch)
        if lengths is None:
            return self._model.forward(batch)
        batch.prepare()
        shape = (len(batch.segments), *lengths.values())
        if shape not in self._recordings and not self._recorded(shape, batch, lengths):
            return self._model.compute(Still(batch, lengths))
        return self._recordings[shape].play(batch)

    def _recorded(self, shape: Shape, batch: Batch, lengths: Mapping[int | None, int]) -> bool:
        """Records a shape that is met again, and says whether it did. One that cannot be is not tried a second time."""
        if shape not in self._met or shape in self._refused:
            self._met.add(shape)
            return False
        if len(self._recordings) >= MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        try:
            self._recordings[shape] = self._record(batch, lengths)
        except RuntimeError:  # CUDA's: no memory for it, or something that cannot be recorded
            log.warning("a decode step could not be recorded, and is computed instead", exc_info=True)
            self._refused.add(shape)
            return False
        return True

    def _lengths(self, batch: Batch) -> dict[int | None, int] | None:
        """How long page tables are for this batch, in steps; None for one that cannot be played."""
        if batch.num_singles < len(batch.segments) or len(batch.wanted) < len(batch.segments):
            return None
        tables = {window: batch.paging(window).singles for window in self._model.steady}
        if any(len(singles) > 1 for singles in tables.values()):
            return None
        return {window: -(-singles[0].table_BP.shape[1] // PAGES_STEP) * PAGES_STEP for window, singles in tables.items()}

    def _record(self, batch: Batch, lengths: Mapping[int | None, int]) -> Recording:
        """Computes the batch twice: what it writes is the same every time."""
        still, graph = Still(batch, lengths), torch.cuda.CUDAGraph()
        here, side = torch.cuda.current_stream(self._model.device), self._side
        with torch.cuda.stream(here):  # whichever device was current; and back on it from a recording that failed
            side.wait_stream(here)
            with torch.cuda.stream(side):  # libraries get their workspaces outside of the recording
                self._model.compute(still)
            here.wait_stream(side)
            # Other threads copy pages meanwhile, which is none of its business.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                logits = self._model.compute(still)
        return Recording(batch=still, graph=graph, logits=logits)


def _stretched(paging: Paging, length: int) -> Paging:
    (singles,) = paging.singles
    count, tokens = singles.table_BP.shape[0], singles.mask_BT.shape[1] // singles.table_BP.shape[1]
    longer = Singles(
        start=singles.start,
        stop=singles.stop,
        table_BP=singles.table_BP.new_empty(count, length),
        mask_BT=singles.mask_BT.new_empty(count, length * tokens),
    )
    _fill(longer, singles)
    return Paging(page_N=paging.page_N.clone(), row_N=paging.row_N.clone(), singles=(longer,), runs=())


def _fill(mine: Singles, theirs: Singles) -> None:
    """Tables are padded with pages of their own, and nothing in the padding is looked at."""
    pages, tokens = theirs.table_BP.shape[1], theirs.mask_BT.shape[1]
    mine.table_BP[:, :pages] = theirs.table_BP
    mine.table_BP[:, pages:] = theirs.table_BP[:, :1]
    mine.mask_BT[:, :tokens] = theirs.mask_BT
    mine.mask_BT[:, tokens:] = -torch.inf
