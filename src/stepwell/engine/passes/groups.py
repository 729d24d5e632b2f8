"""Groups of tokens that compressed layers turn into one entry: which of them a pass closes, and which entries its tokens see.

    tokens      | 0 1 2 3 | 4 5 6 7 | 8 9            ratio 4, a pass over tokens [6, 10)
    groups           0         1        2            1 closes: 6 and 7 are new, 4 and 5 were left open by earlier passes
    entries          e         e                     8 and 9 are left open now
    seen by          every token of the pass  ->  entry 0;   tokens 7 and later  ->  entry 1

An entry lies in the prefix page that completes its group. Made once for a pass and a ratio; only computes places, and
moves nothing. Axes: N tokens of a batch, G groups that close, R tokens of a group, Z segments with a group that closes,
S segments in one attention call, T tokens of each, W entries, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.tasks import PageIds
from stepwell.engine.passes.numbers import on_device
from stepwell.engine.passes.paging import Paging, RequestRows, Sight

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """Entries that tokens `[start, stop)` of the batch attend to: those of several singles, or of one run."""

    start: int
    stop: int
    table_SP: torch.Tensor  # pages with entries, in their order; padded with pages of their own
    rows: int  # entries of a page
    count_ST: torch.Tensor  # the number of entries that a token sees: the first ones

    @property
    def entries(self) -> int:
        return self.table_SP.shape[1] * self.rows

    def hidden_STW(self, tokens: slice) -> torch.Tensor:
        """Mask of the entries that some tokens of each segment may not see."""
        return torch.arange(self.entries, device=self.count_ST.device) >= self.count_ST[:, tokens, None]

    def place(self, entry_STK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and row of entries by their number."""
        index_STK = entry_STK // self.rows
        return self.table_SP.gather(1, index_STK.flatten(1)).view_as(index_STK), entry_STK % self.rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenRows:
    """Some tokens of open groups: a row of a slot each, and the row that it belongs to."""

    slot: torch.Tensor
    row: torch.Tensor
    of: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """All groups of one ratio in a batch."""

    ratio: int
    position_G: torch.Tensor  # of a group's first token
    token_GR: torch.Tensor  # rows of the batch; any, where the token is older
    older: OpenRows  # of a group, the rows from earlier passes
    left: OpenRows  # of a token of the batch, its place until its group closes
    page_G: torch.Tensor
    row_G: torch.Tensor
    before_G: torch.Tensor  # the group before each: one of G, or G + z if segment z has it from an earlier pass
    last_Z: torch.Tensor  # the last group of each segment that closes one
    point_Z: torch.Tensor  # its point page
    first_Z: torch.Tensor  # whether it starts with group 0, which has none before it
    seen: tuple[Seen, ...]  # as the paging has singles and runs
    closes_G: torch.Tensor | None = None  # which of them do, in a step of fixed shapes (`step_groups.py`); None: all

    def __len__(self) -> int:
        return len(self.page_G)

    @classmethod
    def of(
        cls, segments: Sequence[RequestRows], starts: Sequence[int], paging: Paging, *, ratio: int, page_tokens: int
    ) -> Groups:
        """`paging` is that of the windows in which the same layers attend, `page_tokens` the tokens of a prefix page."""
        made = _Maker(segments, paging.sight, ratio, page_tokens)
        for segment, start in zip(segments, starts, strict=False):
            made.add(segment, start)
        singles = [made.seen(range(each.start, each.stop), each.start, each.stop) for each in paging.singles]
        at = paging.num_singles
        runs = [made.seen(range(at + number, at + number + 1), run.start, run.stop) for number, run in enumerate(paging.runs)]
        return made.groups(tuple(singles + runs))


