"""Recurrent layers, whose state has a fixed size, in plain torch: runs everywhere, and is the reference of faster kernels.

Gated delta nets, Kimi's and Mamba-2 are one recurrence. A head's state is a matrix that decays, takes in a token, is queried:

    state = exp(decay) * state + key ⊗ new,    out = query @ state
    new   = value                                         Mamba-2: query is C, key is B, value is dt * x
    new   = beta * (value - key @ (exp(decay) * state))   delta rule: only what the state does not hold already

A head's decay is one number, or with Kimi one for each channel of its keys: `[N, H]` or `[N, H, D]`.

A short convolution comes before it, whose state is its last inputs. A pass takes singles in one step together and each run in
chunks of tokens; a segment that starts at token 0 never reads its page. Knows no weights and no models.

Axes: N tokens of a batch, S segments, B singles, T tokens of a run, C channels, W columns of a convolution's window, K key heads,
G value heads per key head, H = K * G value heads, D width of a key, V of a value, X = G * V. A page holds `conv` as `[W, C]`,
oldest input first, and `ssm` as `[H, D, V]`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from stepwell.engine.ops.decay import ChannelDecay, Decay, HeadDecay
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent_tokens import Ready, Tokens
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.numbers import Send, copy
from stepwell.engine.passes.pages import DevicePages

CHUNK_TOKENS = 64

Outcome = tuple[torch.Tensor, torch.Tensor]  # the output, and the state after it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """The point states of a batch. Made once for a pass; reads and writes only the pages of its segments."""

    pages: DevicePages
    page_S: torch.Tensor
    fresh_S: torch.Tensor
    spans: tuple[tuple[slice, slice], ...]  # segments and their rows: all singles first, then run by run
    num_singles: int
    starts: Sequence[int]  # segment s has rows [starts[s], starts[s + 1])
    send: Send = copy  # copies larger arrays to the device
    plans: dict[Hashable, Any] = field(default_factory=dict)  # computed by kernels once for all layers

    @classmethod
    def of(cls, batch: Batch) -> Points:
        singles, starts = batch.num_singles, batch.starts
        spans = [(slice(0, singles), slice(0, singles))] if singles else []
        spans += [(slice(at, at + 1), slice(starts[at], starts[at + 1])) for at in range(singles, len(batch.segments))]
        return cls(
            pages=batch.pages,
            page_S=batch.points_S,
            fresh_S=batch.fresh_S,
            spans=tuple(spans),
            num_singles=singles,
            starts=starts,
            send=batch.send,
        )

    @property
    def has_runs(self) -> bool:
        return len(self.starts) - 1 > self.num_singles

    def read(self, name: str, layer: int, *shape: int, first: int = 0) -> torch.Tensor:
        """A copy of each segment's state from segment `first` on, in fp32; zeros where it starts."""
        page_S, fresh_S = self.page_S[first:], self.fresh_S[first:]
        state_SE = self.pages.layer_PRE(name, layer)[page_S, 0].float().masked_fill_(fresh_S[:, None], 0)
        return state_SE.view(-1, *shape)

    def write(self, name: str, layer: int, states: list[torch.Tensor], *, first: int = 0) -> None:
        """Writes the states of all segments from `first` on, in parts as `spans` has them."""
        layer_PRE = self.pages.layer_PRE(name, layer)
        layer_PRE[self.page_S[first:], 0] = torch.cat(states).flatten(1).to(layer_PRE.dtype)


def convolve(
    points: Points, layer: int, x_NC: torch.Tensor, weight_WC: torch.Tensor, bias_C: torch.Tensor | None = None, *,
    act: Activation | None = None,
) -> torch.Tensor:  # fmt: skip
    """Every channel's sum over its token and the W - 1 before it, `[N, C]` in fp32. Moves the layer's `conv` on."""
    state_SWC = points.read("conv", layer, *weight_WC.shape)
    outs, states = [], []
    for segments, rows in points.spans:
        past_SWC = state_SWC[segments]
        x_STC = x_NC[rows].unflatten(0, (past_SWC.shape[0], -1))
        out_STC, after_SWC = convolve_run(x_STC, past_SWC, weight_WC, bias_C)
        outs.append(out_STC.flatten(0, 1))
        states.append(after_SWC)
    points.write("conv", layer, states)
    return torch.cat(outs) if act is None else act(torch.cat(outs))


