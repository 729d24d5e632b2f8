"""What is copied, as torch sees it: tables of pages over flat bytes, pairs of pages in two of them, and pieces of those pages.

Values only. Says which pages are neighbours in both tables; copies nothing and chooses no way of copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.tasks import PageIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageTable:
    """All pages of a kind in one memory: page `i` is `bytes_B[i * stride : i * stride + page_bytes]`."""

    bytes_B: torch.Tensor
    num_pages: int
    page_bytes: int
    stride: int
    on_device: bool
    joined: bool = True  # neighbours may be copied together: what lies between two pages belongs to the first

    @classmethod
    def of(cls, rows_PB: torch.Tensor) -> PageTable:
        """Over a memory's rows, `[page id][byte]`."""
        num_pages, page_bytes = rows_PB.shape
        stride = rows_PB.stride(0)
        flat_B = rows_PB.as_strided((max(num_pages - 1, 0) * stride + page_bytes * bool(num_pages),), (1,))
        return cls(bytes_B=flat_B, num_pages=num_pages, page_bytes=page_bytes, stride=stride, on_device=rows_PB.is_cuda)

    def part(self, start: int, size_bytes: int) -> PageTable:
        """The same range of bytes of every page."""
        if size_bytes == self.page_bytes:
            return self
        return replace(self, bytes_B=self.bytes_B[start:], page_bytes=size_bytes, joined=False)

    def check(self, ids: PageIds) -> None:
        """Raises IndexError for a page that is not there: nothing below looks again."""
        if len(ids) and ids.astype(np.uint32).max() >= self.num_pages:  # negative ones are large then
            raise IndexError(f"pages {int(ids.min())} to {int(ids.max())} of a memory that has {self.num_pages}")


class Run(NamedTuple):
    """So many pages in sequence, in source and target."""

    read: int
    write: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagePairs:
    """Page `source_ids[i]` of one table and page `target_ids[i]` of another, for every i. Raises IndexError for others."""

    source: PageTable
    target: PageTable
    source_ids: PageIds
    target_ids: PageIds

    def __post_init__(self) -> None:
        self.source.check(self.source_ids)
        self.target.check(self.target_ids)

    @property
    def page_bytes(self) -> int:
        return self.source.page_bytes

    def whole(self) -> Piece:
        return Piece(pairs=self, start=0, size_bytes=self.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """The same bytes of every page of some pairs."""

    pairs: PagePairs
    start: int
    size_bytes: int

    @property
    def total_bytes(self) -> int:
        return len(self.pairs.source_ids) * self.size_bytes

    @property
    def num_runs(self) -> int:
        """How many copies of neighbouring pages there are."""
        if not self.total_bytes:
            return 0
        return 1 + int(np.count_nonzero(self._breaks())) if self._may_join() else len(self.pairs.source_ids)

    def runs(self) -> list[Run]:
        """The pages, neighbours together where one copy can move them."""
        source_ids, target_ids = self.pairs.source_ids, self.pairs.target_ids
        if not self.total_bytes:
            return []
        if not self._may_join():
            return [Run(read, write, 1) for read, write in zip(source_ids.tolist(), target_ids.tolist(), strict=True)]
        first = np.concatenate(([0], np.flatnonzero(self._breaks()) + 1))
        pages = np.diff(first, append=len(source_ids))
        return [Run(*run) for run in zip(source_ids[first].tolist(), target_ids[first].tolist(), pages.tolist(), strict=True)]

    def _may_join(self) -> bool:
        """Whole pages only, and at the same distance on both sides."""
        source, target = self.pairs.source, self.pairs.target
        return self.size_bytes == self.pairs.page_bytes and source.stride == target.stride and source.joined and target.joined

    def _breaks(self) -> npt.NDArray[np.bool_]:
        """Between which pages the ids do not go on in sequence, on one side or the other."""
        source_ids, target_ids = self.pairs.source_ids, self.pairs.target_ids
        breaks: npt.NDArray[np.bool_] = (source_ids[1:] - source_ids[:-1] != 1) | (target_ids[1:] - target_ids[:-1] != 1)
        return breaks

    def slices(self, runs: list[Run]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Source and target bytes of each run."""
        source, target = self.pairs.source, self.pairs.target
        for read, write, pages in runs:
            size = (pages - 1) * source.stride + self.size_bytes
            first, onto = read * source.stride + self.start, write * target.stride + self.start
            yield source.bytes_B[first : first + size], target.bytes_B[onto : onto + size]
