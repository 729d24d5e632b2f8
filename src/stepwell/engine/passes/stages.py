"""Rows of whole prefix pages for runs that read nearly everything: one layer at a time, in a scratch of pages like any others.

    on the host     copied over the bus by the kernel that fetches hot rows. The pass does not change them
    on the device   copied when the layer is reached: the pass writes some of them

Does not decide which pages are where. Waits for nothing on the host. Axes as in `sparse/places.py`, and M rows on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.tasks import PageIds
from stepwell.engine.passes.numbers import Send, copy, on_device
from stepwell.memory.row_pages import ABSENT, RowPages
from stepwell.sparse.places import Places
from stepwell.sparse.resolve import Fetch, Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """Which pages of a scratch come from where, for all layers of one pass."""

    pages: int
    on_host: int
    plan: Plan  # host row -> row of the scratch
    at_P: torch.Tensor  # pages of the scratch,
    rows_P: torch.Tensor  # and the ROWS pages that they are copied from


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sides:
    """What `Fetch` copies between: pages of the host, and a scratch in place of hot pages."""

    host_PLRE: torch.Tensor
    rows_PLRE: torch.Tensor
    page_rows: int
    device: torch.device


class Stages:
    """A scratch for one layer of the longest run."""

    def __init__(self, places: Places, pages: int, *, fetch: Fetch, send: Send = copy) -> None:
        self._places, self._fetch, self._send = places, fetch, send
        stored = places.rows_PLRE
        self._scratch_PRE = stored.new_zeros(pages, *stored.shape[2:])
        self.copied_bytes = 0  # from the host, so far

    @property
    def nbytes(self) -> int:
        return self._scratch_PRE.nbytes

    def plan(self, pages: PageIds, row_pages: RowPages) -> Staged:
        """Where rows of these prefix pages come from: page i of the scratch is the i-th."""
        size, rows, host = self._places.page_rows, row_pages.rows[pages], row_pages.host[pages]
        at, here = np.flatnonzero(host != ABSENT), np.flatnonzero(rows != ABSENT)
        row_R = np.arange(size)
        source, target = ((each[:, None] * size + row_R).reshape(-1) for each in (host[at].astype(np.int64), at))
        numbers = self._numbers(np.concatenate([[len(source)], source, target, here, rows[here]]))
        parts = numbers.split([1, len(source), len(target), len(here), len(here)])
        plan = Plan(0, self._places.device)
        plan.count_1, plan.source_M, plan.target_M = (part.int() for part in parts[:3])
        return Staged(pages=len(pages), on_host=len(at), plan=plan, at_P=parts[3], rows_P=parts[4])

    def stage(self, layer: int, staged: Staged) -> torch.Tensor:
        """This layer's rows, until the next call."""
        places, scratch_PRE = self._places, self._scratch_PRE
        if staged.on_host:
            layers = places.host_PLRE.shape[1]
            onto = _Sides(
                host_PLRE=places.host_PLRE, rows_PLRE=scratch_PRE[:, None].expand(-1, layers, -1, -1),
                page_rows=places.page_rows, device=places.device,
            )  # fmt: skip
            self._fetch(onto, layer, staged.plan)
            self.copied_bytes += staged.on_host * scratch_PRE[0].nbytes
        if len(staged.at_P):
            scratch_PRE[staged.at_P] = places.rows_PLRE[staged.rows_P, layer]
        return scratch_PRE[: staged.pages]

    def _numbers(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return on_device(values.astype(np.int64, copy=False), self._places.device, self._send)
