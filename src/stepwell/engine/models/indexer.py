"""The index of DeepSeek sparse attention: a small key a token, by which each query selects the rows that attention reads.

    key      rotated(norm(key(x)))                              one head; this is a true layer norm, with a bias
    query    rotated(query(low-rank query of x)), and a weight for each index head

Only the first channels of a head are rotated. Reads and writes its own layer of one state; selects, and never attends.
Axes: N tokens, H index heads, D their width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from stepwell.engine.models.latent import apart, reordered
from stepwell.engine.models.layers import Linear, Parts
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Angles, rotate
from stepwell.engine.ops.selection import Selection
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.rows import RowFormat, latent_rows

_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Indexer:
    """`count` is the number of rows that a query selects."""

    state: str
    layer: int
    heads: int
    count: int
    kept: RowFormat
    query: Linear
    key: Linear
    key_norm: Linear  # weight and bias of the norm
    weight: Linear  # in fp32
    kernels: Kernels

    @classmethod
    def load(cls, parts: Parts, name: str, *, layer: int, state: str) -> Indexer:
        config, weights = parts.config, parts.weights
        heads, width = config.size("index_n_heads"), config.size("index_head_dim")
        turned = config.size("qk_rope_head_dim", most=width)
        query = parts.linear(f"{name}.wq_b", heads * width, config.size("q_lora_rank"), biased=False)
        key = parts.linear(f"{name}.wk", width, parts.hidden, biased=False)
        norm = Linear(weights.take(f"{name}.k_norm.weight", width), weights.take(f"{name}.k_norm.bias", width))
        if config.flag("indexer_rope_interleave", config.text("model_type") == "glm_moe_dsa"):
            query = reordered(query, apart(width, 0, turned, heads=heads))
            key, norm = (reordered(each, apart(width, 0, turned)) for each in (key, norm))
        scale = heads**-0.5 * width**-0.5  # for weights and products: positive, so relu commutes with it
        return cls(
            state=state,
            layer=layer,
            heads=heads,
            count=config.size("index_topk"),
            kept=latent_rows(parts.spec.state(state).dtype, width, 0),
            query=query,
            key=key,
            key_norm=norm,
            weight=Linear(parts.exact(f"{name}.weights_proj.weight", heads, parts.hidden) * scale),
            kernels=parts.kernels,
        )

    def __call__(self, x_NC: torch.Tensor, source_NQ: torch.Tensor, angles: Angles, batch: Batch) -> Selection:
        """Writes every token's key, and selects rows for each. `source_NQ` is the normed low-rank query of its attention."""
        paging, rows = batch.paging(None), batch.rows(self.state, self.layer, self.kept)
        key_ND = layer_norm(self.key(x_NC), self.key_norm.weight.shape, self.key_norm.weight, self.key_norm.bias, _EPS)
        self.kernels.write_rows(rows, paging.page_N, paging.row_N, rotate(key_ND[:, None], angles)[:, 0])
        query_NHD = rotate(self.query(source_NQ).unflatten(1, (self.heads, -1)), angles)
        scored = 0 if batch.spilled is None else batch.spilled.scored
        return self.kernels.select(query_NHD, self.weight(x_NC.float()), rows, paging, count=self.count, scored=scored)
