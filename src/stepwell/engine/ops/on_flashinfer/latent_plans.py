"""Plans of FlashInfer for segments over latents: the rows that each attends to, computed once for all layers of a pass.

    Paged      pages where they lie
    Copied     all rows of a segment, copied back to back
    Each       for each token the number of rows picked for it

In a captured step a plan is loaded again before each replay: it contains the number of rows of each request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stepwell.engine.ops.on_flashinfer.attention import RECORDED_PAGES
from stepwell.engine.passes.numbers import Send, on_device, put
from stepwell.engine.passes.paging import Look

RANK, ROTATED = 512, 64  # what the library has
MOST_TILES = 12 << 10  # of queries in one plan: the library has space for 16,384 pieces of work

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Heads:
    """All that a kernel must know of a layer, except its rows."""

    queries: int
    scale: float
    dtype: torch.dtype

    @property
    def tiles(self) -> int:
        """What the library makes of one token, at most: it takes 64 heads at a time, or 128 where there are more."""
        return -(-self.queries // 128) if self.queries > 64 else 1


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Segments of one plan: where the tokens of each begin, where its rows (or pages) begin, and how many rows it looks at."""

    queries: Ints
    starts: Ints
    lengths: Ints
    pages: Ints | None  # None: rows of a copy

    def same_as(self, other: Lists | None) -> bool:
        return other is not None and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("queries", "starts", "lengths", "pages")
        )


class Planner(Protocol):
    """Says what segments look at. Two that are equal say the same."""

    @property
    def page_rows(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    def lists(self, looks: Sequence[Look]) -> Lists: ...


@dataclass(frozen=True, slots=True)
class Paged:
    page_rows: int
    causal: bool = True

    def lists(self, looks: Sequence[Look]) -> Lists:
        pages = [look.pages[: -(-(look.end - look.first) // self.page_rows)] for look in looks]
        return Lists(
            queries=_sums([look.stop - look.start for look in looks]),
            starts=_sums([len(each) for each in pages]),
            lengths=np.array([look.end - look.first for look in looks], np.int32),
            pages=np.concatenate(pages).astype(np.int32, copy=False),
        )


@dataclass(frozen=True, slots=True)
class Copied:
    """All rows of each segment: `length` of them were copied, those behind its last among them."""

    length: int
    page_rows: int = 1
    causal: bool = True

    def lists(self, looks: Sequence[Look]) -> Lists:
        return Lists(
            queries=_sums([look.stop - look.start for look in looks]),
            starts=_sums([self.length] * len(looks)),
            lengths=np.array([look.end for look in looks], np.int32),
            pages=None,
        )


@dataclass(frozen=True, slots=True)
class Each:
    """For each token the number of rows picked for it: `count`, or all that it may see if there are fewer."""

    count: int
    page_rows: int = 1
    causal: bool = False

    def lists(self, looks: Sequence[Look]) -> Lists:
        seen = np.concatenate([np.arange(look.position, look.end) + 1 for look in looks])
        return Lists(
            queries=np.arange(len(seen) + 1, dtype=np.int32),
            starts=_sums([self.count] * len(seen)),
            lengths=np.minimum(seen, self.count).astype(np.int32),
            pages=None,
        )


class Wrapper:
    """One of the library's wrappers, and the lists that it was last planned for."""

    def __init__(self, made: Any, send: Send, *, recorded: bool = False) -> None:
        self._made = made
        self._send = send
        self._recorded = recorded
        self._holds: Lists | None = None
        self._numbers_M = torch.empty(0, dtype=torch.int32, device=made.device)  # of pages, or of rows of a copy
        self._uploaded: torch.cuda.Event | None = None

    def plan(self, lists: Lists, layer: Heads, planner: Planner) -> None:
        """Does nothing if it was done last. In a recorded step numbers stay where they are."""
        if lists is self._holds:
            return
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the library copies from its own pinned buffer, which it now writes again
        self._number(lists)
        queries, starts, lengths = (torch.from_numpy(each) for each in (lists.queries, lists.starts, lists.lengths))
        self._made.plan(
            queries, starts, self._numbers_M, lengths, layer.queries, RANK, ROTATED, planner.page_rows, planner.causal,
            layer.scale, layer.dtype, layer.dtype,
        )  # fmt: skip
        self._holds, self._uploaded = lists, torch.cuda.Event()
        self._uploaded.record(torch.cuda.current_stream(self._made.device))

    def run(self, query_NHC: torch.Tensor, row_PRC: torch.Tensor, out_NHR: torch.Tensor, numbers: torch.Tensor | None) -> None:
        """`numbers` are those of the rows to look at, where the plan does not have them."""
        self._made._kv_indices_buf = self._numbers_M if numbers is None else numbers
        self._made.run(query_NHC[..., :RANK], query_NHC[..., RANK:], row_PRC[..., :RANK], row_PRC[..., RANK:], out=out_NHR)

    def _number(self, lists: Lists) -> None:
        size = int(lists.starts[-1])
        if lists.pages is None:
            if len(self._numbers_M) != size:
                self._numbers_M = torch.arange(size, dtype=torch.int32, device=self._made.device)
            return
        if not self._recorded:
            self._numbers_M = on_device(lists.pages, self._made.device, self._send)
            return
        if not len(self._numbers_M):
            self._numbers_M = torch.zeros(RECORDED_PAGES, dtype=torch.int32, device=self._made.device)
        put(self._numbers_M[:size], lists.pages, self._send)


class Planned:
    """What some segments look at, and the wrapper that is planned for it."""

    def __init__(self, wrapper: Wrapper, layer: Heads, planner: Planner) -> None:
        self._wrapper = wrapper
        self._layer = layer
        self._planner = planner
        self._lists: Lists | None = None

    def load(self, looks: Sequence[Look]) -> None:
        """Plans for these segments. In a recorded step that is the whole change from one replay to the next."""
        lists = self._planner.lists(looks)
        if not lists.same_as(self._lists):
            self._lists = lists
            self._wrapper.plan(lists, self._layer, self._planner)

    def run(
        self, query_NHC: torch.Tensor, row_PRC: torch.Tensor, out_NHR: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> None:
        assert self._lists is not None, "it is loaded before it runs"
        self._wrapper.plan(self._lists, self._layer, self._planner)  # another pass may have used the wrapper meanwhile
        self._wrapper.run(query_NHC, row_PRC, out_NHR, numbers)


def groups(looks: Sequence[Look], layer: Heads) -> Iterator[list[Look]]:
    """Segments in groups that fit the library's workspace, and pieces of longer ones."""
    most, left = MOST_TILES // layer.tiles, 0
    group: list[Look] = []
    for look in looks:
        for start in range(look.start, look.stop, most):
            stop = min(start + most, look.stop)
            if left < stop - start and group:
                yield group
                group = []
            left = (left if group else most) - (stop - start)
            group.append(replace(look, start=start, stop=stop, position=look.position + start - look.start))
    if group:
        yield group


def _sums(counts: Sequence[int]) -> Ints:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
