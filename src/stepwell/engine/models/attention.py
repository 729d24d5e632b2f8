"""The attention block that most families share: one product for queries, keys and values, rotation, pages, one product out.

What differs is data: norms of queries and keys, a window, sinks, a cap, biases. Reads and writes its own layer of one state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.base.spec.families.attention import Heads
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.layers import Linear, RMSNorm, rotate
from stepwell.engine.ops.attention import attend, write_rows
from stepwell.engine.passes.batch import Batch

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """`state` and `layer` say where its rows are; `window` is how many tokens it looks at, None for all."""

    state: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: Linear
    out: Linear
    window: int | None = None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    sinks_H: torch.Tensor | None = None
    cap: float | None = None  # scores are kept within it, by tanh

    def __call__(self, x_NC: torch.Tensor, angles: Angles | None, batch: Batch) -> torch.Tensor:
        query, key, value = self.project(x_NC, angles)
        return self.out(self.look(query, key, value, batch))

    def project(self, x_NC: torch.Tensor, angles: Angles | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `[N, heads, head_dim]`, normed and rotated."""
        heads, kv_heads = self.heads, self.kv_heads
        asked_NXD, value = self.qkv(x_NC).unflatten(1, (-1, self.head_dim)).split((heads + kv_heads, kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            asked_NXD = torch.cat([self.query_norm(asked_NXD[:, :heads]), self.key_norm(asked_NXD[:, heads:])], dim=1)
        if angles is not None:
            asked_NXD = rotate(asked_NXD, angles)  # queries and keys at once
        query, key = asked_NXD.split((heads, kv_heads), dim=1)
        return query, key, value

    def look(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Keeps keys and values, and returns what the queries see: `[N, heads * head_dim]`."""
        paging = batch.paging(self.window)
        rows = batch.rows(self.state, self.layer)
        write_rows(rows, paging, key, value)
        seen = attend(
            query,
            rows,
            paging,
            heads=self.kv_heads,
            key_dim=self.head_dim,
            scale=self.scale,
            sinks_H=self.sinks_H,
            cap=self.cap,
        )
        return seen.flatten(1)


def queries_keys_values(
    weights: Weights, name: str, queries: int, heads: Heads, hidden: int, *, biased: bool | None = None
) -> Linear:  # fmt: skip
    """The product that makes all three, from tensors `name`.q_proj, k_proj and v_proj."""
    width = heads.num * heads.key_dim
    outputs = {f"{name}.q_proj": queries * heads.key_dim, f"{name}.k_proj": width, f"{name}.v_proj": width}
    return Linear.load(weights, outputs, hidden, biased=biased)
