"""Rows in eight bits, written and gathered by Triton: one launch for what plain torch does in a dozen.

    write_rows     as `Rows.write`: the same bytes
    gather_rows    rows by their positions, decoded, back to back: what kernels of a library read that know no eight bits.
                   Rows that may be on the host alone are looked up on the way, and read there if they are nowhere else

A row is read as three kinds of numbers, through views of the same bytes. What cannot be viewed so (rows that do not begin at a
multiple of four bytes) goes to plain torch. Importing needs Triton. Axes as in `passes/rows.py`, and S segments or queries, K
rows that each gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stepwell.engine.passes.rows import (
    EIGHT,
    LARGEST,
    LEAST_POWER,
    PLAIN,
    POWER_BIAS,
    POWER_TILE,
    TILE,
    Powers,
    RowFormat,
    Rows,
    Tiled,
)  # fmt: skip
from stepwell.sparse.triton_read import look_up, tables

_ROWS = 8  # that one program gathers
_LEAST_MAX = torch.finfo(torch.float32).tiny * LARGEST  # of a tile


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Stored rows as what they are made of, and where each kind of number begins, counted in such numbers."""

    eight_PRE: torch.Tensor
    scale_PRE: torch.Tensor  # fp32, or a byte for a power of two
    exact_PRE: torch.Tensor  # 16 bits
    scale_at: int
    exact_at: int
    width: int
    exact: int
    tile: int


def views_of(rows: Rows) -> Views | None:
    """None where plain torch must read and write these rows, or they are not all where pages say."""
    return None if rows.places is not None else _views(rows.stored_PRE, rows.format)


