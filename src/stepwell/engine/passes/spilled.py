"""How one pass reads rows that are on the host alone.

    singles, short runs   select rows: `resolve` assigns slots to missing ones, `fetch` copies them, layer by layer
    longer runs           read nearly everything: each layer's rows of all their pages are copied to a scratch first. The last
                          token of a prompt still resolves what it selects: later tokens select most of that again
    tokens of prompts     attend to everything, where answers select: single ones and short runs are read in place, a few
                          requests at a time, since a layer's rows of each are copied. The last one resolves too

The places of rows were decided before the pass. Selections are never changed by it. Axes as in `sparse/resolve.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from stepwell.engine.passes.numbers import several_on_device
from stepwell.engine.passes.paging import Look, Paging, RequestRows, Run, Singles
from stepwell.engine.passes.rows import Rows
from stepwell.engine.passes.spilling import SHORT_RUN, Spilling
from stepwell.engine.passes.stages import Staged
from stepwell.memory.row_pages import ABSENT
from stepwell.sparse.resolve import Wanted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Neighbours of a pass in one attention call: tokens `[start, stop)`, and their parts of a selection.

    With `staged`, `paging` counts the pages of a scratch with the rows of its prefix pages. With `resident`, pages of rows:
    all of its rows are on the device, and attention is ordinary.
    """

    start: int
    stop: int
    parts: slice
    paging: Paging
    staged: Staged | None = None
    resident: bool = False


class Choice(Protocol):
    """What some queries select, and the scores by which the last of them did, if known."""

    @property
    def position_XK(self) -> torch.Tensor: ...
    @property
    def score_YT(self) -> torch.Tensor | None: ...


