"""Attention of DeepSeek-V4 by Triton: a window of rows, entries and a sink in one softmax, read where they lie.

    singles    rows and entries straight from their pages, plain or in eight bits
    runs       the same if they are plain; rows in eight bits are decoded once for all queries of the run
    picked     entries that an index picks for each query, by their numbers

One program has one query and some of its heads: all heads look at the same rows, which are key and value in one. Sums in fp32.
Importing needs Triton. Axes as in `ops/compression.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.compression import Entries
from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_triton.gather import gather_rows
from stepwell.engine.ops.on_triton.rows import Views, exact_number, power_of_two, views_of
from stepwell.engine.ops.on_triton.selection import TritonSelect
from stepwell.engine.passes.groups import Seen
from stepwell.engine.passes.paging import Paging, Run, Singles
from stepwell.engine.passes.rows import PLAIN, Powers, Rows

_KEYS = 32  # rows that are looked at together
_SINGLE_HEADS, _RUN_HEADS = 16, 64  # of one program: singles are few, and must fill the device
_LEAST = 16  # channels of a product


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Rows of some queries: by pages of their own, or by the same ones for all."""

    rows: Rows
    views: Views
    table_SP: torch.Tensor

    @classmethod
    def of(cls, rows: Rows, table_SP: torch.Tensor, *, decoded: bool) -> Source:
        """`decoded`: rows in eight bits are copied first, as plain numbers, in pages of the same size."""
        if decoded and rows.format is not PLAIN:
            assert len(table_SP) == 1, f"the pages of one run, got those of {len(table_SP)}"
            pages_PRD = gather_rows(rows, table_SP)[0].unflatten(0, (-1, rows.stored_PRE.shape[1]))
            rows, table_SP = Rows(pages_PRD, PLAIN, rows.dtype), torch.arange(len(pages_PRD), device=table_SP.device)[None]
        views = views_of(rows)
        assert views is not None, f"rows of {rows.format} go to plain torch"
        return cls(rows, views, table_SP)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.views.eight_PRE, self.views.scale_PRE, self.views.exact_PRE, self.table_SP

    def strides(self) -> tuple[int, ...]:
        views = self.views
        pairs = [(each.stride(0), each.stride(1)) for each in (views.eight_PRE, views.scale_PRE, views.exact_PRE)]
        return (self.table_SP.stride(0) if len(self.table_SP) > 1 else 0, *(stride for pair in pairs for stride in pair))

    def kind(self, prefix: str) -> dict[str, int | bool]:
        """What a kernel is made for."""
        views, kept = self.views, self.rows.format
        made = {"PAGE": self.rows.stored_PRE.shape[1], "EIGHT": views.width, "TILE": views.tile, "SCALE_AT": views.scale_at}
        made |= {"EXACT_AT": views.exact_at, "PLAIN": kept is PLAIN, "POWERS": isinstance(kept, Powers)}
        return {f"{prefix}_{name}": value for name, value in made.items()}


class TritonShared:
    """`attend_shared` for CUDA."""

    def __init__(self, select: TritonSelect) -> None:
        self._select = select

    def __call__(
        self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, entries: Entries | None, *, scale: float, sinks_H: torch.Tensor
    ) -> torch.Tensor:
        every = [rows] if entries is None else [rows, entries.rows, *([] if entries.index is None else [entries.index.keys])]
        if query_NHD.dtype != rows.dtype or any(views_of(each) is None for each in every):
            raise NoKernel("rows of this layout")
        if paging.sight.window is None or paging.sight.first_seen:
            raise NoKernel("contexts without a window, or that begin behind their first token")
        query_NHD = query_NHD.contiguous()
        out_NHD = torch.empty_like(query_NHD)
        for number, part in enumerate(paging.parts):
            mine, seen = slice(part.start, part.stop), None if entries is None else entries.groups.seen[number]
            table_SP = part.table_BP if isinstance(part, Singles) else part.pages_P[None]
            near = Source.of(rows, table_SP, decoded=isinstance(part, Run))
            far, picked_XK = None, None
            if entries is not None and seen is not None and seen.entries:
                picked_XK = self._pick(entries, seen)
                far = Source.of(entries.rows, seen.table_SP, decoded=isinstance(part, Run))
            look(query_NHD[mine], out_NHD[mine], near, part, far, seen, picked_XK, scale=scale, sinks_H=sinks_H)
        return out_NHD

    def _pick(self, entries: Entries, seen: Seen) -> torch.Tensor | None:
        """Numbers of entries; None where all are looked at."""
        index, mine = entries.index, slice(seen.start, seen.stop)
        if index is None or seen.entries <= index.count:
            return None
        last_X = seen.count_ST.flatten() - 1
        picked = self._select.pick(
            index.query_NID[mine], index.weight_NI[mine], index.keys, seen.table_SP, last_X, count=index.count
        )
        return None if picked is None else picked.position_XK


