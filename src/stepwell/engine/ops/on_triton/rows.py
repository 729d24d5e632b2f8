"""Rows in eight bits, written by Triton: one launch for what plain torch does in a dozen, and the same bytes as `Rows.write`.

A row is written and read (`gather.py`) as three kinds of numbers, through views of the same bytes. What cannot be viewed
so (rows that do not begin at a multiple of four bytes) goes to plain torch. Importing needs Triton. Axes as in `passes/rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.guarded import NoKernel
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
    return None if rows.places is not None else views_in(rows.stored_PRE, rows.format)


def views_in(stored: torch.Tensor, kept: RowFormat) -> Views | None:
    """The format of rows, wherever they are; None if plain torch must read and write them."""
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
    views = views_in(rows.stored_PRE, rows.format)  # what is written is where pages say
    if rows.format is PLAIN:
        return rows.write(page_N, row_N, x_NC)
    if views is None or x_NC.stride(1) != 1:
        raise NoKernel("rows of this layout")
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
