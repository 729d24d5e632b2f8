"""The copies as torch sees them: tables of pages over flat bytes, pairs of pages in two tables, and pieces of those pages.

Values only. Says which pages are adjacent in both tables; copies nothing and chooses no way of copying.
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
    joined: bool = True  # adjacent pages may be copied together: bytes between two pages belong to the first

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
        """Raises IndexError for a page that does not exist: the code below does not check again."""
        if len(ids) and ids.astype(np.uint32).max() >= self.num_pages:  # negative ones are large then
            raise IndexError(f"pages {int(ids.min())} to {int(ids.max())} of a memory that has {self.num_pages}")


class Runs(NamedTuple):
    """Pages that are adjacent in source and target: the first of each run in both, and the lengths."""

    read: npt.NDArray[np.int64]
    write: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagePairs:
    """Page `source_ids[i]` of one table and page `target_ids[i]` of another, for every i. Raises IndexError for invalid ids."""

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

    def some(self, which: slice) -> PagePairs:
        return PagePairs(
            source=self.source, target=self.target, source_ids=self.source_ids[which], target_ids=self.target_ids[which]
        )

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

    def runs(self) -> Runs:
        """The pages, adjacent ones together where one copy can move them."""
        read, write = (ids.astype(np.int64) for ids in (self.pairs.source_ids, self.pairs.target_ids))
        count = len(read) if self.size_bytes else 0
        together = (read[1:] - read[:-1] == 1) & (write[1:] - write[:-1] == 1)
        if count < len(read) or not self._may_join() or not together.any():
            return Runs(read[:count], write[:count], np.ones(count, np.int64))
        ends = np.append(np.flatnonzero(~together) + 1, count)
        first = np.append(0, ends[:-1])
        return Runs(read[first], write[first], ends - first)

    def _may_join(self) -> bool:
        """Only if the pieces are whole pages, at the same distance on both sides."""
        source, target = self.pairs.source, self.pairs.target
        return self.size_bytes == self.pairs.page_bytes and source.stride == target.stride and source.joined and target.joined

    def places(self, runs: Runs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each run begins in the source's bytes, where in the target's, and how many bytes it has."""
        source, target = self.pairs.source, self.pairs.target
        sizes = (runs.pages - 1) * source.stride + self.size_bytes
        return runs.read * source.stride + self.start, runs.write * target.stride + self.start, sizes

    def addresses(self, runs: Runs) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """The same as addresses in memory."""
        first, onto, sizes = self.places(runs)
        first += self.pairs.source.bytes_B.data_ptr()
        onto += self.pairs.target.bytes_B.data_ptr()
        return first.view(np.uint64), onto.view(np.uint64), sizes.view(np.uint64)

    def slices(self, runs: Runs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Source and target bytes of each run."""
        source_B, target_B = self.pairs.source.bytes_B, self.pairs.target.bytes_B
        for first, onto, size in zip(*(each.tolist() for each in self.places(runs)), strict=True):
            yield source_B[first : first + size], target_B[onto : onto + size]


class Cuts:
    """Divides pieces into parts of about this many bytes; layers of the same pages are divided alike, into the same pairs."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._cut: dict[tuple[PagePairs, int], list[PagePairs]] = {}

    def of(self, piece: Piece) -> list[Piece]:
        pairs, count = piece.pairs, max(self._part_bytes // max(piece.size_bytes, 1), 1)
        if count >= len(pairs.source_ids):
            return [piece]
        if (pairs, count) not in self._cut:
            starts = range(0, len(pairs.source_ids), count)
            self._cut[pairs, count] = [pairs.some(slice(start, start + count)) for start in starts]
        return [Piece(pairs=each, start=piece.start, size_bytes=piece.size_bytes) for each in self._cut[pairs, count]]