def recur(points: Points, layer: int, tokens: Tokens) -> torch.Tensor:
    """The recurrence over a batch, `[N, H, V]` in fp32; the delta rule if there is a beta. Moves the layer's `ssm` on."""
    return tokens.skipped(recur_ready(points, layer, tokens.ready()))


def recur_ready(points: Points, layer: int, ready: Ready) -> torch.Tensor:
    heads, value_dim = ready.value_NHV.shape[1:]
    state_SHDV = points.read("ssm", layer, heads, ready.key_NKD.shape[-1], value_dim)
    outs, states = [], []
    for segments, rows in points.spans:
        query, key, value, decay, beta = ready.at(rows)
        if segments.start < points.num_singles:
            out, after_SHDV = step(query, key, value, decay, state_SHDV[segments], beta)
        else:
            out, after_HDV = scan(query, key, value, decay, state_SHDV[segments.start], beta)
            after_SHDV = after_HDV[None]
        outs.append(out)
        states.append(after_SHDV)
    points.write("ssm", layer, states)
    return torch.cat(outs)


def recur_runs(points: Points, tokens: Tokens, state_RHDV: torch.Tensor) -> Outcome:
    """The same for runs alone, from the states given: `tokens` begin with those of the first run. Writes nothing."""
    first, ready = points.starts[points.num_singles], tokens.ready()
    outs, states = [], []
    for (_, rows), state_HDV in zip(points.spans[-len(state_RHDV) :], state_RHDV, strict=True):
        query, key, value, decay, beta = ready.at(slice(rows.start - first, rows.stop - first))
        out, after_HDV = scan(query, key, value, decay, state_HDV, beta)
        outs.append(out)
        states.append(after_HDV)
    return tokens.skipped(torch.cat(outs)), torch.stack(states)


def convolve_run(
    x_STC: torch.Tensor, state_SWC: torch.Tensor, weight_WC: torch.Tensor, bias_C: torch.Tensor | None
) -> Outcome:  # fmt: skip
    """Several segments of one length. Each sum is made in the same order wherever a run is cut, so cutting changes no bit."""
    length, window = x_STC.shape[1], weight_WC.shape[0]
    inputs = torch.cat([state_SWC, x_STC.to(state_SWC.dtype)], dim=1)
    weight_WC = weight_WC.to(inputs.dtype)
    out = inputs[:, 1 : 1 + length] * weight_WC[0]
    for column in range(1, window):
        out.addcmul_(inputs[:, 1 + column : 1 + column + length], weight_WC[column])
    return out if bias_C is None else out.add_(bias_C), inputs[:, -window:]


def step(
    query_BKD: torch.Tensor, key_BKD: torch.Tensor, value_BHV: torch.Tensor, decay: torch.Tensor, state_BHDV: torch.Tensor,
    beta_BH: torch.Tensor | None = None,
) -> Outcome:  # fmt: skip
    """One token of each of B segments, in the number format of the state."""
    kind, group = state_BHDV.dtype, value_BHV.shape[1] // key_BKD.shape[1]
    query, key = (each.to(kind).repeat_interleave(group, dim=1) for each in (query_BKD, key_BKD))
    by_head = decay.ndim == 2
    fade = decay.to(kind).exp()[..., None, None] if by_head else decay.to(kind).exp()[..., None]  # [B, H, 1 or D, 1]
    # the state is large and read once: out = query @ (faded + key ⊗ new) = query @ faded + (query . key) new
    query_BH2D = torch.stack([query, key], dim=2)
    past_BH2V = query_BH2D @ state_BHDV * fade if by_head else query_BH2D * fade.mT @ state_BHDV
    new_BHV = value_BHV.to(kind)
    if beta_BH is not None:
        new_BHV = beta_BH.to(kind)[..., None] * (new_BHV - past_BH2V[:, :, 1])
    out_BHV = torch.addcmul(past_BH2V[:, :, 0], (query * key).sum(-1, keepdim=True), new_BHV)
    return out_BHV, (state_BHDV * fade).addcmul_(key[..., None], new_BHV[:, :, None])


