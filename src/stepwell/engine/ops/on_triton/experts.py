"""Tokens through their experts on a GPU: what `ops/experts.py` computes, as grouped products that never wait for the device.

    sort      one kernel finds each expert's visits, and cuts them into tiles of rows: table (expert, start, stop), on the device
    multiply  gate and up: one program for each tile and each block of columns; rows are fetched through the sorted order
    combine   plain torch, whatever a family has
    multiply  down
    add       each token's K results, times their shares, in the order of its choices

Grids depend on the number of tokens, K and E alone, never on the routing: the number of programs is that of the worst routing,
and those without a tile end at once. So a step can be recorded in a CUDA graph and played with another routing. A tile holds rows
of one expert; tiles of one expert run side by side, so that its weights come from memory once. Where experts have many rows each,
torch's grouped product is used if this torch and this GPU have it. Products are summed in fp32. Never changes weights or layouts.

Axes: N tokens, C channels, E experts, K experts a token, I inner channels, X = N * K visits, T tiles of them,
R rows of x: tokens, or visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.experts import Combine, ExpertWeights, Routing

MANY_ROWS = 192  # of an expert on average: from here on torch's grouped product is used where there is one
_FEW_PROGRAMS = 264  # two for each core of an H200: with fewer of them, blocks of columns are halved
_ROW_BYTES = 256  # of a matrix that a program reads at a time
_VISITS = 4096  # that a program looks at at a time while sorting
_CHANNELS = 512  # that a program adds up


def run_experts_grouped(x_NC: torch.Tensor, routing: Routing, weights: ExpertWeights, combine: Combine) -> torch.Tensor:
    """The same as `ops/experts.run_experts`, recordable in a CUDA graph."""
    with torch.cuda.device_of(x_NC):  # Triton launches on the current device
        visits = _sort(routing.expert_NK, weights.gate_up_EIC.shape[0])
        inner_XI = _product(x_NC, weights.gate_up_EIC, weights.gate_up_bias_EI, visits, by_order=True)
        gate_XI, up_XI = inner_XI.chunk(2, dim=-1)
        out_XC = _product(combine(gate_XI, up_XI), weights.down_ECI, weights.down_bias_EC, visits, by_order=False)
        return _sum(out_XC, visits, routing.share_NK)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Visits:
    """Visits sorted by expert, those of one expert in the order of tokens; int32, on the device."""

    expert_X: torch.Tensor  # in the order of tokens
    order_X: torch.Tensor  # which visit stands here
    place_X: torch.Tensor  # where a visit stands
    stops_E: torch.Tensor
    tile_T3: torch.Tensor  # expert, first row, row after the last
    num_tiles_1: torch.Tensor
    top: int
    rows: int  # of a tile


# ---- launching ------------------------------------------------------------------------------------


def _sort(expert_NK: torch.Tensor, num_experts: int) -> _Visits:
    top, expert_X = expert_NK.shape[1], expert_NK.flatten()
    length = len(expert_X)
    rows = _tile_rows(length / num_experts)
    block = min(_VISITS, max(128, triton.next_power_of_2(length)))
    most_tiles = (length + min(num_experts, length) * (rows - 1)) // rows  # all but one row of a tile may be missing

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=expert_X.device)

    visits = _Visits(
        expert_X=expert_X,
        order_X=empty(length),
        place_X=empty(length),
        stops_E=empty(num_experts),
        tile_T3=empty(most_tiles, 3),
        num_tiles_1=empty(1),
        top=top,
        rows=rows,
    )
    _sort_kernel[(num_experts,)](
        expert_X,
        visits.order_X,
        visits.place_X,
        visits.stops_E,
        visits.tile_T3,
        visits.num_tiles_1,
        length,
        num_experts,
        ROWS=rows,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(length, block)),  # few values: each is a compilation
        num_warps=8 if block > 1024 else 4,
    )
    return visits


def _tile_rows(mean: float) -> int:
    """Rows of a tile, by the average number of visits to an expert: most experts need one tile, until that is a large one."""
    for rows, most in ((16, 8), (32, 20), (64, 64)):
        if mean <= most:
            return rows
    return 128


def _product(
    x_RC: torch.Tensor, weight_EIC: torch.Tensor, bias_EI: torch.Tensor | None, visits: _Visits, *, by_order: bool
) -> torch.Tensor:
    """Each visit's row times its expert's matrix, sorted by expert. `by_order`: rows of x are tokens, not sorted visits."""
    x_RC = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
    if len(visits.order_X) >= MANY_ROWS * len(weight_EIC) and _torch_has(x_RC, weight_EIC):
        x_XC = x_RC.index_select(0, visits.order_X // visits.top) if by_order else x_RC
        out_XI: torch.Tensor = _grouped_mm(x_XC, weight_EIC.mT, offs=visits.stops_E)
        return out_XI if bias_EI is None else out_XI + bias_EI[visits.expert_X.index_select(0, visits.order_X)]
    return _tiled_product(x_RC, weight_EIC, bias_EI, visits, by_order=by_order)


def _tiled_product(
    x_RC: torch.Tensor, weight_EIC: torch.Tensor, bias_EI: torch.Tensor | None, visits: _Visits, *, by_order: bool
) -> torch.Tensor:
    _, outputs, inputs = weight_EIC.shape
    most_tiles, large = len(visits.tile_T3), visits.rows >= 64
    columns = 128 if large else 64 if most_tiles * triton.cdiv(outputs, 64) >= _FEW_PROGRAMS else 32
    depth = _ROW_BYTES // x_RC.element_size()
    if large or inputs % depth:
        depth //= 2
    out_XI = x_RC.new_empty(len(visits.order_X), outputs)
    _multiply_kernel[(most_tiles, triton.cdiv(outputs, columns))](
        x_RC,
        weight_EIC,
        weight_EIC if bias_EI is None else bias_EI,  # never read where there is none
        out_XI,
        visits.order_X,
        visits.tile_T3,
        visits.num_tiles_1,
        outputs,
        x_RC.stride(0),
        *weight_EIC.stride(),
        0 if bias_EI is None else bias_EI.stride(0),
        TOP=visits.top if by_order else 0,
        BIASED=bias_EI is not None,
        INPUTS=inputs,
        ROWS=visits.rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=8 if visits.rows == 128 else 4,
        num_stages=3 if large else 4,
    )
    return out_XI


def _sum(out_XC: torch.Tensor, visits: _Visits, share_NK: torch.Tensor) -> torch.Tensor:
    length, channels = len(share_NK), out_XC.shape[1]
    out_NC = out_XC.new_empty(length, channels)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    _sum_kernel[(length, triton.cdiv(channels, block))](
        out_XC, visits.place_X, share_NK.contiguous(), out_NC, channels, TOP=visits.top, BLOCK=block
    )
    return out_NC


# ---- torch's grouped product ----------------------------------------------------------------------

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdecimal())
_grouped_mm: Any = torch.nn.functional.grouped_mm if _TORCH >= (2, 10) else None  # which came with 2.10


def _torch_has(x_RC: torch.Tensor, weight_EIC: torch.Tensor) -> bool:
    """Elsewhere torch copies the stops to the host and loops, or refuses: rows must begin at multiples of 16 bytes."""
    if _grouped_mm is None or not x_RC.is_cuda or x_RC.dtype != torch.bfloat16 or not _is_hopper(x_RC.device):
        return False
    aligned = x_RC.shape[1] % 8 == 0 and weight_EIC.shape[1] % 8 == 0 and x_RC.stride(0) % 8 == 0
    return aligned and weight_EIC.is_contiguous() and (x_RC.data_ptr() | weight_EIC.data_ptr()) % 16 == 0


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


# ---- kernels --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length"])
def _sort_kernel(
    expert_X, order_X, place_X, stops_E, tile_T3, num_tiles_1, length, num_experts,
    ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program for each expert: counts the visits of all, then writes down its own."""
    me = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for block in range(BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(expert_X + at, mask=at < length, other=num_experts).to(tl.int32)  # the last bins have no expert
        counts += tl.histogram(expert, BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    tiles = (counts + ROWS - 1) // ROWS
    mine = tl.sum(tl.where(bins == me, counts, 0))
    start = tl.sum(tl.where(bins < me, counts, 0))
    tile = tl.sum(tl.where(bins < me, tiles, 0))
    tl.store(stops_E + me, start + mine)
    if me == 0:
        tl.store(num_tiles_1, tl.sum(tiles))
    row = 0
    while row < mine:
        entry = tile_T3 + (tile + row // ROWS) * 3
        tl.store(entry, me)
        tl.store(entry + 1, start + row)
        tl.store(entry + 2, tl.minimum(start + mine, start + row + ROWS))
        row += ROWS
    place = start
    for block in range(BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(expert_X + at, mask=at < length, other=num_experts).to(tl.int32)
        ours = (expert == me).to(tl.int32)
        places = place + tl.cumsum(ours, 0) - 1
        tl.store(order_X + places, at, mask=ours > 0)
        tl.store(place_X + at, places, mask=ours > 0)
        place += tl.sum(ours)


@triton.jit
def _multiply_kernel(
    x_RC, weight_EIC, bias_EI, out_XI, order_X, tile_T3, num_tiles_1, outputs,
    x_stride, expert_stride, output_stride, input_stride, bias_stride,
    TOP: tl.constexpr, BIASED: tl.constexpr, INPUTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of rows times one block of its expert's columns. TOP 0: rows of x are sorted visits; else tokens."""
    if tl.program_id(0) >= tl.load(num_tiles_1):
        return
    entry = tile_T3 + tl.program_id(0) * 3
    expert, stop = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    visit = tl.load(entry + 1) + tl.arange(0, ROWS)
    here = visit < stop
    if TOP > 0:
        row = tl.load(order_X + visit, mask=here, other=0) // TOP
    else:
        row = visit
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = tl.minimum(column, outputs - 1)  # those past the end are computed and not stored
    depth = tl.arange(0, DEPTH)
    x = x_RC + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight = weight_EIC + expert * expert_stride + wanted.to(tl.int64)[None, :] * output_stride + depth[:, None] * input_stride
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for done in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            x_part = tl.load(x, mask=here[:, None], other=0.0)
            weight_part = tl.load(weight)
        else:
            x_part = tl.load(x, mask=here[:, None] & (depth < INPUTS - done)[None, :], other=0.0)
            weight_part = tl.load(weight, mask=(depth < INPUTS - done)[:, None], other=0.0)
        total = tl.dot(x_part, weight_part, total, input_precision="ieee")
        x += DEPTH
        weight += DEPTH * input_stride
    if BIASED:
        total += tl.load(bias_EI + expert * bias_stride + wanted).to(tl.float32)[None, :]
    out = out_XI + visit.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out, total.to(out_XI.dtype.element_ty), mask=here[:, None] & (column < outputs)[None, :])


@triton.jit
def _sum_kernel(out_XC, place_X, share_NK, out_NC, channels, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Some channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP):
        place = tl.load(place_X + token * TOP + choice).to(tl.int64)
        share = tl.load(share_NK + token * TOP + choice).to(tl.float32)
        total += share * tl.load(out_XC + place * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
    tl.store(out_NC + token * channels + channel, total.to(out_NC.dtype.element_ty), mask=channel < channels)
