"""The attention block that most families share: one product for queries, keys and values, rotation, pages, one product out.

What differs is data: norms of queries and keys, a window, sinks, a cap, biases, a selector. Reads and writes its own layer of one
state, and the selector's. Rows that are only on the host are fetched once the selector has chosen them, before attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from stepwell.base.spec.families.attention import Heads
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.models.layers import Linear, Parts
from stepwell.engine.ops.kernels import TORCH, Kernels
from stepwell.engine.ops.pointwise import Angles, HeadNorms
from stepwell.engine.ops.selection import Selection
from stepwell.engine.ops.staging import attend_spilled
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import Rows
from stepwell.engine.passes.spilled import Spilled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """`state` and `layer` say where its rows are; `window` is the number of tokens it attends to, None for all."""

    state: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: Linear
    out: Linear
    window: int | None = None
    norms: HeadNorms | None = None
    sinks_H: torch.Tensor | None = None
    cap: float | None = None  # bounds scores, by tanh
    kernels: Kernels = TORCH
    selector: Selector | None = None  # chooses the tokens that queries attend to; None: they attend to all

    @classmethod
    def load(
        cls, parts: Parts, name: str, layer: LayerSpec, heads: Heads, *, queries: int | None = None, biased: bool | None = None,
        normed: bool | None = None, scale: float | None = None, qkv: Linear | None = None, sinks: bool = False,
        cap: float | None = None,
    ) -> Attention:  # fmt: skip
        """The tensors `name`.q_proj, k_proj, v_proj and o_proj, q_norm and k_norm if `normed`, by default if they exist, and
        `sinks` if asked for. `qkv` replaces the first three. `heads` and `queries` are the whole model's; `scale` is by default
        that of the width of a head.
        """
        queries, heads = heads_of_rank(parts, heads, queries)
        width, key_dim = heads.num * heads.key_dim, heads.key_dim
        if normed is None:
            normed = any(parts.weights.has(f"{name}.{each}_norm.weight") for each in "qk")
        outputs = {f"{name}.q_proj": queries * key_dim, f"{name}.k_proj": width, f"{name}.v_proj": width}
        state, place = layer.place("kv", "swa")
        return cls(
            state=state,
            layer=place,
            window=layer.window,
            heads=int(queries),  # kernels are built for plain numbers, not for shares
            kv_heads=int(heads.num),
            head_dim=key_dim,
            scale=key_dim**-0.5 if scale is None else scale,
            qkv=qkv or Linear.load(parts.weights, outputs, parts.hidden, biased=biased),
            out=parts.linear(f"{name}.o_proj", parts.hidden, queries * key_dim, biased=biased),
            norms=_head_norms(parts, name, key_dim) if normed else None,
            sinks_H=parts.weights.take(f"{name}.sinks", queries) if sinks else None,
            cap=cap,
            kernels=parts.kernels,
            selector=parts.selector if layer.window is None else None,
        )

    def __call__(self, x_NC: torch.Tensor, angles: Angles | None, batch: Batch) -> torch.Tensor:
        return self.out(self.attend(x_NC, angles, batch))

    def attend(self, x_NC: torch.Tensor, angles: Angles | None, batch: Batch) -> torch.Tensor:
        """Writes keys and values, and returns the output of every head: `[N, heads * head_dim]`."""
        paging = batch.paging_of(self.state) if self.window is None else batch.paging(self.window)
        rows = batch.rows(self.state, self.layer)
        query_NHD = self.kernels.write_keys_values(
            self.qkv(x_NC), rows, paging, heads=self.heads, kv_heads=self.kv_heads, norms=self.norms, angles=angles
        )
        return self._attend(query_NHD, rows, paging, batch).flatten(1)

    def _attend(self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, batch: Batch) -> torch.Tensor:
        if self.selector is None:
            return self._attend_to(query_NHD, rows, paging, ())
        assert self.sinks_H is None, "attention to chosen rows has no sinks"
        summaries, whole, spilled = batch.rows(self.selector.state, self.layer), batch.paging(None), batch.spilled
        self.selector.keep(rows, summaries, whole, batch.rows_of(self.state))
        scored = 0 if spilled is None else spilled.scored
        selection = self.selector.select(query_NHD, summaries, whole, scale=self.scale, scored=scored)
        if spilled is None:
            return self._attend_to(query_NHD, rows, paging, selection)
        self._fetch(spilled, self.selector, query_NHD, summaries, selection)
        return attend_spilled(self._attend_to, query_NHD, rows, spilled, selection)

    def _fetch(
        self, spilled: Spilled, selector: Selector, query_NHD: torch.Tensor, summaries: Rows, selection: Selection
    ) -> None:
        """Fetches the chosen rows, and those that the last token of a prompt would choose: the answer begins with them."""
        chosen = list(selection)
        for at, part in spilled.ends:
            if selection[at] is None:
                chosen[at] = selector.select_last(query_NHD, summaries, part, scale=self.scale, scored=spilled.scored)
        spilled.resolve(self.layer, chosen)
        spilled.fetch(self.layer)

    def _attend_to(self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, selection: Selection) -> torch.Tensor:
        heads, key_dim, scale = self.kv_heads, self.head_dim, self.scale
        if any(picked is not None for picked in selection):
            return self.kernels.attend_picked(
                query_NHD, rows, paging, selection, heads=heads, key_dim=key_dim, scale=scale, cap=self.cap
            )
        return self.kernels.attend(
            query_NHD, rows, paging, heads=heads, key_dim=key_dim, scale=scale, sinks_H=self.sinks_H, cap=self.cap
        )


class HasAttention(Protocol):
    @property
    def attention(self) -> Any: ...


def windows_of(blocks: Iterable[HasAttention]) -> tuple[int | None, ...]:
    """The windows of a model's blocks, None for the whole past: each once."""
    return tuple(dict.fromkeys(block.attention.window for block in blocks))


def heads_of_rank(parts: Parts, heads: Heads, queries: int | None = None) -> tuple[int, Heads]:
    """The query heads of a rank, and the KV heads that they attend to, which other ranks may have too."""
    queries = parts.config.size("num_attention_heads") if queries is None else queries
    share = parts.ranks.share(queries, "attention heads")
    return share, replace(heads, num=parts.ranks.share_or_repeat(heads.num, "KV heads"))


def _head_norms(parts: Parts, name: str, key_dim: int) -> HeadNorms:
    query, key = parts.norm(f"{name}.q_norm", key_dim), parts.norm(f"{name}.k_norm", key_dim)
    return HeadNorms(query.weight, key.weight, query.eps)
