"""Runs of delta nets by flash-linear-attention, all runs of a batch in one call: what `ops/recurrent.recur_runs` does.

Its conventions compared with ours: states are `[K, V]` too; decays are logarithms, at most 0; it would multiply queries by
1/sqrt(K) and is asked not to; fewer key heads than value heads are known to it. Products are made in the number format of the
values, states and sums of decays are kept in fp32. What comes before is one kernel of ours, since the library would copy every
part of a row first. Writes no page. Importing needs Triton; the library is imported with the first run.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.on_triton.recurrent import laid_out, softplus
from stepwell.engine.ops.on_triton.segment_tables import tables_of
from stepwell.engine.ops.recurrent import Outcome, Points
from stepwell.engine.ops.recurrent_tokens import UNIT_EPS, Tokens

UNIT_BLOCK = 1024  # numbers of a program that makes heads of length 1
DECAY_BLOCK = 1024


def recur_runs(points: Points, tokens: Tokens, state_RHDV: torch.Tensor) -> Outcome:
    """Raises what the library raises, before anything is written."""
    chunk_gated_delta_rule, chunk_kda = _library()
    assert tokens.beta_NH is not None, "this is for the delta rule"
    tables, steps = tables_of(points), tokens.steps
    shared = {
        "q": unit(tokens.query_NKD, tokens.query_scale)[None],
        "k": unit(tokens.key_NKD, 1.0)[None],
        "v": tokens.value_NHV.contiguous()[None],
        "beta": tokens.beta_NH.float().sigmoid()[None],
        "scale": 1.0,
        "initial_state": state_RHDV,
        "output_final_state": True,
        "cu_seqlens": tables.run_start_R,
        "cu_seqlens_cpu": tables.run_start_on_host_R,
    }
    if steps.by_channel:
        out_1NHV, after_RHDV = chunk_kda(g=_channel_decay(tokens)[None], **shared)
    else:
        decay_NH = steps.taken() * steps.rate
        out_1NHV, after_RHDV = chunk_gated_delta_rule(g=decay_NH[None], chunk_indices=tables.run_and_index_C2, **shared)
    return out_1NHV[0], after_RHDV


@cache
def _library() -> tuple[Any, Any]:
    with warnings.catch_warnings():  # of what is deprecated in torch: the library's business
        warnings.simplefilter("ignore")
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

    return chunk_gated_delta_rule, chunk_kda


def unit(x_NKD: torch.Tensor, scale: float) -> torch.Tensor:
    """Heads of length `scale`, one behind the other, in the number format they came in."""
    x_NKD, (tokens, heads, width) = laid_out(x_NKD), x_NKD.shape
    out_NKD, block = x_NKD.new_empty(tokens, heads, width), triton.next_power_of_2(width)
    rows = max(UNIT_BLOCK // block, 1)
    _unit_kernel[(triton.cdiv(tokens * heads, rows),)](
        x_NKD, out_NKD, tokens * heads, x_NKD.stride(0), scale, HEADS=heads, WIDTH=width, BLOCK=block, ROWS=rows, EPS=UNIT_EPS,
    )  # fmt: skip
    return out_NKD


def _channel_decay(tokens: Tokens) -> torch.Tensor:
    """The steps of every channel, in fp32."""
    raw_NHD, (least, most) = laid_out(tokens.steps.raw), tokens.steps.limits
    (rows, heads, width), per_token = raw_NHD.shape, raw_NHD.shape[1] * raw_NHD.shape[2]
    decay_NHD = torch.empty(rows, heads, width, dtype=torch.float32, device=raw_NHD.device)
    _decay_kernel[(rows, triton.cdiv(per_token, DECAY_BLOCK))](
        raw_NHD, tokens.steps.bias, tokens.steps.rate, decay_NHD, raw_NHD.stride(0), least, most,
        PER_TOKEN=per_token, WIDTH=width, BLOCK=DECAY_BLOCK,
    )  # fmt: skip
    return decay_NHD


@triton.jit(do_not_specialize=["rows"])
def _unit_kernel(
    x, out, rows, stride, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < WIDTH)[None, :]
    begun = row // HEADS * stride + row % HEADS * WIDTH
    value = tl.load(x + begun[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    value *= (scale / tl.sqrt(tl.sum(value * value, axis=1) + EPS))[:, None]
    tl.store(out + row[:, None] * WIDTH + at[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decay_kernel(
    raw, bias, rate, out, stride, least, most,
    PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < PER_TOKEN
    value = tl.load(raw + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    step = softplus(value + tl.load(bias + at, mask=inside, other=0.0))
    step = tl.minimum(tl.maximum(step, least), most)
    tl.store(out + token * PER_TOKEN + at, step * tl.load(rate + at // WIDTH, mask=inside, other=0.0), mask=inside)
