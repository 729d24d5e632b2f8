"""The attention block that most families share: one product for queries, keys and values, rotation, pages, one product out.

What differs is data: norms of queries and keys, a window, sinks, a cap, biases, a selector. Reads and writes its own layer of one
state, and of the selector's. Where rows are on the host alone, what the selector picks is fetched before it is attended to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from stepwell.base.spec.families.attention import Heads
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.layers import Linear, RMSNorm
from stepwell.engine.ops.kernels import TORCH, Kernels
from stepwell.engine.ops.pointwise import Angles, HeadNorms
from stepwell.engine.ops.selection import Selection
from stepwell.engine.ops.staging import attend_spilled
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.paging import Paging
from stepwell.engine.passes.rows import Rows
from stepwell.engine.passes.spilled import Spilled
from stepwell.engine.ranks import Ranks


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
    norms: HeadNorms | None = None
    sinks_H: torch.Tensor | None = None
    cap: float | None = None  # scores are kept within it, by tanh
    kernels: Kernels = TORCH
    selector: Selector | None = None  # who picks the tokens that queries look at; None: they look at everything

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads"):  # kernels are built for plain numbers, not for shares of them
            object.__setattr__(self, name, int(getattr(self, name)))

    def __call__(self, x_NC: torch.Tensor, angles: Angles | None, batch: Batch) -> torch.Tensor:
        return self.out(self.look(x_NC, angles, batch))

    def look(self, x_NC: torch.Tensor, angles: Angles | None, batch: Batch) -> torch.Tensor:
        """Keeps keys and values, and returns what the queries see: `[N, heads * head_dim]`."""
        paging = batch.paging_of(self.state) if self.window is None else batch.paging(self.window)
        rows = batch.rows(self.state, self.layer)
        query_NHD = self.kernels.write_keys_values(
            self.qkv(x_NC), rows, paging, heads=self.heads, kv_heads=self.kv_heads, norms=self.norms, angles=angles
        )
        return self._attend(query_NHD, rows, paging, batch).flatten(1)

    def _attend(self, query_NHD: torch.Tensor, rows: Rows, paging: Paging, batch: Batch) -> torch.Tensor:
        if self.selector is None:
            return self._attend_to(query_NHD, rows, paging, ())
        assert self.sinks_H is None, "picked rows have no sinks beside them"
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
        """What was picked; and what the last token of a prompt would pick, so that the answer begins with it."""
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
    """How many tokens the blocks of a model look at, None for all: each once."""
    return tuple(dict.fromkeys(block.attention.window for block in blocks))


def head_norms(query: RMSNorm, key: RMSNorm) -> HeadNorms:
    assert query.eps == key.eps, f"queries and keys are normed alike: {query.eps=} {key.eps=}"
    return HeadNorms(query.weight, key.weight, query.eps)


def heads_of_rank(ranks: Ranks, queries: int, heads: Heads) -> tuple[int, Heads]:
    """How many query heads a rank has, and which key heads: those that its queries look at, which other ranks may have too."""
    return ranks.share(queries, "attention heads"), replace(heads, num=ranks.share_or_repeat(heads.num, "KV heads"))


def queries_keys_values(
    weights: Weights, name: str, queries: int, heads: Heads, hidden: int, *, biased: bool | None = None
) -> Linear:  # fmt: skip
    """The product that makes all three, from tensors `name`.q_proj, k_proj and v_proj."""
    width = heads.num * heads.key_dim
    outputs = {f"{name}.q_proj": queries * heads.key_dim, f"{name}.k_proj": width, f"{name}.v_proj": width}
    return Linear.load(weights, outputs, hidden, biased=biased)
