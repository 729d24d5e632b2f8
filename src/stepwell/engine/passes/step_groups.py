"""Groups of a decode step, in tensors at fixed addresses and with shapes independent of what closes: it can be captured.

    every token    is put into its request's slot, and an entry is made of the whole slot
    kept           is the entry of a group that is complete now; all others are discarded

Only for batches of single tokens. Only computes places, and moves nothing. Axes as in `groups.py`, with a group for each of B
singles.
"""

from __future__ import annotations

import numpy as np
import torch

from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.groups import Groups, Indices, OpenRows, Seen
from stepwell.engine.passes.paging import RequestRows

_NUMBERS = 8  # for each single, before its pages


class StepGroups:
    """The groups of one ratio. `load` puts those of another step with the same number of requests into the same tensors."""

    def __init__(self, batch: Batch, ratio: int, prefix_pages: int) -> None:
        """`prefix_pages` is the most that each request may have."""
        page = batch.spec.page_tokens
        self._ratio = ratio
        self._page_tokens = page
        self._rows = max(page // ratio, 1)  # entries of a page that has any
        self._step = max(ratio // page, 1)  # one page of this many has entries
        self._pages = max(prefix_pages // self._step, 1)
        self._count = len(batch.segments)
        self._numbers_X = self._upload(batch)

    def load(self, batch: Batch) -> None:
        self._numbers_X.copy_(self._upload(batch))

    def groups(self) -> Groups:
        """Computed in every pass, from what was loaded last: the computation is part of a captured graph."""
        first_X, table_X = self._numbers_X.split((_NUMBERS * self._count, self._count * self._pages))
        slot_B, row_B, position_B, page_B, entry_row_B, point_B, closes_B, count_B = first_X.view(_NUMBERS, -1).unbind()
        each_B = torch.arange(self._count, device=self._numbers_X.device)
        left = OpenRows(slot=slot_B, row=row_B, of=each_B)
        seen = Seen(
            start=0, stop=self._count, table_SP=table_X.view(self._count, -1), rows=self._rows, count_ST=count_B[:, None]
        )  # fmt: skip
        return Groups(
            ratio=self._ratio,
            position_G=position_B,
            token_GR=each_B[:, None],
            older=left,
            left=left,
            page_G=page_B,
            row_G=entry_row_B,
            before_G=each_B + self._count,
            last_Z=each_B,
            point_Z=point_B,
            first_Z=position_B == 0,
            seen=(seen,),
            closes_G=closes_B > 0,
        )

    # ---- inside -----------------------------------------------------------------------------------

    def _upload(self, batch: Batch) -> torch.Tensor:
        made = np.stack([self._of(segment) for segment in batch.segments])
        return batch.numbers(np.concatenate([made[:, :_NUMBERS].T.flatten(), made[:, _NUMBERS:].flatten()]))[0]

    def _of(self, segment: RequestRows) -> Indices:
        """A group that does not close uses the place of an entry in the token's own page, and leaves it unchanged."""
        assert segment.slot is not None, "a segment without a slot cannot leave groups open"
        entry, row = divmod(segment.position, self._ratio)
        closes = row == self._ratio - 1
        index = entry // self._rows if self._step == 1 else (entry + 1) * self._step - 1
        place = (index, entry % self._rows) if closes else (segment.position // self._page_tokens, 0)
        point = -1 if segment.point_page is None else segment.point_page
        count = segment.end // self._ratio
        with_entries = segment.prefix_pages[self._step - 1 : -(-count // self._rows) * self._step : self._step]
        made = np.full(_NUMBERS + self._pages, segment.prefix_pages[0], np.int64)
        made[:_NUMBERS] = (
            segment.slot, row, entry * self._ratio, segment.prefix_pages[place[0]], place[1], point, closes, count,
        )  # fmt: skip
        made[_NUMBERS : _NUMBERS + len(with_entries)] = with_entries
        return made
