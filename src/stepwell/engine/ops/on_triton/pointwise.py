"""The operations of `ops/pointwise.py` as Triton kernels: one launch each, numbers in fp32 between reading and writing.

What a kernel does not know (another activation, rows in eight bits) goes to plain torch. Importing needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from stepwell.engine.ops import pointwise
from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.pointwise import Activation, Angles, HeadNorms
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import PLAIN, Rows

GATE_BLOCK = 1024
WIDEST_NORM = 16384  # channels that one program reads at once
_GATES = {silu: 0, pointwise.gelu_tanh: 1}


def write_keys_values(
    qkv_NX: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, kv_heads: int, norms: HeadNorms | None, angles: Angles | None
) -> torch.Tensor:
    if rows.format is not PLAIN or rows.stored_PRE.dtype != qkv_NX.dtype or qkv_NX.stride(1) != 1:
        raise NoKernel("keys and values of another number format than the pass")
    tokens, width = qkv_NX.shape[0], qkv_NX.shape[1] // (heads + 2 * kv_heads)
    query_NHD = qkv_NX.new_empty(tokens, heads, width)
    cos, sin = (qkv_NX, qkv_NX) if angles is None else angles
    stored = rows.stored_PRE
    _write_kernel[(tokens, heads + 2 * kv_heads)](
        qkv_NX, query_NHD, stored, paging.page_N, paging.row_N, cos, sin,
        qkv_NX if norms is None else norms.query_D, qkv_NX if norms is None else norms.key_D,
        0.0 if norms is None else norms.eps,
        qkv_NX.stride(0), stored.stride(0), stored.stride(1), cos.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        TURNED=0 if angles is None else cos.shape[-1], NORMED=norms is not None, num_warps=1,
    )  # fmt: skip
    return query_NHD


def angles(positions_N: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype) -> Angles:
    tokens, half = len(positions_N), len(frequencies)
    cos, sin = (torch.empty(tokens, 1, 2 * half, dtype=dtype, device=positions_N.device) for _ in range(2))
    _angles_kernel[(tokens,)](
        positions_N, frequencies, cos, sin, scale, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1
    )
    return cos, sin


def gate(gate_up_NX: torch.Tensor, act: Activation) -> torch.Tensor:
    if act not in _GATES or gate_up_NX.stride(-1) != 1 or gate_up_NX.ndim != 2:
        raise NoKernel("this activation")
    tokens, inner = gate_up_NX.shape[0], gate_up_NX.shape[1] // 2
    out_NI = gate_up_NX.new_empty(tokens, inner)
    grid = (tokens, triton.cdiv(inner, GATE_BLOCK))
    _gate_kernel[grid](gate_up_NX, out_NI, gate_up_NX.stride(0), inner, ACT=_GATES[act], BLOCK=GATE_BLOCK)
    return out_NI


def add_norm(x_NC: torch.Tensor, more_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    channels = x_NC.shape[-1]
    if channels > WIDEST_NORM or not (x_NC.is_contiguous() and more_NC.is_contiguous()) or x_NC.dtype != more_NC.dtype:
        raise NoKernel(f"sums and norms of {channels} channels in {str(x_NC.dtype).removeprefix('torch.')}")
    sum_NC, normed_NC = torch.empty_like(x_NC), torch.empty_like(x_NC)
    block = triton.next_power_of_2(channels)
    warps = min(max(block // 512, 1), 16)
    _add_norm_kernel[(x_NC.numel() // channels,)](
        x_NC, more_NC, weight_C, sum_NC, normed_NC, channels, eps, BLOCK=block, num_warps=warps
    )
    return sum_NC, normed_NC


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def _write_kernel(
    qkv, query, stored, page_N, row_N, cos, sin, query_weight, key_weight, eps,
    qkv_stride, page_stride, row_stride, angle_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one token: norm, rotation, and to where it belongs."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    source = qkv + token * qkv_stride + head * WIDTH
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        partner = tl.where(at < TURNED // 2, at + TURNED // 2, at - TURNED // 2)
        turns = at < TURNED
        opposite = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
        if NORMED:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
            weight = query_weight
            if head >= HEADS:
                weight = key_weight
            x = x * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            opposite = opposite * scale * tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
        if TURNED > 0:
            cosine = tl.load(cos + token * angle_stride + at, mask=turns, other=1.0).to(tl.float32)
            sine = tl.load(sin + token * angle_stride + at, mask=turns, other=0.0).to(tl.float32)
            x = x * cosine + opposite * sine
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * WIDTH + at, x.to(query.dtype.element_ty), mask=inside)
    else:
        row = stored + tl.load(page_N + token) * page_stride + tl.load(row_N + token) * row_stride
        offset = (head - HEADS) * 2 * WIDTH
        if head >= HEADS + KV_HEADS:
            offset = (head - HEADS - KV_HEADS) * 2 * WIDTH + WIDTH
        tl.store(row + offset + at, x.to(stored.dtype.element_ty), mask=inside)


@triton.jit
def _angles_kernel(positions, frequencies, cos, sin, scale, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=inside, other=0.0)
    cosine = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    sine = tl.sin(angle) * scale
    row = token * 2 * HALF + at
    tl.store(cos + row, cosine, mask=inside)
    tl.store(cos + row + HALF, cosine, mask=inside)
    tl.store(sin + row, (-sine).to(sin.dtype.element_ty), mask=inside)
    tl.store(sin + row + HALF, sine.to(sin.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate_up, out, stride, inner, ACT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gated = tl.load(gate_up + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + inner + at, mask=inside, other=0.0).to(tl.float32)
    if ACT == 0:
        gated = gated * tl.sigmoid(gated)
    else:  # gelu by tanh: x * (1 + tanh(y)) / 2 = x * sigmoid(2 y)
        gated = gated * tl.sigmoid(1.5957691216057308 * (gated + 0.044715 * gated * gated * gated))
    tl.store(out + token * inner + at, (gated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_kernel(x, more, weight, total, normed, channels, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * channels
    at = tl.arange(0, BLOCK)
    inside = at < channels
    added = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(more + row + at, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / channels + eps)
    value = value * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, value.to(normed.dtype.element_ty), mask=inside)
