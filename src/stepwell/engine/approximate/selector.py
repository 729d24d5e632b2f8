"""Selectors for models with keys and values per head: they choose the tokens that a query attends to, by summaries of their keys.

    tokens     | s s s s | . . . . | x x x x | . . . . | r r r r | r r        units of 4; the query is the last token
    picked       sinks              best units            recent ones, and those of the query's own unit

A query that sees no more than `count` tokens attends to all of them; any other to exactly `count`: those that are always picked,
then units by their scores, the last of them cut off at `count`. The choice depends on a query, its position and the keys before
it alone, never on how passes cut the tokens. As with the index of DeepSeek's models (`models/indexer.py`), the outcome is a
`Selection`, and attention does not depend on its origin.

Summaries are a state of the model, cached with its pages. Those of runs are computed in their layer, before the first choice;
those of single tokens after the pass, for all layers at once: a token never uses the summary of its own unit. Both are computed
from keys in pages that the pass writes to, whose rows are never only on the host. Axes as in `ops/selection.py` and
`summaries.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepwell.base.tasks import PageIds
from stepwell.engine.approximate.summaries import Summary
from stepwell.engine.ops.selection import Best, LastScores, Picked, Selection, best
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.numbers import Send, on_device
from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import Rows

BLOCK_BYTES = 64 << 20  # of scores

RowsOf = Callable[[PageIds], PageIds]  # pages of rows, of prefix pages that the pass writes to
_HEAD_BYTES, _TOKEN_BYTES = 4, 32  # of a token: a score for each key head, and what it takes to find the best


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selector:
    """Picks `count` tokens a query by the rows of `state`, which summarise the keys in the rows of `keys`."""

    state: str
    keys: str
    summary: Summary
    count: int
    kv_heads: int
    key_dim: int
    sinks: int
    recent: int
    best: Best = best

    def keep(self, rows: Rows, summaries: Rows, paging: Paging, rows_of: RowsOf) -> None:
        """Writes the summaries of units that runs complete, once a layer's keys are written. `paging` is of prefix pages."""
        if paging.num_singles == len(paging.looks):
            return
        plan = ("units", self.summary.unit)
        if plan not in paging.plans:
            spans = [(look.position, look.end, look.pages) for look in paging.looks[paging.num_singles :]]
            paging.plans[plan] = self._units(spans, rows.stored_PRE.shape[1], rows_of, rows.stored_PRE.device, paging.sight.send)
        page_U, kept_U, unit_U, row_UR = paging.plans[plan]
        if len(page_U):
            made_UC = self.summary.make(self._keys(rows.written(kept_U[:, None], row_UR)))
            summaries.write(page_U, unit_U, made_UC)

    def finish(self, batch: Batch) -> None:
        """Writes, after a pass, the summaries of units that single tokens complete, in all layers."""
        singles = batch.segments[: batch.num_singles]
        spans = [(each.position, each.end, each.prefix_pages) for each in singles if not each.end % self.summary.unit]
        if not spans:
            return
        rows_PLRE, state_PLRE = batch.pages.state_PLRE(self.keys), batch.pages.state_PLRE(self.state)
        page_U, kept_U, unit_U, row_UR = self._units(
            spans, rows_PLRE.shape[2], batch.rows_of(self.keys), rows_PLRE.device, batch.send
        )
        row_ULRE = rows_PLRE[kept_U[:, None], :, row_UR].transpose(1, 2)
        made_YC = self.summary.make(self._keys(row_ULRE.flatten(0, 1).to(batch.dtype)))
        state_PLRE[page_U, :, unit_U] = made_YC.unflatten(0, row_ULRE.shape[:2]).to(state_PLRE.dtype)

    def select(
        self, query_NHD: torch.Tensor, summaries: Rows, paging: Paging, *, scale: float, scored: int = 0
    ) -> Selection:  # fmt: skip
        """Reads summaries, and changes nothing. `scored` as in `selection.select`."""
        return tuple(self._pick(query_NHD, summaries, part, scale, self._first(part), scored) for part in paging.parts)

    def select_last(
        self, query_NHD: torch.Tensor, summaries: Rows, part: Singles | Run, *, scale: float, scored: int = 0
    ) -> Picked | None:  # fmt: skip
        """The rows that the last token of a run, or each of some singles, would pick; None for all rows."""
        first = part.stop - part.start - 1 if isinstance(part, Run) else 0
        return self._pick(query_NHD, summaries, part, scale, first, scored)

    # ---- inside -----------------------------------------------------------------------------------

    def _keys(self, row: torch.Tensor) -> torch.Tensor:
        """The keys `[U, R, K, D]` of rows `[U, R, E]`."""
        keys: torch.Tensor = row.unflatten(2, (self.kv_heads, -1))[..., : self.key_dim]
        return keys

    def _units(
        self, spans: Sequence[tuple[int, int, PageIds]], page_rows: int, rows_of: RowsOf, device: torch.device, send: Send
    ) -> tuple[torch.Tensor, ...]:
        """For each unit that tokens `[position, end)` of some pages complete: the prefix page and the page of its rows, the row
        of the summary, those of keys.
        """
        size = self.summary.unit
        pages, units = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for position, end, held in spans:
            unit = np.arange(position // size, end // size)
            pages.append(held[unit * size // page_rows].astype(np.int64))
            units.append(unit % (page_rows // size))
        page, unit = np.concatenate(pages), np.concatenate(units)
        kept = rows_of(page.astype(np.int32))
        numbers = on_device(np.concatenate([page, kept, unit]), device, send)
        page_U, kept_U, unit_U = numbers.split((len(page),) * 3)
        return page_U, kept_U, unit_U, unit_U[:, None] * size + torch.arange(size, device=device)

    @staticmethod
    def _first(part: Singles | Run) -> int:
        """The number of a part's first queries that attend to everything."""
        if isinstance(part, Singles):
            return 0 if part.picks else part.stop - part.start
        return min(max(part.picks_from - part.position, 0), part.stop - part.start)

    def _pick(
        self, query_NHD: torch.Tensor, summaries: Rows, part: Singles | Run, scale: float, first: int, scored: int
    ) -> Picked | None:
        if isinstance(part, Singles):
            table_SP, position_X = part.table_BP, part.position_B
        else:
            table_SP, position_X = part.pages_P[None], part.position_N
        length = table_SP.shape[1] * part.sight.page_tokens
        if length <= self.count or first == part.stop - part.start:
            return None
        picked, scores = [], LastScores(part, scored)
        for at in self._blocks(first, part.stop - part.start, length * (self.kv_heads * _HEAD_BYTES + _TOKEN_BYTES)):
            table = table_SP if isinstance(part, Run) else table_SP[at]
            query_XHD = query_NHD[part.start + at.start : part.start + at.stop]
            score_XT = self._scores(query_XHD, summaries.whole(table).flatten(1, 2), position_X[at], scale)
            picked.append(self.best(score_XT, self.count))
            scores.add(score_XT)
        position_XK = picked[0] if len(picked) == 1 else torch.cat(picked)
        return Picked(position_XK=position_XK, first=first, score_YT=scores.score_YT)

    def _scores(self, query_XHD: torch.Tensor, row_SUC: torch.Tensor, position_X: torch.Tensor, scale: float) -> torch.Tensor:
        """Scores of all tokens: inf for those that are always picked, -inf for those that cannot be seen."""
        whole_X, here_X1 = position_X // self.summary.unit, position_X[:, None]  # units that were whole before this token
        score_XT = self.summary.score(query_XHD, row_SUC, whole_X, scale=scale)
        token_T = torch.arange(score_XT.shape[1], device=score_XT.device)
        always_XT = (token_T < self.sinks) | (token_T > here_X1 - self.recent) | (token_T >= whole_X[:, None] * self.summary.unit)
        return score_XT.masked_fill_(always_XT, torch.inf).masked_fill_(token_T > here_X1, -torch.inf)

    @staticmethod
    def _blocks(first: int, stop: int, query_bytes: int) -> Iterator[slice]:
        """Queries in blocks of bounded memory, with at least one query."""
        size = max(BLOCK_BYTES // query_bytes, 1)
        return (slice(start, min(start + size, stop)) for start in range(first, stop, size))
