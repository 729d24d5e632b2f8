"""Runs of Mamba-2 in chunks, as Triton kernels: what `ops/recurrent.recur_runs` does where there is no beta.

    states   one program for some rows and columns of one head's state walks over the chunks of a run, and leaves the state before
             each; it ends with the state behind the run
    outputs  every chunk for itself: the state before it, and its own tokens

Heads that share queries and keys read the same ones. Products are made in the number format of the values, sums in fp32. Writes
no page. Importing needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.on_triton.recurrent import laid_out
from stepwell.engine.ops.on_triton.segment_tables import tables_of
from stepwell.engine.ops.recurrent import CHUNK_TOKENS, Outcome, Points
from stepwell.engine.ops.recurrent_tokens import Tokens

BLOCK = 64  # rows or columns of a state


def recur_runs(points: Points, tokens: Tokens, state_RHDV: torch.Tensor) -> Outcome:
    """All runs of a batch in two launches; their outputs are in the number format of the values."""
    assert not tokens.is_delta, "this is for Mamba-2"
    heads, key_dim, value_dim = tokens.state_shape
    kind, parts = tokens.value_NHV.dtype, (tokens.query_NKD, tokens.key_NKD, tokens.value_NHV)
    query, key, value = (laid_out(each.to(kind)) for each in parts)
    taken_NH = tokens.steps.taken()
    decay_NH, tables = taken_NH * tokens.steps.rate, tables_of(points)
    chunks = len(tables.run_and_index_C2)
    before_CHDV, after_RHDV = value.new_empty(chunks, heads, key_dim, value_dim), torch.empty_like(state_RHDV)
    out_NHV = value.new_empty(value.shape)
    block_d, block_v = (min(BLOCK, max(triton.next_power_of_2(width), 16)) for width in (key_dim, value_dim))
    sizes = {"HEADS": heads, "GROUP": heads // key.shape[1], "KEY": key_dim, "VALUE": value_dim, "CHUNK": CHUNK_TOKENS}
    grid = (len(state_RHDV) * heads, triton.cdiv(key_dim, block_d), triton.cdiv(value_dim, block_v))
    _states_kernel[grid](
        key, value, taken_NH, decay_NH, state_RHDV, before_CHDV, after_RHDV, tables.run_start_R, tables.first_chunk_R,
        key.stride(0), value.stride(0), BLOCK_D=block_d, BLOCK_V=block_v, **sizes,
    )  # fmt: skip
    _outputs_kernel[(chunks, heads, triton.cdiv(value_dim, block_v))](
        query, key, value, taken_NH, decay_NH, before_CHDV, value if tokens.skip_H is None else tokens.skip_H, out_NHV,
        tables.run_start_R, tables.run_and_index_C2, query.stride(0), key.stride(0), value.stride(0),
        BLOCK_D=block_d, BLOCK_V=block_v, SKIP=tokens.skip_H is not None, **sizes,
    )  # fmt: skip
    return out_NHV, after_RHDV


@triton.jit(do_not_specialize=["start_R", "first_chunk_R"])
def _states_kernel(
    key, value, taken, decay, begun, before, after, start_R, first_chunk_R,
    key_stride, value_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    run, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < KEY)[:, None] & (v < VALUE)[None, :]
    where = d[:, None] * VALUE + v[None, :]
    keys, values = key + head // GROUP * KEY, value + head * VALUE
    state = tl.load(begun + (run * HEADS + head) * KEY * VALUE + where, mask=inside, other=0.0).to(tl.float32)
    row, stop, chunk = tl.load(start_R + run), tl.load(start_R + run + 1), tl.load(first_chunk_R + run)
    while row < stop:
        tl.store(before + (chunk * HEADS + head) * KEY * VALUE + where, state.to(before.dtype.element_ty), mask=inside)
        at = row + tl.arange(0, CHUNK)
        real = at < stop
        k = tl.load(keys + at[None, :] * key_stride + d[:, None], mask=real[None, :] & (d < KEY)[:, None], other=0.0)
        x = tl.load(values + at[:, None] * value_stride + v[None, :], mask=real[:, None] & (v < VALUE)[None, :], other=0.0)
        step = tl.load(taken + at * HEADS + head, mask=real, other=0.0)
        decays = tl.load(decay + at * HEADS + head, mask=real, other=0.0)
        whole = tl.sum(decays, axis=0)
        # Each token's later decays, summed up. As a difference of two sums, a strong decay would blur the weak ones behind it.
        later = (tl.arange(0, CHUNK) < CHUNK - 1) & (at + 1 < stop)
        following = tl.load(decay + (at + 1) * HEADS + head, mask=later, other=0.0)
        left = tl.exp(tl.cumsum(following, axis=0, reverse=True))
        new = (x.to(tl.float32) * (step * left)[:, None]).to(k.dtype)
        state = state * tl.exp(whole) + tl.dot(k, new, input_precision="ieee")
        row += CHUNK
        chunk += 1
    tl.store(after + (run * HEADS + head) * KEY * VALUE + where, state.to(after.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["start_R", "run_and_index_C2"])
def _outputs_kernel(
    query, key, value, taken, decay, before, skip, out, start_R,
    run_and_index_C2, query_stride, key_stride, value_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    run = tl.load(run_and_index_C2 + 2 * chunk)
    at = tl.load(start_R + run) + tl.load(run_and_index_C2 + 2 * chunk + 1) * CHUNK + tl.arange(0, CHUNK)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    real, in_v = at < tl.load(start_R + run + 1), v < VALUE
    queries, keys = query + head // GROUP * KEY, key + head // GROUP * KEY
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    result = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for block in tl.static_range((KEY + BLOCK_D - 1) // BLOCK_D):
        d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < KEY
        q = tl.load(queries + at[:, None] * query_stride + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
        k = tl.load(keys + at[None, :] * key_stride + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0)
        place = before + (chunk * HEADS + head) * KEY * VALUE + d[:, None] * VALUE + v[None, :]
        state = tl.load(place, mask=in_d[:, None] & in_v[None, :], other=0.0)
        scores += tl.dot(q, k, input_precision="ieee")
        result += tl.dot(q, state, input_precision="ieee")
    sums = tl.cumsum(tl.load(decay + at * HEADS + head, mask=real, other=0.0), axis=0)
    step = tl.load(taken + at * HEADS + head, mask=real, other=0.0)
    order = tl.arange(0, CHUNK)
    fade = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    scores = tl.where(order[:, None] >= order[None, :], scores * fade * step[None, :], 0.0)
    x = tl.load(value + at[:, None] * value_stride + head * VALUE + v[None, :], mask=real[:, None] & in_v[None, :], other=0.0)
    result = result * tl.exp(sums)[:, None] + tl.dot(scores.to(x.dtype), x, input_precision="ieee")
    if SKIP:
        result += tl.load(skip + head) * x.to(tl.float32)
    outputs = out + (at[:, None] * HEADS + head) * VALUE + v[None, :]
    tl.store(outputs, result.to(out.dtype.element_ty), mask=real[:, None] & in_v[None, :])
