"""The operations between the products of a layer, in plain torch: norms, rotations, gates, writing keys and values to pages.

Runs everywhere, and is the reference of faster kernels. Axes: N tokens, C channels, H query heads, K key heads, D width of
a head, I inner channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, rms_norm, silu

from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import Rows

Activation = Callable[[torch.Tensor], torch.Tensor]
Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, `[N, 1, width]`


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights of the norms of queries and of keys, `[D]` each."""

    query_D: torch.Tensor
    key_D: torch.Tensor
    eps: float


def norm(x_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """In the number format of the weight, which may be wider than that of the stream."""
    return rms_norm(x_NC.to(weight_C.dtype), (x_NC.shape[-1],), weight_C, eps).to(x_NC.dtype)


def add_norm(x_NC: torch.Tensor, more_NC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and the norm of it."""
    sum_NC = x_NC + more_NC
    return sum_NC, norm(sum_NC, weight_C, eps)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, approximate="tanh")


def gate(gate_up_NX: torch.Tensor, act: Activation) -> torch.Tensor:
    """`act(gate) * up` of products that lie side by side, `[N, I]`."""
    gate_NI, up_NI = gate_up_NX.chunk(2, dim=-1)
    return act(gate_NI).mul_(up_NI)


def angles(positions_N: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Cosines and sines of a pass's positions, once for all layers; the sines of the first half turned around."""
    angle = positions_N[:, None].float() * frequencies
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cos, cos], dim=-1)[:, None].to(dtype), torch.cat([-sin, sin], dim=-1)[:, None].to(dtype)


def rotate(x_NHD: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Each head turned by its token's angles, first half of the rotated channels against second half; the rest as it is."""
    cos, sin = angles
    width = cos.shape[-1]
    turned = x_NHD[..., :width]
    low, high = turned.chunk(2, dim=-1)
    turned = torch.addcmul(turned * cos, torch.cat([high, low], dim=-1), sin)
    return turned if width == x_NHD.shape[-1] else torch.cat([turned, x_NHD[..., width:]], dim=-1)


def write_keys_values(
    qkv_NX: torch.Tensor, rows: Rows, paging: Paging, *, heads: int, kv_heads: int, norms: HeadNorms | None, angles: Angles | None
) -> torch.Tensor:
    """Writes every token's keys and values to its page, and returns its queries, `[N, H, D]`.

    `qkv_NX` has queries, keys and values side by side. Queries and keys are normed and rotated, where `norms` and
    `angles` are given. A row in a page is `[head][key | value]`.
    """
    asked_NXD, value_NKD = qkv_NX.unflatten(1, (heads + 2 * kv_heads, -1)).split((heads + kv_heads, kv_heads), dim=1)
    if norms is not None:
        query_NHD, key_NKD = asked_NXD.split((heads, kv_heads), dim=1)
        asked_NXD = torch.cat([norm(query_NHD, norms.query_D, norms.eps), norm(key_NKD, norms.key_D, norms.eps)], dim=1)
    if angles is not None:
        asked_NXD = rotate(asked_NXD, angles)  # queries and keys at once
    asked: tuple[torch.Tensor, torch.Tensor] = asked_NXD.split((heads, kv_heads), dim=1)
    query_NHD, key_NKD = asked
    rows.write(paging.page_N, paging.row_N, torch.cat([key_NKD, value_NKD], dim=-1).flatten(1))
    return query_NHD


ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu": gelu, "gelu_pytorch_tanh": gelu_tanh}