class _Maker:
    """Collects numbers segment by segment, and moves them to the device at the end."""

    def __init__(self, segments: Sequence[RequestRows], sight: Sight, ratio: int, page_tokens: int) -> None:
        self._given, self._sight = segments, sight
        self._ratio = ratio
        self._rows = max(page_tokens // ratio, 1)  # entries of a page that has any
        self._step = max(ratio // page_tokens, 1)  # one page of this many has entries
        self._closed = [np.empty((0, 3), np.int64)]  # position of the group, page and row of its entry
        self._tokens = [np.empty((0, ratio), np.int64)]
        self._older = [np.empty((0, 3), np.int64)]  # slot, row, group
        self._left = [np.empty((0, 3), np.int64)]  # slot, row, token
        self._before: list[int] = []
        self._segments: list[tuple[int, int, bool]] = []  # last group, point page, whether it starts with group 0

    def add(self, segment: RequestRows, start: int) -> None:
        ratio, count = self._ratio, len(self._before)
        entry = np.arange(segment.position // ratio, segment.end // ratio)
        to_row = start - segment.position
        open_from = max(int(segment.end // ratio * ratio), segment.position)
        waiting = np.arange(open_from, segment.end)
        self._left.append(_triples(segment.slot, waiting % ratio, waiting + to_row))
        if not len(entry):
            return
        index = entry // self._rows if self._step == 1 else (entry + 1) * self._step - 1
        self._closed.append(np.stack([entry * ratio, segment.prefix_pages[index], entry % self._rows], axis=1))
        self._tokens.append(np.maximum(entry[:, None] * ratio + np.arange(ratio) + to_row, 0))
        self._older.append(_triples(segment.slot, np.arange(segment.position % ratio), count))
        self._before += [-1 - len(self._segments), *range(count, count + len(entry) - 1)]
        point = -1 if segment.point_page is None else segment.point_page  # of a model whose groups do not overlap: never read
        self._segments.append((count + len(entry) - 1, point, bool(entry[0] == 0)))

    def seen(self, group: range, start: int, stop: int) -> Seen:
        segments = [self._given[at] for at in group]
        tables = [self._with_entries(segment) for segment in segments]
        table = np.empty((len(group), max(len(pages) for pages in tables)), np.int64)
        for row, (segment, pages) in enumerate(zip(segments, tables, strict=True)):
            table[row, : len(pages)], table[row, len(pages) :] = pages, segment.prefix_pages[0]
        tokens = np.stack([np.arange(segment.position, segment.end) for segment in segments])
        return Seen(
            start=start,
            stop=stop,
            table_SP=self._tensor(table),
            rows=self._rows,
            count_ST=self._tensor((tokens + 1) // self._ratio),
        )

    def groups(self, seen: tuple[Seen, ...]) -> Groups:
        closed, count = np.concatenate(self._closed), len(self._before)
        before = [each if each >= 0 else count - 1 - each for each in self._before]
        return Groups(
            ratio=self._ratio,
            position_G=self._tensor(closed[:, 0]),
            token_GR=self._tensor(np.concatenate(self._tokens)),
            older=self._open_rows(self._older),
            left=self._open_rows(self._left),
            page_G=self._tensor(closed[:, 1]),
            row_G=self._tensor(closed[:, 2]),
            before_G=self._tensor(np.array(before, np.int64)),
            last_Z=self._tensor(np.array([last for last, _, _ in self._segments], np.int64)),
            point_Z=self._tensor(np.array([point for _, point, _ in self._segments], np.int64)),
            first_Z=self._tensor(np.array([first for _, _, first in self._segments], np.bool_)),
            seen=seen,
        )

    def _with_entries(self, segment: RequestRows) -> PageIds:
        """The pages of a segment that hold entries of groups it has closed."""
        count = -(-(segment.end // self._ratio) // self._rows)
        return segment.prefix_pages[self._step - 1 : count * self._step : self._step]

    def _open_rows(self, triples: Sequence[Indices]) -> OpenRows:
        joined = np.concatenate(triples)
        return OpenRows(slot=self._tensor(joined[:, 0]), row=self._tensor(joined[:, 1]), of=self._tensor(joined[:, 2]))

    def _tensor(self, values: Indices) -> torch.Tensor:
        return on_device(values, self._sight.device, self._sight.send)


def _triples(slot: int | None, row: Indices, of: Indices | int) -> Indices:
    assert slot is not None or not len(row), "a segment without a slot cannot leave groups open"
    return np.stack(np.broadcast_arrays(np.int64(slot or 0), row, of), axis=1).astype(np.int64)
