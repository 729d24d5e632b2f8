"""Attention of DeepSeek-V4: a window of rows in every layer, and in most also entries of compressed groups.

    row        key and value in one, the same for all heads; its last channels are turned by its position
    seen       by a query in rows and entries: turned back by the query's position, so that only distances count
    entries    of every group of `ratio` tokens; all of them, or those an index picks by keys of its own

Reads and writes its own layer of each state. Axes: N tokens, C channels, H heads, D width of a row, G groups that close,
R tokens of a group, E what a compressor makes of a token, O groups of heads in the product out, X pairs of channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm

from stepwell.engine.models.layers import Linear, RMSNorm, Rotary
from stepwell.engine.ops.compression import Entries, Index, Overlap, close_groups, keep_entries, pool
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.groups import Groups
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import RowFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Closing:
    """Groups of one ratio in a pass, and the rotation of their entries: by the position of their first token."""

    groups: Groups
    turn_GX: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """What all layers of a pass need. Layers with entries are turned at another pace than those without."""

    paging: Paging
    turn_NX: torch.Tensor
    turn_with_entries_NX: torch.Tensor
    closing: Mapping[int, Closing]  # by ratio


def turns(rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """One complex number for each position and pair of channels."""
    angle = positions[:, None].float() * rotary.frequencies
    return torch.polar(torch.full_like(angle, rotary.scale), angle)


def turn(x: torch.Tensor, turn_X: torch.Tensor) -> torch.Tensor:
    """The last channels turned, neighbour against neighbour; those before them as they are."""
    still, turned = x.split((x.shape[-1] - 2 * turn_X.shape[-1], 2 * turn_X.shape[-1]), dim=-1)
    pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)).contiguous()) * turn_X
    return torch.cat([still, torch.view_as_real(pairs).flatten(-2).to(x.dtype)], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """Some channels of an entry: the state they are kept in, and how."""

    state: str
    width: int
    norm: RMSNorm
    format: RowFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compressor:
    """`into` makes values, then gates. Where groups overlap, each are first halves and then second halves of all channels."""

    layer: int
    ratio: int
    into: Linear
    bias_RE: torch.Tensor
    kept: tuple[Kept, ...]
    overlap: str | None  # the state of what counts for the group after
    kernels: Kernels

    def __call__(self, x_NC: torch.Tensor, closing: Closing, batch: Batch) -> None:
        """Keeps the entries of all groups that close."""
        groups = closing.groups
        assert batch.open_groups is not None, "this model leaves groups open, and the batch has no place for them"
        open_XRE = batch.open_groups.layer(f"c{self.ratio}_buffer", self.layer)
        grouped_GRE = close_groups(groups, self.into(x_NC), open_XRE)
        if not len(groups):
            return
        value, gate = grouped_GRE.chunk(2, dim=-1)
        gate = gate.float() + self.bias_RE
        if self.overlap is not None:
            bytes_PB = batch.pages.layer_PRE(self.overlap, self.layer)[:, 0].view(torch.uint8)
            value, gate = Overlap(bytes_PB=bytes_PB, dtype=x_NC.dtype).join(groups, value, gate)
        pooled_GC = pool(value, gate)
        for kept, part_GC in zip(self.kept, pooled_GC.split([each.width for each in self.kept], dim=-1), strict=True):
            entry_GC = turn(kept.norm(part_GC), closing.turn_GX)
            rows = batch.rows(kept.state, self.layer, kept.format)
            keep_entries(groups, rows, entry_GC, self.kernels.write_rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Indexer:
    """Asks index keys, with queries of its own from the same low-rank one."""

    heads: int
    count: int
    query: Linear
    weight: Linear
    scale: float

    def ask(self, x_NC: torch.Tensor, low_NC: torch.Tensor, turn_NX: torch.Tensor, keys: Kept, layer: int, batch: Batch) -> Index:
        return Index(
            query_NID=turn(self.query(low_NC).unflatten(1, (self.heads, -1)), turn_NX[:, None]),
            weight_NI=self.weight(x_NC).float() * self.scale,
            keys=batch.rows(keys.state, layer, keys.format),
            count=self.count,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedAttention:
    """`into` makes the low-rank query and the row. The product out is one for each group of heads, then one for all."""

    layer: int
    heads: int
    into: Linear
    query_norm: RMSNorm
    query: Linear
    row: Kept
    sinks_H: torch.Tensor
    out_OXC: torch.Tensor
    out: Linear
    kernels: Kernels
    compressor: Compressor | None = None
    indexer: Indexer | None = None

    def __call__(self, x_NC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
        turn_NX = shared.turn_NX if self.compressor is None else shared.turn_with_entries_NX
        low_NC, row_NC = self.into(x_NC).split((self.query.weight.shape[1], self.row.width), dim=-1)
        low_NC = self.query_norm(low_NC)
        query_NHD = self.query(low_NC).unflatten(1, (self.heads, -1))
        query_NHD = turn(rms_norm(query_NHD, query_NHD.shape[2:], eps=self.query_norm.eps), turn_NX[:, None])
        rows = batch.rows(self.row.state, self.layer, self.row.format)
        self.kernels.write_rows(rows, shared.paging.page_N, shared.paging.row_N, turn(self.row.norm(row_NC), turn_NX))
        entries = self._entries(x_NC, low_NC, shared, batch)
        scale = self.row.width**-0.5
        seen_NHD = self.kernels.attend_shared(query_NHD, rows, shared.paging, entries, scale=scale, sinks_H=self.sinks_H)
        return self._leave(turn(seen_NHD, turn_NX.conj()[:, None]))

    def _entries(self, x_NC: torch.Tensor, low_NC: torch.Tensor, shared: Shared, batch: Batch) -> Entries | None:
        """Closes what the pass completes, and says what there is to look at."""
        compressor, indexer = self.compressor, self.indexer
        if compressor is None:
            return None
        closing, kept = shared.closing[compressor.ratio], compressor.kept
        compressor(x_NC, closing, batch)
        index = None
        if indexer is not None and any(seen.entries > indexer.count for seen in closing.groups.seen):
            index = indexer.ask(x_NC, low_NC, shared.turn_with_entries_NX, kept[1], compressor.layer, batch)
        rows = batch.rows(kept[0].state, compressor.layer, kept[0].format)
        return Entries(groups=closing.groups, rows=rows, index=index)

    def _leave(self, seen_NHD: torch.Tensor) -> torch.Tensor:
        seen_ONC = seen_NHD.flatten(1).unflatten(1, (len(self.out_OXC), -1)).transpose(0, 1)
        return self.out((seen_ONC @ self.out_OXC.mT).transpose(0, 1).flatten(1))
