"""Attention to compressed entries, in plain torch: runs everywhere, and is the reference of faster kernels.

    entry      of a group: its tokens' values, weighed channel by channel by a softmax over their gates
    overlap    the first half of a group's channels counts for the entry after it, the second half for its own
    seen       one softmax over a window of rows, over entries, and over a sink, which takes weight and gives nothing

All rows are key and value in one, the same for all heads. Knows no weights and no models. Axes as in `passes/groups.py`, and
H heads, D channels of a row, I index heads, J rows of a window, K entries that are looked at, C channels of an entry, E of what
a token makes, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from stepwell.engine.ops.selection import best
from stepwell.engine.passes.groups import Groups, Seen
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import Rows

BLOCK_NUMBERS = 16 << 20  # of scores, or of gathered entries, at a time


# ---- making entries -------------------------------------------------------------------------------


def close_groups(groups: Groups, made_NE: torch.Tensor, open_XRE: torch.Tensor) -> torch.Tensor:
    """The inputs of all tokens of the groups that close, `[G, R, E]`. Leaves those of later tokens in their slots."""
    older, left = groups.older, groups.left
    if groups.closes_G is not None:
        open_XRE[left.slot, left.row] = made_NE[left.of]
        return open_XRE[left.slot]
    grouped_GRE = made_NE[groups.token_GR]
    grouped_GRE[older.of, older.row] = open_XRE[older.slot, older.row]
    open_XRE[left.slot, left.row] = made_NE[left.of]
    return grouped_GRE


def pool(value_GRC: torch.Tensor, gate_GRC: torch.Tensor) -> torch.Tensor:
    """Entries `[G, C]`, in fp32."""
    return (value_GRC.float() * gate_GRC.softmax(dim=1)).sum(dim=1)


def keep_entries(groups: Groups, rows: Rows, entry_GC: torch.Tensor, write: Callable[..., None]) -> None:
    """Writes the entries of groups that close. The places of the other groups keep their bytes."""
    page_G, row_G = groups.page_G, groups.row_G
    before_GE = None if groups.closes_G is None else rows.stored_PRE[page_G, row_G]
    write(rows, page_G, row_G, entry_GC)
    if before_GE is not None and groups.closes_G is not None:
        now_GE = rows.stored_PRE[page_G, row_G]
        rows.stored_PRE[page_G, row_G] = torch.where(groups.closes_G[:, None], now_GE, before_GE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlap:
    """One layer's overlap state: values as the model computes, then gates in fp32, whatever that format is."""

    bytes_PB: torch.Tensor
    dtype: torch.dtype

    def join(self, groups: Groups, value_GRE: torch.Tensor, gate_GRE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The second halves of each group's tokens, after the first halves of the group before it: `[G, 2R, E / 2]`.

        Leaves the first halves of each segment's last group in its point page.
        """
        (value_GRC, own_value), (gate_GRC, own_gate) = value_GRE.chunk(2, dim=-1), gate_GRE.chunk(2, dim=-1)
        value_ZRC, gate_ZRC = self._read(groups, value_GRC.shape[1:])
        self._write(groups, value_GRC[groups.last_Z], gate_GRC[groups.last_Z])
        before_value = torch.cat([value_GRC, value_ZRC])[groups.before_G]
        before_gate = torch.cat([gate_GRC, gate_ZRC])[groups.before_G]
        return torch.cat([before_value, own_value], dim=1), torch.cat([before_gate, own_gate], dim=1)

    def _read(self, groups: Groups, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Group 0 has none before it: whatever the page holds, its values are 0 and its gates closed."""
        size, none = shape.numel(), groups.first_Z[:, None]
        value_ZB, gate_ZB = self.bytes_PB[groups.point_Z].split((size * self.dtype.itemsize, size * 4), dim=1)
        value_ZX = value_ZB.contiguous().view(self.dtype).masked_fill(none, 0)
        gate_ZX = gate_ZB.contiguous().view(torch.float32).masked_fill(none, -torch.inf)
        return value_ZX.view(-1, *shape), gate_ZX.view(-1, *shape)

    def _write(self, groups: Groups, value_ZRC: torch.Tensor, gate_ZRC: torch.Tensor) -> None:
        parts = [value_ZRC.to(self.dtype), gate_ZRC.float()]
        bytes_ZB = torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], dim=1)
        if groups.closes_G is not None:
            bytes_ZB = torch.where(groups.closes_G[:, None], bytes_ZB, self.bytes_PB[groups.point_Z])
        self.bytes_PB[groups.point_Z] = bytes_ZB


# ---- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """Selects entries: for each token the `count` best by the sum over heads of weight * relu(query . key), in fp32.

    Ties go to the first. Nothing is scored if no token sees more than `count` entries.
    """

    query_NID: torch.Tensor
    weight_NI: torch.Tensor
    keys: Rows
    count: int

    def pick(self, seen: Seen, key_SWD: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that some tokens of each segment attend to, `[S, T, K]`, and which of them they may not see."""
        query_STID = _of(self.query_NID, seen)[:, tokens].float()
        likeness_STIW = _products(query_STID, key_SWD).relu_()
        score_STW = (_of(self.weight_NI, seen)[:, tokens, None].float() @ likeness_STIW).squeeze(2)
        hidden_STW = seen.hidden_STW(tokens)
        entry_XK = best(score_STW.masked_fill_(hidden_STW, -torch.inf).flatten(0, 1), self.count)
        entry_STK = entry_XK.view(*hidden_STW.shape[:2], self.count)
        return entry_STK, hidden_STW.gather(2, entry_STK)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """The entries that a layer attends to in addition to its window: all of them, or those that an index selects."""

    groups: Groups
    rows: Rows
    index: Index | None = None