class Spilled:
    """One pass with rows on the host alone. Created by `spilled_in`."""

    def __init__(self, spilling: Spilling, segments: Sequence[RequestRows], paging: Paging, staged: frozenset[int]) -> None:
        """`paging` is of prefix pages. `staged` are the segments whose rows are staged."""
        self._spilling = spilling
        self._staged = staged
        self._paging = paging
        # of each segment, the first token that resolves: in longer runs only the last does
        self._first = [len(each.tokens) - 1 if len(each.tokens) > SHORT_RUN else 0 for each in segments]
        short = [at for at, each in enumerate(segments) if not self._first[at] or (at in staged and each.num_logits)]
        self._short = frozenset(short)
        # those with the last token of a prompt, after which a selector picks
        self._ending = frozenset(at for at in short if segments[at].num_logits and segments[at].end <= segments[at].picks_from)
        self._pieces: tuple[Piece, ...] | None = None
        if short:
            self._table_BP, self._hot_BQ, self._owner_X, self._first_A, self._last_X = self._tables(segments, short)

    @property
    def asks_host(self) -> bool:
        """Whether it waits for the device, or its host decides during the pass: then it cannot be captured."""
        return bool(self._staged) or self._spilling.asks_host

    def count(self) -> None:
        """After the pass: counts one more step, if it looked for rows that it selected."""
        self._spilling.steps += bool(self._short)

    def fixed(self, paging: Paging, length: int | None) -> Spilled:
        """The same pass over `paging`, in tensors at fixed addresses: tables have `length` pages, or their present number."""
        made = copy(self)
        made._paging, made._pieces = paging, None
        short = self._table_BP
        made._table_BP = short.new_empty(len(short), short.shape[1] if length is None else length)
        made._hot_BQ, made._last_X = self._hot_BQ.clone(), self._last_X.clone()
        made._owner_X, made._first_A = self._owner_X.clone(), self._first_A.clone()  # the same for this number of singles
        made.load(self)
        return made

    def load(self, theirs: Spilled) -> None:
        """Puts another pass with the same number of singles into its tensors. Padding of tables is never read."""
        pages = theirs._table_BP.shape[1]
        self._table_BP[:, :pages] = theirs._table_BP
        self._table_BP[:, pages:] = theirs._table_BP[:, :1]
        self._hot_BQ.copy_(theirs._hot_BQ)
        self._last_X.copy_(theirs._last_X)

    @property
    def ends(self) -> Iterator[tuple[int, Singles | Run]]:
        """The parts of the pass with tokens of prompts that attend to everything, whose last one resolves for those that follow;
        and their numbers.
        """
        segment = 0
        for number, part in enumerate(self._paging.parts):
            count = 1 if isinstance(part, Run) else part.stop - part.start
            if not self._ending.isdisjoint(range(segment, segment + count)):
                yield number, part
            segment += count

    @property
    def scored(self) -> int:
        """For how many last queries of each part `resolve` needs the scores."""
        return SHORT_RUN if self._short and self._spilling.scored else 0

    def resolve(self, layer: int, choices: Sequence[Choice | None]) -> None:
        """Assigns slots to missing rows of a selection: what each part of the pass selects, for its last queries, or None for
        all. Does nothing for queries that select nothing, and attend to more than can be selected.
        """
        if self._short:
            wanted = Wanted.of(
                self._positions(choices), last_X=self._last_X, table_BP=self._table_BP, hot_BQ=self._hot_BQ,
                owner_X=self._owner_X, first_A=self._first_A, score_XT=self._scores(choices),
            )  # fmt: skip
            self._spilling.resolve(self._spilling.group_of[layer], wanted)

    def fetch(self, layer: int) -> None:
        """Copies the rows that the last `resolve` assigned slots to, in one more layer of the group."""
        if self._short:
            self._spilling.fetch(layer)

    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of attention, one after the other: one piece, unless there are longer runs."""
        if self._pieces is None:
            self._pieces = self._cut()
        return self._pieces

    def rows(self, rows: Rows, piece: Piece) -> Rows:
        """The rows that a piece's paging refers to. Valid until the next piece's are requested."""
        if piece.resident:
            return Rows(rows.stored_PRE, rows.format, rows.dtype)
        if piece.staged is None:
            return rows
        assert rows.places is not None, "rows that cannot spill are not staged"
        stored_PRE = self._spilling.stages.stage(rows.places.layer, piece.staged)
        return Rows(stored_PRE, rows.format, rows.dtype)

    # ---- inside -----------------------------------------------------------------------------------

    def _tables(self, segments: Sequence[RequestRows], short: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Page tables and hot pages of the requests that resolve; for each of their tokens, its request and position."""
        looks, hot_pages = [self._paging.looks[at] for at in short], self._spilling.sizes.hot_pages
        longest = max(len(look.pages) for look in looks)
        table, hot = np.zeros((len(short), longest), np.int64), np.full((len(short), hot_pages), ABSENT, np.int64)
        for row, (at, look) in enumerate(zip(short, looks, strict=True)):
            numbers = segments[at].hot_numbers
            table[row, : len(look.pages)], table[row, len(look.pages) :] = look.pages, look.pages[0]
            hot[row, : len(numbers)] = numbers
        firsts = [look.position + self._first[at] for at, look in zip(short, looks, strict=True)]
        last = np.concatenate([np.arange(first, look.end) for first, look in zip(firsts, looks, strict=True)])
        owner = np.repeat(np.arange(len(short)), [look.end - first for first, look in zip(firsts, looks, strict=True)])
        begin = np.searchsorted(owner, np.arange(len(short) + 1))
        sight, values = self._paging.sight, (table.flatten(), hot.flatten(), owner, begin, last)
        table_X, hot_X, owner_X, first_A, last_X = several_on_device(values, sight.device, sight.send)
        return table_X.view(table.shape), hot_X.view(hot.shape).int(), owner_X.int(), first_A.int(), last_X.int()

    def _asking(self, choices: Sequence[Choice | None]) -> Iterator[tuple[Singles | Run, Choice | None, int]]:
        """The parts that resolve, what they chose, and for how many of their last queries."""
        segment = 0
        for part, choice in zip(self._paging.parts, choices, strict=True):
            if segment in self._short:  # all of them for singles
                yield part, choice, part.stop - part.start - self._first[segment]
            segment += 1 if isinstance(part, Run) else part.stop - part.start

    def _positions(self, choices: Sequence[Choice | None]) -> torch.Tensor:
        """The rows that each query resolves, ABSENT for none."""
        made = []
        for part, choice, queries in self._asking(choices):
            if choice is not None:
                position_XK = choice.position_XK
            elif _length(part) <= self._spilling.sizes.selected:
                position_XK = _all_of(part)
            else:
                position_XK = self._last_X.new_empty(0, 1)
            made.append((position_XK.int(), queries))
        return _stacked(made, ABSENT)

    def _scores(self, choices: Sequence[Choice | None]) -> torch.Tensor | None:
        """The scores of each query for every position; -inf throughout if a query chose nothing: it uses everything it sees."""
        if not self.scored:
            return None
        made = [(None if choice is None else choice.score_YT, queries) for _, choice, queries in self._asking(choices)]
        known = next((score_YT for score_YT, _ in made if score_YT is not None), None)
        if known is None:
            return None
        return _stacked([(known[:0] if score_YT is None else score_YT, queries) for score_YT, queries in made], -torch.inf)

    def _cut(self) -> tuple[Piece, ...]:
        paging = self._paging
        if not any(self._first):
            return (Piece(start=0, stop=paging.looks[-1].stop, parts=slice(None), paging=paging),)
        pieces, singles, before = [], paging.num_singles, len(paging.singles)
        if singles:
            stop = paging.looks[singles - 1].stop
            pieces.append(Piece(start=0, stop=stop, parts=slice(0, before), paging=paging.cut(0, singles)))
        for at, look in enumerate(paging.looks[singles:], singles):
            parts = slice(before + at - singles, before + at - singles + 1)
            pieces.append(self._cut_run(at, look, parts))
        return tuple(pieces)

    def _cut_run(self, at: int, look: Look, parts: slice) -> Piece:
        staged = self._spilling.stages.plan(look.pages, self._spilling.row_pages) if at in self._staged else None
        resident = staged is None and self._first[at] > 0
        pages = self._spilling.rows_of(look.pages) if resident else None
        pages = np.arange(staged.pages, dtype=np.int32) if staged is not None else pages
        own = self._paging.cut(at, at + 1, pages)
        return Piece(start=look.start, stop=look.stop, parts=parts, paging=own, staged=staged, resident=resident)


