"""KV cache groups as states of a model, and block tables as names of pages. Arithmetic only; no group is known by a class here.

    table       group 0 (full)      [5, 9, 2, 7, ...]     block i holds tokens [i, i + 1) * block_tokens
                group 1 (window)    [0, 0, 4, 8, ...]     0 is no block: outside the window
                group 2 (state)     [0, 6, 3, ...]        block i holds the state after (i + 1) * block_tokens tokens
    page p      prefix name [2 * p, 2 * p + 1 of group 0], where a page has two of its blocks

A page is as long as the engine's own step between boundaries, a multiple of every group's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.shapes import Point, Prefix, Shape, Window
from stepwell.base.spec.states import StateSpec
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.tiers.external import EnginePages
from stepwell.transfer.block_tables import NO_BLOCK

Table = Sequence[Sequence[int]]  # of one request: block numbers for each group of the engine
Offered = Mapping[tuple[int, int], int]  # blocks with state, by group and boundary, in addition to the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share block numbers."""

    number: int  # in the engine's list
    kind: Kind  # PREFIX, WINDOW or POINT
    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int  # of one layer, padding left out
    dtype: str  # and everything else that defines the format of its bytes
    window_tokens: int = 0  # how far back a WINDOW group looks

    @property
    def state(self) -> str:
        return f"{self.number}-{self.kind.label}"


def spec_of(groups: Sequence[Group], *, page_tokens: int, row_order: str) -> ModelSpec:
    """What the engine's groups remember. `row_order` says how it lays rows out inside a block. Raises ConfigError."""
    states = tuple(_state(group, page_tokens) for group in groups)
    spec = ModelSpec(name="vllm", states=states, page_tokens=page_tokens, row_order=row_order)
    assert not spec.window_tokens or spec.window_page_tokens == page_tokens, f"{spec.window_page_tokens=} {page_tokens=}"
    return spec


def _state(group: Group, page_tokens: int) -> StateSpec:
    if page_tokens % group.block_tokens:
        raise ConfigError(
            f"group {group.number} has blocks of {group.block_tokens} tokens, which do not divide the {page_tokens} of a page"
        )
    shape: Shape
    if group.kind is Kind.POINT:
        shape, row_bytes = Point(), group.block_bytes
    else:
        row_bytes, rest = divmod(group.block_bytes, group.block_tokens)
        if rest:
            raise ConfigError(f"group {group.number}: {group.block_bytes} bytes are not {group.block_tokens} rows of equal size")
        # Windows are kept in whole pages of the engine's, so at least one.
        shape = Prefix() if group.kind is Kind.PREFIX else Window(tokens=max(group.window_tokens, page_tokens))
    return StateSpec(name=group.state, shape=shape, layers=len(group.layers), row_bytes=row_bytes, dtype=group.dtype)


def blocks_per_page(group: Group, page_tokens: int) -> int:
    return 1 if group.kind is Kind.POINT else page_tokens // group.block_tokens


class Names:
    """A request's blocks as names of pages."""

    def __init__(self, groups: Sequence[Group], spec: ModelSpec) -> None:
        self._spec = spec
        self._of = {kind: [group for group in groups if group.kind is kind] for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT)}

    @property
    def has_points(self) -> bool:
        return bool(self._of[Kind.POINT])

    def pages(self, table: Table, since: int, upto: int, *, ahead: bool) -> EnginePages:
        """Prefix pages of tokens `[since, upto)`, and no checkpoint."""
        page = self._spec.page_tokens
        prefix = self._named(table, Kind.PREFIX, range(since // page, upto // page))
        return EnginePages(prefix=prefix, first_page=since // page, ahead=ahead)

    def with_checkpoint(
        self, table: Table, since: int, upto: int, *, ahead: bool, offered: Offered | None = None, held: int = 0
    ) -> EnginePages | None:  # fmt: skip
        """The same with a checkpoint at `upto`, less window pages before `held`; None where the engine has no state there."""
        found = self.pages(table, since, upto, ahead=ahead)
        if not self._has_windows(table, upto, held):
            return None
        points = self._points(table, upto, offered or {})
        if points is None:
            return None
        span = self._spec.window_span(upto)
        pages = range(min(max(span.start, held // self._spec.page_tokens), span.stop), span.stop)
        windows = self._named(table, Kind.WINDOW, pages) if len(span) else NO_PAGES
        return EnginePages(prefix=found.prefix, first_page=found.first_page, windows=windows, points=points, ahead=ahead)

    def _named(self, table: Table, kind: Kind, pages: range) -> PageIds:
        """Rows of block numbers; a model without such a state still names its pages, by nothing."""
        columns = [np.empty((len(pages), 0), np.int32)]
        for group in self._of[kind]:
            count = blocks_per_page(group, self._spec.page_tokens)
            blocks = np.asarray(table[group.number][pages.start * count : pages.stop * count], np.int32)
            assert len(blocks) == len(pages) * count, f"group {group.number} has too few blocks for {pages}"
            columns.append(blocks.reshape(len(pages), count))
        return np.concatenate(columns, axis=1)

    def _has_windows(self, table: Table, boundary: int, held: int) -> bool:
        """Whether every block is there that a token at `boundary` looks at: one of them may have been freed."""
        for group in self._of[Kind.WINDOW]:
            first = max(boundary - group.window_tokens + 1, held, 0) // group.block_tokens
            blocks = table[group.number][first : -(-boundary // group.block_tokens)]
            if any(block == NO_BLOCK for block in blocks):
                return False
        return True

    def _points(self, table: Table, boundary: int, offered: Offered) -> PageIds | None:
        if not self.has_points:
            return NO_PAGES
        blocks = []
        for group in self._of[Kind.POINT]:
            block = offered.get((group.number, boundary), NO_BLOCK)
            place = boundary // group.block_tokens - 1
            if block == NO_BLOCK and place < len(table[group.number]):
                block = table[group.number][place]
            if block == NO_BLOCK:
                return None
            blocks.append(block)
        return np.array([blocks], np.int32)
