"""CUDA graphs: decode steps are captured once and replayed, so that hundreds of small kernels cost one launch.

A graph is for one number of requests. If attention runs in plain torch it is for page tables up to a length too, which grows in
steps, so that one graph serves many tokens. A shape is captured when it occurs a second time; first it is computed in the
same shape, so that the bits do not depend on captures. A shape that cannot be captured continues to be computed. A pass that runs
out of memory has all graphs dropped (`drop`), and is repeated. Only for models whose steps do the same work for all numbers
(`Decoder.graph_windows`); all other passes are computed as usual.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from stepwell.base.ids import Kind
from stepwell.engine.models.base import Decoder
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.groups import Groups
from stepwell.engine.passes.paging import Paging, Singles
from stepwell.engine.passes.step_groups import StepGroups

PAGES_STEP = 16  # by which page tables grow
MAX_GRAPHS = 64

Shape = tuple[
    int, ...
]  # requests, slots for their open groups, whether rows of some are on the host; then the lengths of the page tables
Lengths = Mapping[int | None, int | None]  # of the page table for each window, None if none is read

log = logging.getLogger(__name__)


class FixedPaging(Paging):
    """A paging of singles in tensors at fixed addresses. `load` puts another one into them.

    Its table has `length` pages for each request, or, with None, the length of the paging it copies: that one cannot be captured.
    """

    fixed = True

    def __init__(self, like: Paging, length: int | None) -> None:
        super().__init__(
            like.looks, like.sight, page_N=like.page_N.clone(), row_N=like.row_N.clone(), num_singles=like.num_singles,
            together=lambda: (),
        )  # fmt: skip
        self._like: Paging | None = like
        self._length = length
        self.reads_tables = False

    @cached_property
    def singles(self) -> tuple[Singles, ...]:
        self.reads_tables = True
        assert self._like is not None, "its table is made with the first pass"
        return self._like.singles if self._length is None else (_stretched(self._like.singles[0], self._length),)

    def load(self, theirs: Paging) -> None:
        self.page_N.copy_(theirs.page_N)
        self.row_N.copy_(theirs.row_N)
        if self.reads_tables:
            _fill(self.singles[0], theirs.singles[0])
        for parts in self.plans.values():
            for _, plan in parts:
                plan.load(theirs.looks)

    def settle(self) -> None:
        """The pass that it was created for has been computed."""
        self._like = None


class Still(Batch):
    """The static inputs of a captured graph: what a model reads of a batch of singles. `load` puts another batch into them."""

    def __init__(self, like: Batch, lengths: Lengths) -> None:
        self.pages, self.device, self._dtype, self._first_seen = like.pages, like.device, like.dtype, 0
        self.segments, self.num_singles, self.starts = like.segments, like.num_singles, like.starts
        self.open_groups, self.send = like.open_groups, like.send
        self.tokens_N, self.positions_N, self.wanted = (
            each.clone() for each in (like.tokens_N, like.positions_N, like.wanted)
        )  # fmt: skip
        self.wants_all = like.wants_all
        self._fixed = {window: FixedPaging(like.paging(window), length) for window, length in lengths.items()}
        self._paging = {**self._fixed}
        self._length = lengths.get(None)
        self.spilled = None if like.spilled is None else like.spilled.fixed(self._fixed[None], self._length)
        self._rows_paging: FixedPaging | None = None
        if like.pages.spilling is not None:
            self.rows_paging = self._rows_paging = FixedPaging(like.rows_paging, self._length)
        self.points_S, self.fresh_S = like.points_S, like.fresh_S
        self._groups: dict[int, StepGroups] = {}

    def groups(self, ratio: int, paging: Paging) -> Groups:
        if ratio not in self._groups:
            assert self._length is not None, "a model with groups says that its steps attend to all tokens"
            self._groups[ratio] = StepGroups(self, ratio, self._length)
        return self._groups[ratio].groups()

    @property
    def reads_tables(self) -> bool:
        return self.spilled is not None or any(paging.reads_tables for paging in self._each())

    def _each(self) -> Iterator[FixedPaging]:
        yield from self._fixed.values()
        if self._rows_paging is not None:
            yield self._rows_paging

    def load(self, batch: Batch) -> None:
        self.tokens_N.copy_(batch.tokens_N)
        self.positions_N.copy_(batch.positions_N)
        for window, mine in self._fixed.items():
            mine.load(batch.paging(window))
        if self._rows_paging is not None:
            self._rows_paging.load(batch.rows_paging)
        if self.spilled is not None:
            assert batch.spilled is not None, "a graph for rows on the host is replayed only if there are some"
            self.spilled.load(batch.spilled)
        for groups in self._groups.values():
            groups.load(batch)
        if len(self.points_S):
            self.points_S.copy_(batch.points_S)
            self.fresh_S.copy_(batch.fresh_S)

    def settle(self) -> None:
        """The batch it copies has been computed, and is no longer needed."""
        for paging in self._each():
            paging.settle()


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
    """A model's passes; decode steps replay captured graphs. One thread."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        kinds = {window: Kind.PREFIX if window is None else Kind.WINDOW for window in model.graph_windows}
        self._windows = [window for window, kind in kinds.items() if model.spec.parts(kind)]  # a recurrence alone has no pages
        self._met: set[Shape] = set()
        self._refused: set[Shape] = set()  # that could not be captured; not tried again
        self._recordings: dict[Shape, Recording] = {}
        # Libraries copy plans from pinned memory of their own, which must not be reused before a pass has read it: by the
        # time a third pass is queued, the first has ended.
        self._recent: deque[Still] = deque(maxlen=2)
        self._reads_tables = True  # until a step has shown that the model's attention reads pages
        self._most = MAX_GRAPHS
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(model.device)  # one for all: memory of the pool is reused only on its own stream

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        lengths = self._lengths(batch)
        if lengths is None:
            return self._model.forward(batch)
        batch.prepare()
        logits = self._step(batch, lengths)
        self._model.finish(batch)
        return logits

    def drop(self) -> bool:
        """Frees all captured graphs, for other passes to have their memory; False where there are none. Nothing may run.

        From then on at most half as many are kept, so that the memory does not run out again and again.
        """
        if not self._recordings:
            return False
        self._most = len(self._recordings) // 2
        self._free()
        return True

    def clear(self) -> None:
        """Frees all captured graphs: steps run by other kernels from now on, and are captured anew. Nothing may run."""
        self._free()
        self._refused.clear()
        self._reads_tables = True

    def _free(self) -> None:
        for kept in (self._recordings, self._recent, self._met):
            kept.clear()
        torch.cuda.empty_cache()

    def _step(self, batch: Batch, lengths: Lengths) -> torch.Tensor:
        slots = 0 if batch.open_groups is None else batch.open_groups.num_slots
        spilled = batch.spilled is not None  # then the step looks rows up, and fetches
        shape = (len(batch.segments), slots, spilled, *(length for length in lengths.values() if length is not None))
        if shape in self._recordings and not batch.arriving:
            return self._recordings[shape].play(batch)
        still = Still(batch, lengths)
        self._recent.append(still)
        if batch.arriving:  # waiting for loaded pages is for this pass alone
            return self._model.compute(still)
        if shape in self._met and shape not in self._refused and self._most:
            logits = self._compute_aside(still)
            self._keep(shape, still, lengths)
            return logits
        self._met.add(shape)
        logits = self._model.compute(still)
        self._reads_tables = still.reads_tables
        return logits

    def _keep(self, shape: Shape, still: Still, lengths: Lengths) -> None:
        """Captures a shape that occurs again. If that fails, it is not tried a second time."""
        if len(self._recordings) >= self._most:
            del self._recordings[next(iter(self._recordings))]
        try:
            self._recordings[shape] = self._record(still, lengths)
        except Exception:  # boundary to libraries: out of memory, or not capturable. It is computed already
            log.warning("a decode step could not be captured as a CUDA graph, and is computed instead", exc_info=True)
            self._refused.add(shape)

    def _lengths(self, batch: Batch) -> Lengths | None:
        """The length of page tables for this batch, in steps; None for a batch that cannot be replayed."""
        if batch.num_singles < len(batch.segments) or len(batch.wanted) < len(batch.segments):
            return None
        if any(segment.position < segment.picks_from for segment in batch.segments):
            return None  # a single token of a prompt attends to everything, unlike a step that picks
        if batch.spilled is not None and batch.spilled.asks_host:
            return None
        if not self._reads_tables:
            return dict.fromkeys(self._windows)
        tables = {window: batch.paging(window).singles for window in self._windows}
        if any(len(singles) > 1 for singles in tables.values()):
            return None
        return {window: -(-singles[0].table_BP.shape[1] // PAGES_STEP) * PAGES_STEP for window, singles in tables.items()}

    def _compute_aside(self, still: Still) -> torch.Tensor:
        """Computes a batch before it is captured, so that libraries allocate their workspaces outside of the capture.

        This is the batch's one pass: a graph does not run while it is captured, and states of fixed size must advance once.
        """
        here, side = torch.cuda.current_stream(self._model.device), self._side
        with torch.cuda.stream(here):  # whichever device was current
            side.wait_stream(here)
            try:
                with torch.cuda.stream(side):
                    logits = self._model.compute(still)
            finally:
                here.wait_stream(side)  # also for work that a failed pass has queued there
            return logits.clone()

    def _record(self, still: Still, lengths: Lengths) -> Recording:
        if still.reads_tables and None in lengths.values():
            raise RuntimeError("a kernel that reads pages has failed, and plain torch needs tables of a fixed length")
        graph = torch.cuda.CUDAGraph()
        # Back on the stream it came from, also after a failed capture. Other threads copy pages meanwhile, which does not
        # concern it.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._model.device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"),
        ):
            logits = self._model.compute(still)
        still.settle()
        return Recording(batch=still, graph=graph, logits=logits)


def _stretched(singles: Singles, length: int) -> Singles:
    longer = Singles(
        start=singles.start,
        stop=singles.stop,
        table_BP=singles.table_BP.new_empty(singles.table_BP.shape[0], length),
        position_B=singles.position_B.clone(),
        first_B=singles.first_B.clone(),
        sight=singles.sight,
    )
    _fill(longer, singles)
    return longer


def _fill(mine: Singles, theirs: Singles) -> None:
    """Pads tables with pages of their own; attention reads nothing in the padding."""
    pages = theirs.table_BP.shape[1]
    mine.table_BP[:, :pages] = theirs.table_BP
    mine.table_BP[:, pages:] = theirs.table_BP[:, :1]
    mine.position_B.copy_(theirs.position_B)
    mine.first_B.copy_(theirs.first_B)
    if mine.made_mask is not None:
        mine.made_mask.copy_(mine.fresh_mask())