def spilled_in(spilling: Spilling, segments: Sequence[RequestRows], paging: Callable[[], Paging]) -> Spilled | None:
    """None if all rows that a pass reads are on the device, in pages of their own. `paging` creates that of prefix pages."""
    if not spilling.row_pages.num_backed:
        return None
    size = spilling.places.page_rows
    backed = [spilling.row_pages.backed(each.prefix_pages[: -(-each.end // size)]).any() for each in segments]
    if not any(backed):
        return None
    staged = (at for at, each in enumerate(segments) if backed[at] and len(each.tokens) > SHORT_RUN)
    return Spilled(spilling, segments, paging(), frozenset(staged))


def _stacked(parts: Sequence[tuple[torch.Tensor, int]], padding: float) -> torch.Tensor:
    """The last rows of each part, one part after the other; padded in front, and to the widest."""
    if len(parts) == 1 and len(parts[0][0]) == parts[0][1]:
        return parts[0][0].contiguous()
    widest = max(part.shape[1] for part, _ in parts)
    made = []
    for part, rows in parts:
        last = part[-rows:]
        made.append(pad(last, (0, widest - last.shape[1], rows - len(last), 0), value=padding))
    return torch.cat(made)


def _length(part: Singles | Run) -> int:
    return (len(part.pages_P) if isinstance(part, Run) else part.table_BP.shape[1]) * part.sight.page_tokens


def _all_of(part: Singles | Run) -> torch.Tensor:
    """Every position, for each single; for a run its last token stands for all."""
    queries, device = part.stop - part.start, (part.pages_P if isinstance(part, Run) else part.table_BP).device
    position_T = torch.arange(_length(part), dtype=torch.int32, device=device)
    if isinstance(part, Singles):
        return position_T.expand(queries, -1)
    position_XT = position_T.new_full((queries, len(position_T)), ABSENT)
    position_XT[-1] = position_T
    return position_XT
