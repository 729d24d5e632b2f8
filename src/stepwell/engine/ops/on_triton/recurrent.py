"""A recurrence over a batch as Triton kernels over the pages, and the norm behind it: what `ops/recurrent.py` does.

Singles are one launch: each state is read from its page, moved on by one token and written where it was; unit lengths, decays,
betas, skips are done on the way. Runs are computed by another library, between reading their states and writing them. Nothing is
written before everything else was launched: what fails before that can be computed again by plain torch. Importing needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent import Outcome, Points
from stepwell.engine.ops.recurrent_tokens import UNIT_EPS, Tokens

RecurRuns = Callable[[Points, Tokens, torch.Tensor], Outcome]

STATE_BLOCK = 4096  # numbers of a state that one program of a step holds
NORM_BLOCK = 1024  # channels that one program of a norm reads, or those of one norm if more
WIDEST_NORM = 16384
_GATES: dict[Activation, int] = {silu: 0, torch.sigmoid: 1}


class Recurrence:
    """With what computes runs by the delta rule, and by Mamba-2's: see `ops/recurrent.recur_runs`."""

    def __init__(self, delta_runs: RecurRuns, other_runs: RecurRuns) -> None:
        self._delta_runs = delta_runs
        self._other_runs = other_runs

    def __call__(self, points: Points, layer: int, tokens: Tokens) -> torch.Tensor:
        """In the number format of the values."""
        if not points.has_runs:
            return step_in_pages(points, layer, tokens)
        singles = points.num_singles
        state_RHDV = points.read("ssm", layer, *tokens.state_shape, first=singles)
        runs = self._delta_runs if tokens.is_delta else self._other_runs
        out_NHV, after_RHDV = runs(points, tokens.after(singles), state_RHDV)
        out_NHV = out_NHV.to(tokens.value_NHV.dtype)
        if singles:
            out_NHV = torch.cat([step_in_pages(points, layer, tokens), out_NHV])
        points.write("ssm", layer, [after_RHDV], first=singles)
        return out_NHV


