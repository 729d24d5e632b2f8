"""Which pages the segments of a pass look at: page ids and lengths for kernels that read pages, padded tables and masks for plain
torch.

    pages     | . . . . | . . . . | . . x x |       one segment: pages of 4 tokens, the first of which begins with token `first`
    tokens                  ^ position  ^ end       it looks at what is before each of its own tokens, or at a window of that

Only says where things are. Tensors end in their axes: N tokens, B singles, P pages, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.tasks import PageIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """One segment: rows `[start, stop)` of the batch, its first token's position, and the pages it looks at."""

    start: int
    stop: int
    position: int
    first: int  # the token that its first page begins with
    pages: PageIds

    @property
    def end(self) -> int:
        return self.position + self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Singles:
    """One token each of several requests: rows `[start, stop)` of the batch, and the pages each looks at."""

    start: int
    stop: int
    table_BP: torch.Tensor  # padded with pages of their own
    mask_BT: torch.Tensor  # as a run's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Several tokens of one request: rows `[start, stop)` of the batch, and the pages they look at."""

    start: int
    stop: int
    pages_P: torch.Tensor
    mask_NT: torch.Tensor  # added to scores: 0 where a token may look, -inf elsewhere
    tiled: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_for(self, group: int) -> torch.Tensor:
        """The mask of `group` query heads one after the other; made once for all layers."""
        if group not in self.tiled:
            self.tiled[group] = self.mask_NT.repeat(group, 1)
        return self.tiled[group]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """What all segments of a pass have in common: how many tokens each looks at (None for all), and from which token on."""

    page_tokens: int
    window: int | None
    first_seen: int
    device: str | torch.device
    dtype: torch.dtype  # of masks


class Paging:
    """Pages of one kind for a batch: where every token's row is written, and which rows each may look at.

    Singles come first. Tables and masks are made when they are first asked for: kernels that read pages do without. `plans` are
    for those kernels: what they work out once for all layers of a pass.
    """

    fixed = False  # whether its tensors stay where they are from one pass to the next, as a recorded step needs

    def __init__(
        self, looks: Sequence[Look], sight: Sight, *, page_N: torch.Tensor, row_N: torch.Tensor, num_singles: int,
        together: Callable[[], Iterable[range]],
    ) -> None:  # fmt: skip
        """`together` says which singles share a table."""
        self.looks = looks
        self.sight = sight
        self.page_N = page_N
        self.row_N = row_N
        self.num_singles = num_singles
        self.plans: dict[Hashable, Any] = {}
        self._together = together

    @property
    def parts(self) -> tuple[Singles | Run, ...]:
        return (*self.singles, *self.runs)

    @cached_property
    def singles(self) -> tuple[Singles, ...]:
        return tuple(self._table(self.looks[group.start : group.stop]) for group in self._together())

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._run(look) for look in self.looks[self.num_singles :])

    # ---- inside -----------------------------------------------------------------------------------

    def _table(self, looks: Sequence[Look]) -> Singles:
        longest = max(len(look.pages) for look in looks)
        table = np.zeros((len(looks), longest), np.int64)
        for row, look in enumerate(looks):
            table[row, : len(look.pages)], table[row, len(look.pages) :] = look.pages, look.pages[0]
        first_B1 = self._tensor(np.array([[look.first] for look in looks]))
        here_B1 = self._tensor(np.array([[look.position] for look in looks]))
        context_BT = first_B1 + torch.arange(longest * self.sight.page_tokens, device=self.sight.device)
        return Singles(
            start=looks[0].start, stop=looks[-1].stop, table_BP=self._tensor(table), mask_BT=self._mask(here_B1, context_BT)
        )

    def _run(self, look: Look) -> Run:
        here_N1 = torch.arange(look.position, look.end, device=self.sight.device)[:, None]
        tokens = len(look.pages) * self.sight.page_tokens
        context_1T = look.first + torch.arange(tokens, device=self.sight.device)[None]
        return Run(
            start=look.start,
            stop=look.stop,
            pages_P=self._tensor(look.pages.astype(np.int64)),
            mask_NT=self._mask(here_N1, context_1T),
        )

    def _mask(self, here: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        unseen = context > here
        if self.sight.first_seen:
            unseen |= context < self.sight.first_seen
        if self.sight.window is not None:
            unseen |= context <= here - self.sight.window
        return torch.zeros(unseen.shape, device=unseen.device, dtype=self.sight.dtype).masked_fill_(unseen, -torch.inf)

    def _tensor(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.sight.device)