class AttendShared(Protocol):
    def __call__(
        self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, entries: Entries | None, *, scale: float, sinks_H: torch.Tensor
    ) -> torch.Tensor: ...


def attend_shared(
    query_NHD: torch.Tensor, rows: Rows, paging: Paging, entries: Entries | None, *, scale: float, sinks_H: torch.Tensor
) -> torch.Tensor:
    """The attention of each query over its window and over entries: `[N, H, D]`."""
    outs = []
    looks = [(each.table_BP, each.mask_BT[:, None], each.start, each.stop) for each in paging.singles]
    looks += [(each.pages_P[None], each.mask_NT[None], each.start, each.stop) for each in paging.runs]
    for number, (table_SP, mask_STJ, start, stop) in enumerate(looks):
        query_STHD = query_NHD[start:stop].unflatten(0, (len(table_SP), -1))
        window_SJD = rows.whole(table_SP).flatten(1, 2)
        seen = None if entries is None else entries.groups.seen[number]
        if entries is None or seen is None or not seen.entries:
            outs.append(_weigh(query_STHD, window_SJD, mask_STJ, None, None, scale, sinks_H).flatten(0, 1))
        else:
            blocks = _look(query_STHD, window_SJD, mask_STJ, entries, seen, scale, sinks_H)
            outs.append(torch.cat(list(blocks), dim=1).flatten(0, 1))
    return torch.cat(outs)


def _look(
    query_STHD: torch.Tensor, window_SJD: torch.Tensor, mask_STJ: torch.Tensor, entries: Entries, seen: Seen, scale: float,
    sinks_H: torch.Tensor,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """Some tokens of a run at a time, so that scores and gathered entries take a bounded piece of memory.

    Singles all at once: index keys in fp32 and scores then take about 1 KiB for each entry, whose tokens have 27 KiB of pages.
    """
    (segments, length, heads, width), rows, index = query_STHD.shape, entries.rows, entries.index
    numbers = heads * (seen.entries + mask_STJ.shape[2])
    if index is None or seen.entries <= index.count:
        entry_SWD = rows.whole(seen.table_SP).flatten(1, 2)
        for at in _blocks(length, segments * numbers):
            yield _weigh(query_STHD[:, at], window_SJD, mask_STJ[:, at], entry_SWD, seen.hidden_STW(at), scale, sinks_H)
        return
    key_SWD = index.keys.whole(seen.table_SP).flatten(1, 2).float()
    numbers = max(index.weight_NI.shape[1] * seen.entries, index.count * width, heads * (index.count + mask_STJ.shape[2]))
    for at in _blocks(length, segments * numbers):
        entry_STK, hidden_STK = index.pick(seen, key_SWD, at)
        picked_STKD = rows.some(*seen.place(entry_STK))
        yield _weigh(query_STHD[:, at], window_SJD, mask_STJ[:, at], picked_STKD, hidden_STK, scale, sinks_H)


def _weigh(
    query_STHD: torch.Tensor, window_SJD: torch.Tensor, mask_STJ: torch.Tensor, entries: torch.Tensor | None,
    hidden_STK: torch.Tensor | None, scale: float, sinks_H: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Softmax attention over all of it. `entries` are each segment's, `[S, K, D]`, or each token's, `[S, T, K, D]`."""
    scores = [_products(query_STHD, window_SJD) * scale + mask_STJ[:, :, None]]
    if entries is not None and hidden_STK is not None:
        scores.append((_products(query_STHD, entries) * scale).masked_fill_(hidden_STK[:, :, None], -torch.inf))
    sink_STH1 = sinks_H[:, None].expand(*query_STHD.shape[:3], 1)
    weights = torch.cat([*scores, sink_STH1], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query_STHD.dtype)
    near = window_SJD.shape[1]
    out_STHD = _products(weights[..., :near], window_SJD.mT)
    return out_STHD if entries is None else out_STHD + _products(weights[..., near:-1], entries.mT)


def _products(x_STHD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Products of each head with each row, `[S, T, H, K]`: rows of its segment, `[S, K, D]`, or of its token, `[S, T, K, D]`."""
    if rows.ndim == x_STHD.ndim:
        return x_STHD @ rows.mT
    product_STHK: torch.Tensor = (x_STHD.flatten(1, 2) @ rows.mT).unflatten(1, x_STHD.shape[1:3])
    return product_STHK


def _of(x_N: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Rows of the batch as `[S, T, ...]`."""
    x_ST: torch.Tensor = x_N[seen.start : seen.stop].unflatten(0, seen.count_ST.shape)
    return x_ST


def _blocks(length: int, numbers: int) -> Iterator[slice]:
    """Tokens in blocks of bounded memory, for `numbers` numbers each, with at least one token."""
    size = max(BLOCK_NUMBERS // numbers, 1)
    return (slice(start, start + size) for start in range(0, length, size))
