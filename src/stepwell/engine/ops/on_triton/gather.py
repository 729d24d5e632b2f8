"""Rows by their positions, decoded, back to back, by Triton: what kernels of a library read that know no eight bits.

    on the device    read where their pages say
    away             looked up on the way: in a page of their own, in a hot slot, else read on the host

The copy has the same bytes whichever way a row came. What cannot be viewed as numbers (`rows.py`) goes to plain torch.
Importing needs Triton. Axes as in `passes/rows.py`, and S segments or queries, K rows that each gathers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.on_triton.rows import Views, exact_number, power_of_two, views_in
from stepwell.engine.passes.rows import PLAIN, TILE, Powers, Rows
from stepwell.sparse.triton_read import look_up, tables

_ROWS = 8  # that one program gathers
_MANY_PROGRAMS = 1056  # eight for each core of an H200: from here on a program takes all tiles of its rows, looked up once


def gather_rows(
    rows: Rows, table_SP: torch.Tensor, position_SK: torch.Tensor | None = None, *, out_SKC: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows `[S, K, C]` in the format that is computed in, by their positions in the pages of a table; all of them with None."""
    views, page_rows = views_in(rows.stored_PRE, rows.format), rows.stored_PRE.shape[1]
    host = views if rows.places is None else views_in(rows.places.host_PRE, rows.format)
    count = table_SP.shape[1] * page_rows if position_SK is None else position_SK.shape[1]
    if views is None or host is None:
        return _gather_plain(rows, table_SP, position_SK)
    if out_SKC is None:
        out_SKC = torch.empty(len(table_SP), count, views.width + views.exact, dtype=rows.dtype, device=table_SP.device)
    if out_SKC.numel():
        _gather(rows, views, host, table_SP, position_SK, count, out_SKC)
    return out_SKC