def scan(
    query_TKD: torch.Tensor, key_TKD: torch.Tensor, value_THV: torch.Tensor, decay: torch.Tensor, state_HDV: torch.Tensor,
    beta_TH: torch.Tensor | None = None, *, chunk: int = CHUNK_TOKENS,
) -> Outcome:  # fmt: skip
    """All tokens of one run, chunk by chunk, in the number format of the state; inside a chunk there is no loop over tokens."""
    if decay.ndim == 3:  # the channels of a key decay differently for each value head: none can share products
        group = value_THV.shape[1] // key_TKD.shape[1]
        query_TKD, key_TKD = (each.repeat_interleave(group, dim=1) for each in (query_TKD, key_TKD))
    kind, heads, value_dim = state_HDV.dtype, key_TKD.shape[1], value_THV.shape[2]
    query_KTD, key_KTD = (each.to(kind).transpose(0, 1) for each in (query_TKD, key_TKD))
    value_KGTV = value_THV.to(kind).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
    beta_KGT = None if beta_TH is None else beta_TH.to(kind).T.unflatten(0, (heads, -1))
    state_KDX = state_HDV.unflatten(0, (heads, -1)).transpose(1, 2).flatten(2)
    outs = []
    for start in range(0, query_TKD.shape[0], chunk):
        at = slice(start, start + chunk)
        decays, beta_KGT1 = _decay_of(key_KTD[:, at], decay[at]), None if beta_KGT is None else beta_KGT[..., at, None]
        out_KGTV, state_KDX = _chunk(query_KTD[:, at], key_KTD[:, at], value_KGTV[:, :, at], decays, state_KDX, beta_KGT1)
        outs.append(out_KGTV)
    state_KGDV = state_KDX.unflatten(2, (-1, value_dim)).transpose(1, 2)
    return torch.cat(outs, dim=2).permute(2, 0, 1, 3).flatten(1, 2), state_KGDV.flatten(0, 1)


def _chunk(
    query_KTD: torch.Tensor, key_KTD: torch.Tensor, value_KGTV: torch.Tensor, decays: Decay, state_KDX: torch.Tensor,
    beta_KGT1: torch.Tensor | None,
) -> Outcome:  # fmt: skip
    """Products of all tokens at once: with the state before the chunk, and with each other.

    With `decay(j, i)` after token j up to token i, the new values of tokens i solve a triangular system:
    new_i + sum_{j<i} beta_i (key_i . key_j) decay(j, i) new_j = beta_i (value_i - decay(start, i) key_i @ state).
    """
    new_KGTV = value_KGTV
    if beta_KGT1 is not None:
        system_KGTT = decays.products(key_KTD) * beta_KGT1
        new_KGTV = beta_KGT1 * (value_KGTV - decays.query_state(key_KTD, state_KDX))
        new_KGTV = torch.linalg.solve_triangular(system_KGTT, new_KGTV, upper=False, unitriangular=True).contiguous()
    out_KGTV = decays.query_state(query_KTD, state_KDX) + decays.products(query_KTD) @ new_KGTV
    return out_KGTV, decays.final_state(state_KDX, new_KGTV)


def _decay_of(key_KTD: torch.Tensor, decay: torch.Tensor) -> Decay:
    """For a chunk with decays `[T, H]` or `[T, H, D]`."""
    if decay.ndim == 3:
        return ChannelDecay.of(key_KTD, decay.transpose(0, 1))
    return HeadDecay.of(key_KTD, decay.T.unflatten(0, (key_KTD.shape[0], -1)))


def gated_norm(
    x_NC: torch.Tensor, gate_NC: torch.Tensor, weight_C: torch.Tensor | None, eps: float, *, groups: int = 1,
    gate_first: bool = False, act: Activation = silu,
) -> torch.Tensor:  # fmt: skip
    """Follows a recurrence: a norm over each of `groups` parts of the channels, and a gate after or before it; in fp32."""
    gate = act(gate_NC.float())
    if weight_C is None:
        return x_NC * gate
    parts = (x_NC * gate if gate_first else x_NC).unflatten(-1, (groups, -1))
    normed = rms_norm(parts, parts.shape[-1:], eps=eps).flatten(-2) * weight_C
    return normed if gate_first else normed * gate