def step_in_pages(points: Points, layer: int, tokens: Tokens) -> torch.Tensor:
    """One token of each single, `[B, H, V]`, in the number format of the values."""
    heads, key_dim, value_dim = tokens.state_shape
    query, key, value = (laid_out(each) for each in (tokens.query_NKD, tokens.key_NKD, tokens.value_NHV))
    raw, beta = laid_out(tokens.steps.raw), None if tokens.beta_NH is None else laid_out(tokens.beta_NH)
    state_PE, batch = points.pages.layer_PRE("ssm", layer)[:, 0], points.num_singles
    out_BHV = value.new_empty(batch, heads, value_dim)
    block_d = triton.next_power_of_2(key_dim)
    block_v = max(min(STATE_BLOCK // block_d, triton.next_power_of_2(value_dim)), 1)
    _step_kernel[(batch * heads, triton.cdiv(value_dim, block_v))](
        query, key, value, raw, tokens.steps.bias, tokens.steps.rate, raw if beta is None else beta,
        raw if tokens.skip_H is None else tokens.skip_H, out_BHV, state_PE, points.page_S, points.fresh_S.view(torch.uint8),
        query.stride(0), key.stride(0), value.stride(0), raw.stride(0), 0 if beta is None else beta.stride(0),
        state_PE.stride(0), tokens.query_scale, *tokens.steps.limits,
        HEADS=heads, GROUP=heads // key.shape[1], KEY=key_dim, VALUE=value_dim, BLOCK_D=block_d, BLOCK_V=block_v,
        BY_CHANNEL=tokens.steps.by_channel, DELTA=tokens.is_delta, SKIP=tokens.skip_H is not None, EPS=UNIT_EPS,
    )  # fmt: skip
    return out_BHV


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """With all of a token's numbers side by side; tokens may lie apart."""
    expected = 1
    for axis in range(x.ndim - 1, 0, -1):
        if x.shape[axis] > 1 and x.stride(axis) != expected:
            return x.contiguous()
        expected *= x.shape[axis]
    return x


def gated_norm(
    x_NC: torch.Tensor, gate_NC: torch.Tensor, weight_C: torch.Tensor | None, eps: float, *, groups: int = 1,
    gate_first: bool = False, act: Activation = silu,
) -> torch.Tensor:  # fmt: skip
    """In the number format of the gate."""
    width, (gate, per_token) = x_NC.shape[-1] // groups, (laid_out(gate_NC), x_NC[0].numel())
    if act not in _GATES or not x_NC.is_contiguous() or width > WIDEST_NORM:
        raise NoKernel(f"gated norms of {width} channels, or with this activation")
    out_NC = torch.empty(x_NC.shape, dtype=gate.dtype, device=gate.device)
    rows, block = x_NC.numel() // width, triton.next_power_of_2(width)
    together = max(NORM_BLOCK // block, 1)
    _gated_norm_kernel[(triton.cdiv(rows, together),)](
        x_NC, gate, gate if weight_C is None else weight_C, out_NC, rows, gate.stride(0), eps,
        WIDTH=width, BLOCK=block, ROWS=together, PER_TOKEN=per_token // width, GROUPS=groups, ACT=_GATES[act],
        NORMED=weight_C is not None, GATE_FIRST=gate_first, num_warps=min(max(block * together // 512, 1), 16),
    )  # fmt: skip
    return out_NC


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate where it is small too."""
    power = tl.exp(tl.minimum(x, 20.0))
    series = power * (1.0 - power * (0.5 - power * (0.33333333 - power * 0.25)))
    return tl.where(x > 20.0, x, tl.where(power < 0.03, series, tl.log(1.0 + power)))


@triton.jit(do_not_specialize=["page_B"])
def _step_kernel(
    query, key, value, raw, bias, rate, beta, skip, out, state, page_B,
    fresh_B, query_stride, key_stride, value_stride, raw_stride, beta_stride, page_stride,
    scale, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state, of one request."""
    at, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    d, v = tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < KEY, v < VALUE
    kept = state + tl.load(page_B + at) * page_stride + (head * KEY + d)[:, None] * VALUE + v[None, :]
    inside = in_d[:, None] & in_v[None, :]
    past = tl.load(kept, mask=inside & (tl.load(fresh_B + at) == 0), other=0.0).to(tl.float32)
    q = tl.load(query + at * query_stride + head // GROUP * KEY + d, mask=in_d, other=0.0).to(tl.float32)
    k = tl.load(key + at * key_stride + head // GROUP * KEY + d, mask=in_d, other=0.0).to(tl.float32)
    x = tl.load(value + at * value_stride + head * VALUE + v, mask=in_v, other=0.0).to(tl.float32)
    if DELTA:
        q *= scale / tl.sqrt(tl.sum(q * q, axis=0) + EPS)
        k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + EPS)
    if BY_CHANNEL:
        value = tl.load(raw + at * raw_stride + head * KEY + d, mask=in_d, other=0.0).to(tl.float32)
        step = softplus(value + tl.load(bias + head * KEY + d, mask=in_d, other=0.0))
        step = tl.minimum(tl.maximum(step, least), most)
        past *= tl.exp(step * tl.load(rate + head))[:, None]
    else:
        step = softplus(tl.load(raw + at * raw_stride + head).to(tl.float32) + tl.load(bias + head))
        step = tl.minimum(tl.maximum(step, least), most)
        past *= tl.exp(step * tl.load(rate + head))
    if DELTA:
        strength = tl.sigmoid(tl.load(beta + at * beta_stride + head).to(tl.float32))
        new = strength * (x - tl.sum(k[:, None] * past, axis=0))
    else:
        new = x * step
    past += k[:, None] * new[None, :]
    told_v = tl.sum(q[:, None] * past, axis=0)
    if SKIP:
        told_v += tl.load(skip + head) * x
    tl.store(kept, past.to(state.dtype.element_ty), mask=inside)
    tl.store(out + (at * HEADS + head) * VALUE + v, told_v.to(out.dtype.element_ty), mask=in_v)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_kernel(
    x, gate, weight, out, rows, gate_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PER_TOKEN: tl.constexpr, GROUPS: tl.constexpr,
    ACT: tl.constexpr, NORMED: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Several parts of WIDTH channels; a token has PER_TOKEN of them, and the weight is for GROUPS of them."""
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * WIDTH + at[None, :], mask=inside, other=0.0).to(tl.float32)
    begun = row // PER_TOKEN * gate_stride + row % PER_TOKEN * WIDTH
    opened = tl.load(gate + begun[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if ACT == 0:
        opened = opened * tl.sigmoid(opened)
    else:
        opened = tl.sigmoid(opened)
    if NORMED:
        if GATE_FIRST:
            value *= opened
        value *= (1.0 / tl.sqrt(tl.sum(value * value, axis=1) / WIDTH + eps))[:, None]
        part = row % GROUPS
        value *= tl.load(weight + part[:, None] * WIDTH + at[None, :], mask=inside, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            value *= opened
    else:
        value *= opened
    tl.store(out + row[:, None] * WIDTH + at[None, :], value.to(out.dtype.element_ty), mask=inside)
