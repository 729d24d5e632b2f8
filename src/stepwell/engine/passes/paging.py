"""Which pages the segments of a pass attend to: page ids and lengths for kernels that read pages, padded tables and masks for
plain torch.

    pages     | . . . . | . . . . | . . x x |       one segment: pages of 4 tokens; the first page begins with token `first`
    tokens                  ^ position  ^ end       each token attends to those before it, or to a window of them

Only computes places. Tensors end in their axes: N tokens, B singles, P pages, T tokens of context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.engine.passes.numbers import Send, copy, on_device


class RequestRows(NamedTuple):
    """One request's part of a pass: tokens `[position, position + len(tokens))`, and the pages of its lease.

    A tuple, because every step creates one for each request; created by keyword.
    """

    tokens: Sequence[int] | npt.NDArray[np.int32]
    position: int
    prefix_pages: PageIds
    window_pages: PageIds = NO_PAGES
    first_window: int = 0
    point_page: int | None = None
    point_copy: int | None = None  # the page that gets a copy of that one after the pass
    slot: int | None = None  # where its open groups are, for models that leave some
    resumes: bool = False  # the first pass of its lease: its point page holds the open groups at `position`
    num_logits: int = 1  # the number of its last tokens whose logits are wanted
    hot_numbers: PageIds = NO_PAGES  # of its hot pages, if rows of it are on the host alone
    picks_from: int = 0  # from here a selector picks: earlier tokens attend to everything. Unused without a selector

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """One segment: rows `[start, stop)` of the batch, its first token's position, and the pages it attends to."""

    start: int
    stop: int
    position: int
    first: int  # the token at which its first page begins
    pages: PageIds
    picks_from: int = 0  # from here a selector picks: earlier tokens attend to everything

    @property
    def end(self) -> int:
        return self.position + self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """The attention scope of a pass: how many tokens each attends to (None for all), and the first token that is visible."""

    page_tokens: int
    window: int | None
    first_seen: int
    device: str | torch.device
    dtype: torch.dtype  # of masks
    send: Send = copy  # how larger numbers are sent to the device

    def mask(self, here: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Added to scores: 0 where a token may attend, -inf elsewhere."""
        unseen = context > here
        if self.first_seen:
            unseen |= context < self.first_seen
        if self.window is not None:
            unseen |= context <= here - self.window
        return torch.zeros(unseen.shape, device=unseen.device, dtype=self.dtype).masked_fill_(unseen, -torch.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class Singles:
    """One token each of several requests: rows `[start, stop)` of the batch, and the pages each attends to."""

    start: int
    stop: int
    table_BP: torch.Tensor  # padded with pages of their own
    position_B: torch.Tensor
    first_B: torch.Tensor  # the token at which the first page of each begins
    sight: Sight
    picks: bool = True  # whether a selector picks for them; otherwise they attend to everything

    @cached_property
    def mask_BT(self) -> torch.Tensor:
        return self.fresh_mask()

    def fresh_mask(self) -> torch.Tensor:
        """The mask of the present positions."""
        tokens = torch.arange(self.table_BP.shape[1] * self.sight.page_tokens, device=self.table_BP.device)
        return self.sight.mask(self.position_B[:, None], self.first_B[:, None] + tokens)

    @property
    def made_mask(self) -> torch.Tensor | None:
        """The mask, if it was computed."""
        return self.__dict__.get("mask_BT")


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Several tokens of one request: rows `[start, stop)` of the batch, and the pages they attend to."""

    start: int
    stop: int
    pages_P: torch.Tensor
    position: int
    first: int  # the token at which its first page begins
    sight: Sight
    picks_from: int = 0  # as `Look`
    tiled: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def position_N(self) -> torch.Tensor:
        return torch.arange(self.position, self.position + self.stop - self.start, device=self.pages_P.device)

    @cached_property
    def mask_NT(self) -> torch.Tensor:
        tokens = torch.arange(len(self.pages_P) * self.sight.page_tokens, device=self.pages_P.device)
        return self.sight.mask(self.position_N[:, None], self.first + tokens[None])

    def mask_for(self, group: int) -> torch.Tensor:
        """The mask of `group` query heads one after the other; made once for all layers."""
        if group not in self.tiled:
            self.tiled[group] = self.mask_NT.repeat(group, 1)
        return self.tiled[group]


class Paging:
    """Pages of one kind for a batch: where every token's row is written, and which rows each may attend to.

    Singles come first. Tables and masks are computed on first use: kernels that read pages need none. `plans` are for those
    kernels: what they compute once for all layers of a pass. `plan_numbers` numbers them, over everything divided from one
    paging: pieces of a pass take turns in every layer, and none may replace another's plan.
    """

    fixed = False  # whether its tensors stay at their addresses from pass to pass, as a captured step needs

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
        self.plan_numbers = itertools.count()
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

    def cut(self, first: int, stop: int, pages: PageIds | None = None) -> Paging:
        """The paging of some segments alone: all singles, or a single run, which may be over other `pages`."""
        mine = self.looks[first:stop]
        start, end = mine[0].start, mine[-1].stop
        looks = [
            replace(look, start=look.start - start, stop=look.stop - start, pages=look.pages if pages is None else pages)
            for look in mine
        ]
        made = Paging(
            looks, self.sight, page_N=self.page_N[start:end], row_N=self.row_N[start:end],
            num_singles=max(self.num_singles - first, 0), together=self._together if first < self.num_singles else lambda: (),
        )  # fmt: skip
        made.plan_numbers = self.plan_numbers
        return made

    # ---- inside -----------------------------------------------------------------------------------

    def _table(self, looks: Sequence[Look]) -> Singles:
        count, longest = len(looks), max(len(look.pages) for look in looks)
        table, rest = np.zeros((count, longest), np.int64), np.zeros((2, count), np.int64)
        for row, look in enumerate(looks):
            table[row, : len(look.pages)], table[row, len(look.pages) :] = look.pages, look.pages[0]
            rest[:, row] = look.position, look.first
        together = on_device(np.concatenate([table.flatten(), rest.flatten()]), self.sight.device, self.sight.send)
        table_X, position_B, first_B = together.split((count * longest, count, count))
        return Singles(
            start=looks[0].start, stop=looks[-1].stop, table_BP=table_X.view(count, longest), position_B=position_B,
            first_B=first_B, sight=self.sight, picks=all(look.position >= look.picks_from for look in looks),
        )  # fmt: skip

    def _run(self, look: Look) -> Run:
        pages_P = on_device(look.pages.astype(np.int64), self.sight.device, self.sight.send)
        return Run(
            start=look.start, stop=look.stop, pages_P=pages_P, position=look.position, first=look.first, sight=self.sight,
            picks_from=look.picks_from,
        )  # fmt: skip