def _gather(
    rows: Rows, views: Views, host: Views, table_SP: torch.Tensor, position_SK: torch.Tensor | None, count: int,
    out_SKC: torch.Tensor,
) -> None:  # fmt: skip
    at = table_SP if position_SK is None else position_SK
    blocks = triton.cdiv(views.width, views.tile) + triton.cdiv(views.exact, TILE)
    looked_up = (at,) * 4 + (0,) * 3 if rows.places is None else tables(rows.places.places, rows.places.group)
    given = (
        views.eight_PRE, views.scale_PRE, views.exact_PRE, host.eight_PRE, host.scale_PRE, host.exact_PRE, out_SKC, table_SP, at,
        count, table_SP.stride(0), at.stride(0), out_SKC.stride(0), out_SKC.stride(1),
        *_strides(views), *_strides(host), *looked_up,
    )  # fmt: skip
    sizes = {
        "PAGE": rows.stored_PRE.shape[1], "WIDTH": views.width, "TILE": views.tile, "SCALE_AT": views.scale_at,
        "EXACT": views.exact, "EXACT_AT": views.exact_at, "EXACT_TILE": TILE, "ALL": position_SK is None,
        "PLAIN": rows.format is PLAIN, "POWERS": isinstance(rows.format, Powers), "ROWS": _ROWS, "num_warps": 4,
    }  # fmt: skip
    programs = len(table_SP) * triton.cdiv(count, _ROWS)
    each = blocks if programs >= _MANY_PROGRAMS else 1
    _gather_kernel[(programs, blocks // each)](*given, AWAY=rows.places is not None, TILES_EACH=each, **sizes)


def _strides(views: Views) -> tuple[int, ...]:
    """Views of pages and rows, for each kind of number."""
    return tuple(each.stride(axis) for each in (views.eight_PRE, views.scale_PRE, views.exact_PRE) for axis in (0, 1))


def _gather_plain(rows: Rows, table_SP: torch.Tensor, position_SK: torch.Tensor | None) -> torch.Tensor:
    if position_SK is None:
        return rows.whole(table_SP).flatten(1, 2)
    page_rows = rows.stored_PRE.shape[1]
    index_SK = (position_SK // page_rows).long()
    return rows.some(table_SP.expand(len(index_SK), -1).gather(1, index_SK), position_SK % page_rows)


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def _either(near, far, near_at, far_at, near_mask, far_mask, AWAY: tl.constexpr):
    """Numbers on the device, or else on the host: there not through the first-level cache, which does not hear of its writes."""
    number = tl.load(near + near_at, mask=near_mask, other=0)
    if AWAY:
        number = tl.where(near_mask, number, tl.load(far + far_at, mask=far_mask, other=0, cache_modifier=".cg"))
    return number


@triton.jit
def _either_eight(near, far, near_at, far_at, near_mask, far_mask, AWAY: tl.constexpr):
    """The same for eight bits, as what they stand for."""
    number = tl.load(near + near_at, mask=near_mask, other=0.0).to(tl.float32)
    if AWAY:
        there = tl.load(far + far_at, mask=far_mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        number = tl.where(near_mask, number, there)
    return number


@triton.jit
def _copy_tile(
    eight, scales, exact, eight_far, scales_far, exact_far, target, page, row, below, below_row, here, away, inside, tile,
    page_stride, row_stride, scale_page, scale_row, exact_page, exact_row,
    far_page, far_row, scale_far_page, scale_far_row, exact_far_page, exact_far_row,
    AWAY: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SCALE_AT: tl.constexpr, EXACT: tl.constexpr,
    EXACT_AT: tl.constexpr, EXACT_TILE: tl.constexpr, PLAIN: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """One tile of some rows, `here` or `away`, onto `target`."""
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    if tile < TILES:
        channel = tile * TILE + tl.arange(0, TILE)
        good = (channel < WIDTH)[None, :]
        number_8 = _either_eight(
            eight, eight_far, (page * page_stride + row * row_stride)[:, None] + channel[None, :],
            (below * far_page + below_row * far_row)[:, None] + channel[None, :],
            here[:, None] & good, away[:, None] & good, AWAY,
        )  # fmt: skip
        scale = _either(
            scales, scales_far, page * scale_page + row * scale_row + SCALE_AT + tile,
            below * scale_far_page + below_row * scale_far_row + SCALE_AT + tile, here, away, AWAY,
        )  # fmt: skip
        if POWERS:
            scale = power_of_two(scale)
        scaled = number_8 * scale[:, None]
        if AWAY:
            scaled = tl.where((here | away)[:, None], scaled, float("nan"))  # nowhere: to be seen
        tl.store(target + channel[None, :], scaled.to(target.dtype.element_ty), mask=inside[:, None] & good)
    else:
        same = (tile - TILES) * EXACT_TILE + tl.arange(0, EXACT_TILE)
        known = (same < EXACT)[None, :]
        number_16 = _either(
            exact, exact_far, (page * exact_page + row * exact_row)[:, None] + EXACT_AT + same[None, :],
            (below * exact_far_page + below_row * exact_far_row)[:, None] + EXACT_AT + same[None, :],
            here[:, None] & known, away[:, None] & known, AWAY,
        )  # fmt: skip
        if not PLAIN:
            number_16 = exact_number(number_16)
        if AWAY:
            number_16 = tl.where((here | away)[:, None], number_16, float("nan"))
        tl.store(target + WIDTH + same[None, :], number_16.to(target.dtype.element_ty), mask=inside[:, None] & known)


@triton.jit
def _gather_kernel(
    eight, scales, exact, eight_far, scales_far, exact_far, out, table, position, count,
    table_stride, position_stride, out_segment, out_row,
    page_stride, row_stride, scale_page, scale_row, exact_page, exact_row,
    far_page, far_row, scale_far_page, scale_far_row, exact_far_page, exact_far_row,
    header, hint, key_S, hot_N, slots, header_stride, hint_stride,
    AWAY: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SCALE_AT: tl.constexpr, EXACT: tl.constexpr, EXACT_AT: tl.constexpr, EXACT_TILE: tl.constexpr, ALL: tl.constexpr,
    PLAIN: tl.constexpr, POWERS: tl.constexpr, ROWS: tl.constexpr, TILES_EACH: tl.constexpr,
):  # fmt: skip
    """One tile of some rows, or all of them. With AWAY tables hold prefix pages, and some rows are on the host; without, pages of
    rows.
    """
    blocks = (count + ROWS - 1) // ROWS
    segment, first_tile = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
    if TILES_EACH > 1:
        first_tile = 0
    number = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    inside = number < count
    at = number.to(tl.int64)
    if not ALL:
        at = tl.load(position + segment * position_stride + number, mask=inside, other=0).to(tl.int64)
    page = tl.load(table + segment * table_stride + at // PAGE, mask=inside, other=0).to(tl.int64)
    row = at % PAGE
    here, away, below, below_row = inside, inside, page, row
    if AWAY:
        page, row, below = look_up(page, row, inside, header, hint, key_S, hot_N, slots, header_stride, hint_stride, PAGE)
        here, away = inside & (page >= 0), inside & (below >= 0)
    target = out + segment * out_segment + number.to(tl.int64)[:, None] * out_row
    for tile in tl.static_range(TILES_EACH):
        _copy_tile(
            eight, scales, exact, eight_far, scales_far, exact_far, target, page, row, below, below_row, here, away, inside,
            first_tile + tile, page_stride, row_stride, scale_page, scale_row, exact_page, exact_row,
            far_page, far_row, scale_far_page, scale_far_row, exact_far_page, exact_far_row,
            AWAY, WIDTH, TILE, SCALE_AT, EXACT, EXACT_AT, EXACT_TILE, PLAIN, POWERS,
        )  # fmt: skip