def look(
    query_XHD: torch.Tensor, out_XHD: torch.Tensor, near: Source, part: Singles | Run, far: Source | None, seen: Seen | None,
    picked_XK: torch.Tensor | None, *, scale: float, sinks_H: torch.Tensor,
) -> None:  # fmt: skip
    """What each query of a part sees, into `out_XHD`."""
    (count, heads, width), singles = query_XHD.shape, isinstance(part, Singles)
    position_X, first = (part.position_B, part.first_B) if isinstance(part, Singles) else (part.position_N, part.position_N)
    there = near if far is None or seen is None else far
    counts_X = position_X if seen is None else seen.count_ST.flatten()
    together = min(_SINGLE_HEADS if singles else _RUN_HEADS, max(triton.next_power_of_2(heads), _LEAST))
    window = part.sight.window
    assert window is not None and near.views.width + near.views.exact == width, f"{width=} of {near.rows.format}"
    _look_kernel[(count, triton.cdiv(heads, together))](
        query_XHD, out_XHD, sinks_H, position_X, first, 0 if isinstance(part, Singles) else part.first, counts_X,
        position_X if picked_XK is None else picked_XK, 0 if picked_XK is None else picked_XK.stride(0), scale,
        *near.tensors(), *near.strides(), *there.tensors(), *there.strides(),
        **near.kind("N"), **there.kind("F"),
        MOST=0 if picked_XK is None else picked_XK.shape[1], ENTRIES=far is not None, PICKED=picked_XK is not None,
        SINGLES=singles, HEADS=heads, TOGETHER=together, WIDTH=width, BLOCK=max(triton.next_power_of_2(width), _LEAST),
        WINDOW=window, STEPS=triton.cdiv(window, _KEYS), KEYS=_KEYS, num_warps=8, num_stages=2,
    )  # fmt: skip


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def _rows_at(
    at, good, channel, eight, scales, exact, table, page_stride, row_stride,
    scale_page, scale_row, exact_page, exact_row,
    PAGE: tl.constexpr, EIGHT: tl.constexpr, TILE: tl.constexpr, SCALE_AT: tl.constexpr, EXACT_AT: tl.constexpr,
    PLAIN: tl.constexpr, POWERS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Rows `[K, D]` at places in a table of pages; zeros where they are not `good`."""
    page = tl.load(table + at // PAGE, mask=good, other=0).to(tl.int64)
    row = (at % PAGE).to(tl.int64)
    behind = good[:, None] & ((channel >= EIGHT) & (channel < CHANNELS))[None, :]
    place = (page * exact_page + row * exact_row)[:, None] + (EXACT_AT + channel - EIGHT)[None, :]
    value = tl.load(exact + place, mask=behind, other=0)
    if not PLAIN:
        value = exact_number(value)
        front = good[:, None] & (channel < EIGHT)[None, :]
        byte = tl.load(eight + (page * page_stride + row * row_stride)[:, None] + channel[None, :], mask=front, other=0.0)
        scale_at = (page * scale_page + row * scale_row)[:, None] + (SCALE_AT + channel // TILE)[None, :]
        scale = tl.load(scales + scale_at, mask=front, other=0)
        if POWERS:
            scale = power_of_two(scale)
        value = tl.where(front, byte.to(tl.float32) * scale, value)
    return value


@triton.jit
def _add(query, row, good, scale, top, total, seen):
    """Some rows more, in a softmax whose highest score so far is `top`."""
    score = tl.dot(query, tl.trans(row), input_precision="ieee") * scale
    score = tl.where(good[None, :], score, float("-inf"))
    above = tl.maximum(top, tl.max(score, axis=1))
    share, less = tl.exp(score - above[:, None]), tl.exp(top - above)
    more = tl.dot(share.to(row.dtype), row, input_precision="ieee")
    return above, total * less + tl.sum(share, axis=1), seen * less[:, None] + more


@triton.jit
def _look_kernel(
    query, out, sinks, position, first, first_of_all, counts, picked, picked_stride,
    scale,
    n_eight, n_scales, n_exact, n_table, n_table_stride, n_page, n_row, n_scale_page,
    n_scale_row, n_exact_page, n_exact_row,
    f_eight, f_scales, f_exact, f_table, f_table_stride, f_page, f_row, f_scale_page,
    f_scale_row, f_exact_page, f_exact_row,
    N_PAGE: tl.constexpr, N_EIGHT: tl.constexpr, N_TILE: tl.constexpr, N_SCALE_AT: tl.constexpr, N_EXACT_AT: tl.constexpr,
    N_PLAIN: tl.constexpr, N_POWERS: tl.constexpr,
    F_PAGE: tl.constexpr, F_EIGHT: tl.constexpr, F_TILE: tl.constexpr, F_SCALE_AT: tl.constexpr, F_EXACT_AT: tl.constexpr,
    F_PLAIN: tl.constexpr, F_POWERS: tl.constexpr,
    MOST: tl.constexpr, ENTRIES: tl.constexpr, PICKED: tl.constexpr, SINGLES: tl.constexpr, HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, STEPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One query, some heads: the sink, then its window, then entries."""
    x, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    channel, known = tl.arange(0, BLOCK), head < HEADS
    whole = known[:, None] & (channel < WIDTH)[None, :]
    asked = tl.load(query + (x * HEADS + head)[:, None] * WIDTH + channel[None, :], mask=whole, other=0.0)
    top = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32)
    total, seen = tl.full([TOGETHER], 1.0, tl.float32), tl.zeros([TOGETHER, BLOCK], tl.float32)
    last = tl.load(position + x)
    if SINGLES:
        begin = tl.load(first + x)
    else:
        begin = first_of_all
    start = tl.maximum(last - WINDOW + 1, 0)
    for step in range(STEPS):
        token = start + step * KEYS + tl.arange(0, KEYS)
        good = token <= last
        row = _rows_at(
            token - begin, good, channel, n_eight, n_scales, n_exact, n_table + x * n_table_stride, n_page, n_row, n_scale_page,
            n_scale_row, n_exact_page, n_exact_row, N_PAGE, N_EIGHT, N_TILE, N_SCALE_AT, N_EXACT_AT, N_PLAIN, N_POWERS, WIDTH,
        )  # fmt: skip
        top, total, seen = _add(asked, row.to(asked.dtype), good, scale, top, total, seen)
    if ENTRIES:
        count = tl.load(counts + x).to(tl.int32)
        if PICKED:
            count = tl.minimum(count, MOST)
        at = 0
        while at < count:
            entry = at + tl.arange(0, KEYS)
            inside = entry < count
            if PICKED:
                entry = tl.load(picked + x * picked_stride + entry, mask=inside, other=0)
            far = _rows_at(
                entry, inside, channel, f_eight, f_scales, f_exact, f_table + x * f_table_stride, f_page, f_row, f_scale_page,
                f_scale_row, f_exact_page, f_exact_row, F_PAGE, F_EIGHT, F_TILE, F_SCALE_AT, F_EXACT_AT, F_PLAIN, F_POWERS, WIDTH,
            )  # fmt: skip
            top, total, seen = _add(asked, far.to(asked.dtype), inside, scale, top, total, seen)
            at += KEYS
    place = out + (x * HEADS + head)[:, None] * WIDTH + channel[None, :]
    tl.store(place, (seen / total[:, None]).to(out.dtype.element_ty), mask=whole)
