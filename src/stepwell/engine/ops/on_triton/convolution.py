"""The short convolution before a recurrence, as Triton kernels over the pages: what `ops/recurrent.convolve` does.

A step of singles is one launch, which reads the state of each and writes it where it was. With runs there are two: every token's
sum first, and then the states, so that no state changes before it was read. Importing needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_triton.segment_tables import tables_of
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent import Points

CHANNELS = 256  # of a program
TOKENS = 16


def convolve(
    points: Points, layer: int, x_NC: torch.Tensor, weight_WC: torch.Tensor, bias_C: torch.Tensor | None = None, *,
    act: Activation | None = None,
) -> torch.Tensor:  # fmt: skip
    """In the number format of `x_NC`; sums are made in fp32."""
    if act not in (None, silu) or x_NC.stride(1) != 1:
        raise NoKernel("convolutions with this activation")
    (tokens, channels), window = x_NC.shape, weight_WC.shape[0]
    out_NC = x_NC.new_empty(tokens, channels)
    state_PE = points.pages.layer_PRE("conv", layer)[:, 0]
    columns, blocks = triton.next_power_of_2(window), triton.cdiv(channels, CHANNELS)
    pages, fresh = points.page_S, points.fresh_S.view(torch.uint8)
    biased = (weight_WC if bias_C is None else bias_C, bias_C is not None)
    sizes = {"WINDOW": window, "CHANNELS": CHANNELS, "BIASED": biased[1], "SILU": act is not None}
    if not points.has_runs:
        _step_kernel[(tokens, blocks)](
            x_NC, weight_WC, biased[0], out_NC, state_PE, pages, fresh, x_NC.stride(0), state_PE.stride(0), channels,
            COLUMNS=columns, **sizes,
        )  # fmt: skip
        return out_NC
    tables = tables_of(points)
    _sums_kernel[(triton.cdiv(tokens, TOKENS), blocks)](
        x_NC, weight_WC, biased[0], out_NC, state_PE, pages, fresh, tables.segment_N, tables.start_S, x_NC.stride(0),
        state_PE.stride(0), tokens, channels, TOKENS=TOKENS, **sizes, num_warps=8,
    )  # fmt: skip
    _states_kernel[(len(points.starts) - 1, blocks)](
        x_NC, state_PE, pages, fresh, tables.start_S, x_NC.stride(0), state_PE.stride(0), channels,
        WINDOW=window, COLUMNS=columns, CHANNELS=CHANNELS,
    )  # fmt: skip
    return out_NC


@triton.jit(do_not_specialize=["page_S"])
def _step_kernel(
    x, weight, bias, out, state, page_S, fresh_S, x_stride, page_stride,
    channels, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One token of one request: its state moves on by one column, and is summed up."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    inside = at < channels
    kept = state + tl.load(page_S + token) * page_stride
    known = (column[:, None] < WINDOW - 1) & inside[None, :] & (tl.load(fresh_S + token) == 0)
    past = tl.load(kept + (column[:, None] + 1) * channels + at[None, :], mask=known, other=0.0).to(tl.float32)
    new = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    inputs = tl.where(column[:, None] == WINDOW - 1, new[None, :], past)
    used = (column[:, None] < WINDOW) & inside[None, :]
    factor = tl.load(weight + column[:, None] * channels + at[None, :], mask=used, other=0.0).to(tl.float32)
    total = tl.sum(inputs * factor, axis=0)
    if BIASED:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(out + token * channels + at, total.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # columns move: all are read before any is written
    tl.store(kept + column[:, None] * channels + at[None, :], inputs.to(state.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["page_S", "segment_N", "start_S", "tokens"])
def _sums_kernel(
    x, weight, bias, out, state, page_S, fresh_S, segment_N, start_S, x_stride,
    page_stride, tokens, channels,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHANNELS: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A block of tokens, whichever segments they are of: what comes before a segment's first token is in its state."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real, inside = row < tokens, at < channels
    segment = tl.load(segment_N + row, mask=real, other=0)
    index = row - tl.load(start_S + segment)  # of the token in its segment
    kept = tl.load(page_S + segment) * page_stride
    old = tl.load(fresh_S + segment) == 0
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for column in tl.static_range(WINDOW):
        here = index + 1 + column  # among the columns of the state, and the tokens behind them
        from_x = (real & (here >= WINDOW))[:, None] & inside[None, :]
        from_state = (real & (here < WINDOW) & old)[:, None] & inside[None, :]
        value = tl.load(x + (row + column + 1 - WINDOW)[:, None] * x_stride + at[None, :], mask=from_x, other=0.0).to(tl.float32)
        value += tl.load(state + (kept + here * channels)[:, None] + at[None, :], mask=from_state, other=0.0).to(tl.float32)
        total += value * tl.load(weight + column * channels + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(out + row[:, None] * channels + at[None, :], total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["page_S", "start_S"])
def _states_kernel(
    x, state, page_S, fresh_S, start_S, x_stride, page_stride, channels,
    WINDOW: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One segment's last inputs, from its tokens, and from its state where they are too few."""
    segment = tl.program_id(0)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    stop = tl.load(start_S + segment + 1)
    here = stop - tl.load(start_S + segment) + column  # as above
    kept = state + tl.load(page_S + segment) * page_stride
    used = (column < WINDOW)[:, None] & (at < channels)[None, :]
    from_x = used & (here >= WINDOW)[:, None]
    from_state = used & (here < WINDOW)[:, None] & (tl.load(fresh_S + segment) == 0)
    value = tl.load(x + (stop + column - WINDOW)[:, None] * x_stride + at[None, :], mask=from_x, other=0.0).to(tl.float32)
    value += tl.load(kept + here[:, None] * channels + at[None, :], mask=from_state, other=0.0).to(tl.float32)
    tl.debug_barrier()  # columns move: all are read before any is written
    tl.store(kept + column[:, None] * channels + at[None, :], value.to(state.dtype.element_ty), mask=used)
