"""Attention over rows that are partly on the host only.

Rows that singles and short runs selected are read where they are. Rows of longer runs are copied to a staging buffer first, one
layer of one run at a time.

The buffer consists of pages like any others, so that the same kernels read it. A pass without such runs is computed at once.
Never selects. Axes as in `selection.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepwell.engine.ops.selection import Selection
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import Rows
from stepwell.engine.passes.spilled import Spilled

Attend = Callable[[torch.Tensor, Rows, Paging, Selection], torch.Tensor]  # of queries, over the rows selected for each


def attend_spilled(
    attend: Attend, query_NHC: torch.Tensor, rows: Rows, spilled: Spilled, selection: Selection
) -> torch.Tensor:  # fmt: skip
    """As `attend` over the whole pass. What singles and short runs selected has been fetched."""
    seen = [
        attend(query_NHC[piece.start : piece.stop], spilled.rows(rows, piece), piece.paging, selection[piece.parts])
        for piece in spilled.pieces()
    ]
    return seen[0] if len(seen) == 1 else torch.cat(seen)
