"""Which bytes of pages a rank copies, as tables that a copy engine for GPUs takes. Values only: copies nothing.

    host page      |-- row 0: [head 0][head 1] --|-- row 1: [head 0][head 1] --| ...
    rank 1                            [======]                       [======]          a piece of every row

If a rank has whole rows, all of them are one piece of the page. Otherwise every row has its own: pieces are numbered over all of
the memory, in steps that divide both a page and a row evenly, so that one list names the pieces of all pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from stepwell.base.tasks import PageIds
from stepwell.transfer.page_tables import PagePairs, PageTable

MOST_PIECES = np.iinfo(np.int32).max  # that a list can number

Pair = tuple[torch.Tensor, torch.Tensor]  # the same bytes of every page, layer and row: of a source, of a target


def pairs_for(sides: Pair, source_ids: PageIds, target_ids: PageIds) -> list[PagePairs]:
    """What is copied between `[page, layer, row, byte]` of two memories. Raises IndexError for pages that do not exist."""
    source, target = (_Side.of(each) for each in sides)
    if source.has_whole_rows and target.has_whole_rows:
        tables = [(source.by_page(0, source.rows * source.size), target.by_page(0, target.rows * target.size))]
    elif max(source.num_steps, target.num_steps) > MOST_PIECES:
        tables = list(zip(source.each_row(), target.each_row(), strict=True))
    else:
        tables = [(source.by_step(), target.by_step())]
        source_ids, target_ids = source.numbers(source_ids), target.numbers(target_ids)
    return [PagePairs(source=reads, target=writes, source_ids=source_ids, target_ids=target_ids) for reads, writes in tables]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    """The pieces of one memory: `size` bytes of each row of each page."""

    flat_B: torch.Tensor  # from the first piece on
    num_pages: int
    page_stride: int
    rows: int
    row_stride: int
    size: int

    @classmethod
    def of(cls, view_PLRB: torch.Tensor) -> _Side:
        (pages, layers, rows, size), (page_stride, layer_stride, row_stride, _) = view_PLRB.shape, view_PLRB.stride()
        assert layer_stride == rows * row_stride, f"layers that do not follow one another: {view_PLRB.stride()}"
        end = (pages - 1) * page_stride + (layers * rows - 1) * row_stride + size
        flat_B = view_PLRB.as_strided((end if pages else 0,), (1,))
        return cls(
            flat_B=flat_B, num_pages=pages, page_stride=page_stride, rows=layers * rows, row_stride=row_stride, size=size
        )  # fmt: skip

    @property
    def has_whole_rows(self) -> bool:
        return self.size == self.row_stride

    @property
    def step(self) -> int:
        return gcd(self.page_stride, self.row_stride)

    @property
    def num_steps(self) -> int:
        return ((self.num_pages - 1) * self.page_stride + (self.rows - 1) * self.row_stride) // self.step + 1

    def by_page(self, start: int, size: int) -> PageTable:
        return self._table(self.flat_B[start:], self.num_pages, size, self.page_stride)

    def by_step(self) -> PageTable:
        return self._table(self.flat_B, self.num_steps, self.size, self.step)

    def each_row(self) -> Iterator[PageTable]:
        return (self.by_page(row * self.row_stride, self.size) for row in range(self.rows))

    def numbers(self, pages: PageIds) -> PageIds:
        """The numbers of all pieces of some pages. Raises IndexError for pages that do not exist."""
        self.by_page(0, self.size).check(pages)
        first_P1 = pages.astype(np.int64)[:, None] * (self.page_stride // self.step)
        numbers: PageIds = (first_P1 + np.arange(self.rows) * (self.row_stride // self.step)).ravel().astype(np.int32)
        return numbers

    def _table(self, bytes_B: torch.Tensor, count: int, size: int, stride: int) -> PageTable:
        return PageTable(
            bytes_B=bytes_B, num_pages=count, page_bytes=size, stride=stride, on_device=self.flat_B.is_cuda, joined=False
        )