def _views(stored: torch.Tensor, kept: RowFormat) -> Views | None:
    if kept is PLAIN:
        return Views(stored, stored, stored, 0, 0, 0, stored.shape[2], TILE)
    if not isinstance(kept, Tiled | Powers) or kept.width % 4 or stored.stride(2) != 1:
        return None
    if any(number % 4 for number in (stored.storage_offset(), stored.stride(0), stored.stride(1), stored.shape[2])):
        return None
    eight, short = stored.view(EIGHT), stored.view(torch.int16)
    if isinstance(kept, Powers):
        return Views(eight, stored, short, kept.width + 2 * kept.exact, kept.width // 2, kept.width, kept.exact, POWER_TILE)
    num_scales = -(-kept.width // TILE)
    exact_at = kept.width // 2 + 2 * num_scales
    return Views(eight, stored.view(torch.float32), short, kept.width // 4, exact_at, kept.width, kept.exact, TILE)


def write_rows(rows: Rows, page_N: torch.Tensor, row_N: torch.Tensor, x_NC: torch.Tensor) -> None:
    """Encodes rows, and puts each where it belongs."""
    views = _views(rows.stored_PRE, rows.format)  # what is written is where pages say
    if views is None or rows.format is PLAIN or x_NC.stride(1) != 1:
        return rows.write(page_N, row_N, x_NC)
    stored, scales = rows.stored_PRE, views.scale_PRE
    _write_kernel[(len(x_NC), triton.cdiv(views.width, views.tile) + 1)](
        x_NC, stored, scales, views.exact_PRE, page_N, row_N, x_NC.stride(0),
        stored.stride(0), stored.stride(1), scales.stride(0), scales.stride(1),
        views.exact_PRE.stride(0), views.exact_PRE.stride(1),
        WIDTH=views.width, TILE=views.tile, SCALE_AT=views.scale_at, EXACT=views.exact, EXACT_AT=views.exact_at,
        EXACT_BLOCK=triton.next_power_of_2(max(views.exact, 1)),
        SCALES=stored.shape[2] - views.scale_at, POWERS=isinstance(rows.format, Powers),
        LEAST_MAX=_LEAST_MAX, LARGEST=LARGEST, LEAST_BYTE=LEAST_POWER + POWER_BIAS, num_warps=1,
    )  # fmt: skip
    return None


def gather_rows(
    rows: Rows, table_SP: torch.Tensor, position_SK: torch.Tensor | None = None, *, out_SKC: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows `[S, K, C]` in the format that is computed in, by their positions in the pages of a table; all of them with None."""
    views, page_rows = _views(rows.stored_PRE, rows.format), rows.stored_PRE.shape[1]
    host = views if rows.places is None else _views(rows.places.host_PRE, rows.format)
    count = table_SP.shape[1] * page_rows if position_SK is None else position_SK.shape[1]
    if views is None or host is None:
        return _gather_plain(rows, table_SP, position_SK)
    channels = views.width + views.exact
    if out_SKC is None:
        out_SKC = torch.empty(len(table_SP), count, channels, dtype=rows.dtype, device=table_SP.device)
    if not out_SKC.numel():
        return out_SKC
    at = table_SP if position_SK is None else position_SK
    blocks = triton.cdiv(views.width, views.tile) + triton.cdiv(views.exact, TILE)
    looked_up = (at,) * 4 + (0,) * 3 if rows.places is None else tables(rows.places.places, rows.places.group)
    _gather_kernel[(len(table_SP) * triton.cdiv(count, _ROWS), blocks)](
        views.eight_PRE, views.scale_PRE, views.exact_PRE, host.eight_PRE, host.scale_PRE, host.exact_PRE, out_SKC, table_SP, at,
        count, table_SP.stride(0), at.stride(0), out_SKC.stride(0), out_SKC.stride(1),
        *_strides(views), *_strides(host), *looked_up,
        AWAY=rows.places is not None, PAGE=page_rows, WIDTH=views.width, TILE=views.tile, SCALE_AT=views.scale_at,
        EXACT=views.exact, EXACT_AT=views.exact_at, EXACT_TILE=TILE, ALL=position_SK is None,
        PLAIN=rows.format is PLAIN, POWERS=isinstance(rows.format, Powers), ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return out_SKC


def _strides(views: Views) -> tuple[int, ...]:
    """Of pages and rows, for each kind of number."""
    return tuple(each.stride(axis) for each in (views.eight_PRE, views.scale_PRE, views.exact_PRE) for axis in (0, 1))


def _gather_plain(rows: Rows, table_SP: torch.Tensor, position_SK: torch.Tensor | None) -> torch.Tensor:
    if position_SK is None:
        return rows.whole(table_SP).flatten(1, 2)
    page_rows = rows.stored_PRE.shape[1]
    index_SK = (position_SK // page_rows).long()
    return rows.some(table_SP.expand(len(index_SK), -1).gather(1, index_SK), position_SK % page_rows)


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def eight_bits(x):
    """The byte of e4m3 nearest to each number, ties to even; numbers within the format, or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = tl.where(magnitude < (121 << 23), tl.abs(x), 0.0) * 512.0  # in steps of the smallest number
    below = ((small + 12582912.0) - 12582912.0).to(tl.int32)  # rounds to even
    byte = tl.where(magnitude < (121 << 23), below, normal)
    byte = tl.where(magnitude > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def short_bits(x):
    """The 16 bits of bf16 nearest to each number, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def exact_number(bits):
    """What 16 bits of bf16 stand for."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(byte):
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _write_kernel(
    x, stored, scales, exact, page_N, row_N, x_stride, page_stride, row_stride,
    scale_page, scale_row, exact_page, exact_row,
    WIDTH: tl.constexpr, TILE: tl.constexpr, SCALE_AT: tl.constexpr, EXACT: tl.constexpr, EXACT_AT: tl.constexpr,
    EXACT_BLOCK: tl.constexpr, SCALES: tl.constexpr, POWERS: tl.constexpr, LEAST_MAX: tl.constexpr, LARGEST: tl.constexpr,
    LEAST_BYTE: tl.constexpr,
):  # fmt: skip
    """One tile of one row; behind the last tile what is kept exactly, and the padding of powers."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, row = tl.load(page_N + token).to(tl.int64), tl.load(row_N + token).to(tl.int64)
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    if tile < TILES:
        at = tile * TILE + tl.arange(0, TILE)
        number = tl.load(x + token * x_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(number), axis=0)
        broken = tl.max((number != number).to(tl.int32), axis=0) > 0
        if POWERS:
            bits = tl.div_rn(largest, LARGEST).to(tl.int32, bitcast=True)
            byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # the next power of two, if it is none itself
            byte = tl.where(broken | (byte > 255), 255, tl.maximum(byte, LEAST_BYTE))
            scale = power_of_two(byte)
            tl.store(scales + page * scale_page + row * scale_row + SCALE_AT + tile, byte.to(tl.uint8))
        else:
            scale = tl.div_rn(tl.maximum(largest, LEAST_MAX), LARGEST)
            scale = tl.where(broken, float("nan"), scale)
            tl.store(scales + page * scale_page + row * scale_row + SCALE_AT + tile, scale)
        scaled = tl.div_rn(number, tl.zeros_like(number) + scale)
        scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
        tl.store(stored + page * page_stride + row * row_stride + at, eight_bits(scaled), mask=at < WIDTH)
    else:
        place = tl.arange(0, EXACT_BLOCK)
        same = tl.load(x + token * x_stride + WIDTH + place, mask=place < EXACT, other=0.0).to(tl.float32)
        tl.store(exact + page * exact_page + row * exact_row + EXACT_AT + place, short_bits(same), mask=place < EXACT)
        if POWERS:
            behind = TILES + tl.arange(0, 16)
            padding = scales + page * scale_page + row * scale_row + SCALE_AT + behind
            tl.store(padding, tl.zeros_like(behind).to(tl.uint8), mask=behind < SCALES)


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
def _gather_kernel(
    eight, scales, exact, eight_far, scales_far, exact_far, out, table, position, count, table_stride,
    position_stride, out_segment, out_row, page_stride, row_stride, scale_page, scale_row, exact_page, exact_row,
    far_page, far_row, scale_far_page, scale_far_row, exact_far_page, exact_far_row,
    header, hint, key_S, hot_N, slots, header_stride, hint_stride,
    AWAY: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SCALE_AT: tl.constexpr,
    EXACT: tl.constexpr, EXACT_AT: tl.constexpr, EXACT_TILE: tl.constexpr, ALL: tl.constexpr, PLAIN: tl.constexpr,
    POWERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of some rows. With AWAY tables hold prefix pages, and some rows are on the host; without, pages of rows."""
    blocks = (count + ROWS - 1) // ROWS
    segment, tile = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
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
        tl.store(target + channel[None, :], scaled.to(out.dtype.element_ty), mask=inside[:, None] & good)
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
        tl.store(target + WIDTH + same[None, :], number_16.to(out.dtype.element_ty), mask=inside[:, None] & known)
