"""Pages that an engine keeps in several blocks of its own memory: the block and layer that hold each byte of a host page.

    host page    |-- group 0: layer 0 --|-- layer 1 --|-- group 1: layer 0 --| ...
                  block 7 | block 8      7 | 8          block 3
    a name       [7, 8, 3]                            one column for each block of each group

All layers of a group use the same block numbers. Block 0 is reserved: nothing is copied to it, and zeros are saved in place of
its content. Says what to copy; copies nothing but those zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import Copy, PageIds
from stepwell.transfer.page_tables import PagePairs, PageTable

NO_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBlocks:
    """One layer of one state in the engine's memory, `[block][byte]`, and how many of its blocks make up a page."""

    state: str
    layer: int
    rows_NB: torch.Tensor
    blocks_per_page: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    table: PageTable  # of the engine's blocks
    column: int  # of a name
    start: int  # in a host page
    size_bytes: int


class BlockTables:
    """All layers of an engine, by the kind of object that they belong to. Raises ConfigError if they do not fit the spec."""

    def __init__(self, spec: ModelSpec, layers: Sequence[LayerBlocks]) -> None:
        self.device = layers[0].rows_NB.device
        self._pieces = {kind: _pieces(spec, kind, layers) for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT)}
        self._columns = {kind: max((each.column for each in pieces), default=-1) + 1 for kind, pieces in self._pieces.items()}

    @property
    def columns(self) -> Mapping[Kind, int]:
        """How many blocks a name of each kind has."""
        return self._columns

    def pairs(self, copy: Copy, host: PageTable) -> list[PagePairs]:
        """What to copy, layer by layer. Raises IndexError for invalid names."""
        loads = copy.target.tier is Tier.ENGINE
        kind, blocks_PC = copy.source.kind, copy.target.ids if loads else copy.source.ids
        pages = copy.source.ids if loads else copy.target.ids
        if blocks_PC.ndim != 2 or blocks_PC.shape[1] != self._columns[kind]:
            raise IndexError(f"names of {kind.label} pages have {self._columns[kind]} block(s), got {list(blocks_PC.shape)}")
        host.check(pages)
        return [_pairs(piece, host, pages, blocks_PC[:, piece.column], loads=loads) for piece in self._pieces[kind]]


def _pieces(spec: ModelSpec, kind: Kind, layers: Sequence[LayerBlocks]) -> list[_Piece]:
    pieces, column = [], 0
    for part in spec.parts(kind):
        mine = sorted((each for each in layers if each.state == part.state), key=lambda each: each.layer)
        if [each.layer for each in mine] != list(range(part.layers)):
            raise ConfigError(f"state {part.state!r} has {part.layers} layer(s), and the engine gave {len(mine)}")
        for each in mine:
            size = each.rows_NB.shape[1]
            if size * each.blocks_per_page != part.layer_stride:
                raise ConfigError(
                    f"a page of state {part.state!r} has {part.layer_stride} bytes in a layer, and the engine's "
                    f"{each.blocks_per_page} block(s) have {size} each"
                )
            table = replace(PageTable.of(each.rows_NB), joined=False)  # bytes between two blocks are not ours
            first = part.offset + each.layer * part.layer_stride
            pieces += [
                _Piece(table=table, column=column + number, start=first + number * size, size_bytes=size)
                for number in range(each.blocks_per_page)
            ]
        column += mine[0].blocks_per_page
    return pieces


def _pairs(piece: _Piece, host: PageTable, pages: PageIds, blocks: PageIds, *, loads: bool) -> PagePairs:
    part = host.part(piece.start, piece.size_bytes)
    there = blocks != NO_BLOCK
    if not loads and not there.all():
        for page in pages[~there].tolist():
            first = page * part.stride
            part.bytes_B[first : first + piece.size_bytes].zero_()
    pages, blocks = pages[there], np.ascontiguousarray(blocks[there])
    if loads:
        return PagePairs(source=part, target=piece.table, source_ids=pages, target_ids=blocks)
    return PagePairs(source=piece.table, target=part, source_ids=blocks, target_ids=pages)
