"""What every model is to the engine, and the frame that all share: embed, layers, norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import embedding, linear

from stepwell.base.spec import ModelSpec
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.models.layers import FeedForward, GatedMLP, Parts, RMSNorm, said
from stepwell.engine.ops.kernels import TORCH, Kernels
from stepwell.engine.ops.pointwise import Angles
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import ALONE, Ranks, Share

OnLayer = Callable[[int, torch.Tensor], None]


class Layer(Protocol):
    def __call__(self, x_NC: torch.Tensor, shared: Any, batch: Batch, /) -> torch.Tensor:
        """The stream after this layer. `shared` is what the model computed once for all layers of the pass."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hybrid:
    """What all layers of a model with attention and recurrent states need in one pass."""

    angles: Angles
    points: Points


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Attention of some kind and a feed-forward block, each added to the stream, with a norm before it, as most models have them.

    Each computes this rank's part of what it adds.
    """

    attention: Layer
    mlp: FeedForward
    before_attention: RMSNorm
    before_mlp: RMSNorm
    kernels: Kernels
    ranks: Ranks

    @classmethod
    def load(cls, parts: Parts, name: str, attention: Layer, mlp: FeedForward) -> Block:
        return cls(
            attention=attention,
            mlp=mlp,
            before_attention=parts.norm(f"{name}.input_layernorm"),
            before_mlp=parts.norm(f"{name}.post_attention_layernorm"),
            kernels=parts.kernels,
            ranks=parts.ranks,
        )

    @property
    def has_experts(self) -> bool:
        return not isinstance(self.mlp, GatedMLP)

    def __call__(self, x_NC: torch.Tensor, shared: Any, batch: Batch) -> torch.Tensor:
        x_NC, more_NC = self.deferred(x_NC, None, shared, batch)
        return x_NC + more_NC

    def deferred(
        self, x_NC: torch.Tensor, more_NC: torch.Tensor | None, shared: Any, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream, and what must still be added to it: the next norm does that. `more_NC` is what the block before left."""
        norm, add_norm = self.before_attention, self.kernels.add_norm
        x_NC, normed_NC = (x_NC, norm(x_NC)) if more_NC is None else add_norm(x_NC, more_NC, norm.weight, norm.eps)
        seen_NC = self.ranks.all_reduce(self.attention(normed_NC, shared, batch))
        x_NC, normed_NC = add_norm(x_NC, seen_NC, self.before_mlp.weight, self.before_mlp.eps)
        return x_NC, self.ranks.all_reduce(self.mlp(normed_NC))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoder:
    """A decoder-only model. `shared` computes what all layers of one pass need, such as the angles of its rotations.

    `graph_windows` are the windows that its layers attend to, None for all tokens, if a decode step can be captured in a CUDA
    graph: it does the same work whatever the numbers are. Empty if it cannot.
    """

    spec: ModelSpec
    embed: torch.Tensor
    layers: Sequence[Layer]
    norm: RMSNorm
    head: torch.Tensor
    shared: Callable[[Batch], Any]
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    graph_windows: tuple[int | None, ...] = ()
    selected: int = 0  # rows that a query reads at most if an index or a selector chooses them
    kernels: Kernels = TORCH
    selector: Selector | None = None
    ranks: Ranks = ALONE

    @property
    def vocab_size(self) -> int:
        return self.embed.shape[0]  # a rank may have a part of the head

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Writes the state of the batch's tokens to its pages, and returns logits (fp32) of the rows it wants."""
        batch.prepare()
        logits = self.compute(batch, on_layer)
        self.finish(batch)
        return logits

    def finish(self, batch: Batch) -> None:
        """Writes what could not be written before all of the pass was computed."""
        if self.selector is not None:
            self.selector.finish(batch)
        batch.finish()

    @torch.inference_mode()
    def compute(self, batch: Batch, on_layer: OnLayer | None = None) -> torch.Tensor:
        """The pass alone, over pages that are ready."""
        shared = self.shared(batch)
        x_NC = embedding(batch.tokens_N, self.embed)
        if self.embed_scale != 1.0:
            x_NC = x_NC * self.embed_scale
        x_NC = self._through_layers(x_NC, shared, batch, on_layer)
        logits = read_out(self.norm(x_NC if batch.wants_all else x_NC[batch.wanted]), self.head, self.vocab_size, self.ranks)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def _through_layers(self, x_NC: torch.Tensor, shared: Any, batch: Batch, on_layer: OnLayer | None) -> torch.Tensor:
        if on_layer is None and all(isinstance(layer, Block) for layer in self.layers):
            more_NC = None
            for layer in self.layers:
                assert isinstance(layer, Block)
                x_NC, more_NC = layer.deferred(x_NC, more_NC, shared, batch)
            return x_NC if more_NC is None else x_NC + more_NC
        for number, layer in enumerate(self.layers):
            x_NC = layer(x_NC, shared, batch)
            if on_layer is not None:
                on_layer(number, x_NC)
        return x_NC


def decoder(
    parts: Parts, layers: Sequence[Layer], shared: Callable[[Batch], Any], *, experts: bool,
    windows: Sequence[int | None] = (None,), embed: str = "model.embed_tokens", norm: str = "model.norm", head: str = "lm_head",
    tied: bool | None = None, **more: Any,
) -> Decoder:  # fmt: skip
    """The frame around `layers`: tensors `embed`, `norm` and `head`. `windows` are those that the layers use, `experts` says
    whether any layer has some. `tied` says whether the head is the embedding if the config does not; by default it is if the
    checkpoint has no `head`.
    """
    weights, config = parts.weights, parts.config
    table = weights.take(f"{embed}.weight", said(config, "vocab_size"), parts.hidden)
    is_tied = config.flag("tie_word_embeddings", not weights.has(f"{head}.weight") if tied is None else tied)
    return Decoder(
        spec=parts.spec,
        embed=table,
        layers=layers,
        norm=parts.norm(norm),
        head=_head(parts, table, head, is_tied),
        shared=shared,
        graph_windows=tuple(windows) if parts.kernels.experts_stay_on_device or not experts else (),
        **more,
    )


def _head(parts: Parts, table: torch.Tensor, name: str, is_tied: bool) -> torch.Tensor:
    """The output matrix: its own tensor, or the embedding. Every rank has the whole embedding, and a part of the head if the
    vocabulary can be cut equally.
    """
    vocab = parts.ranks.share_or_all(len(table))
    if not is_tied:
        return parts.weights.take(f"{name}.weight", vocab, table.shape[1])
    parts.weights.skip(f"{name}.")
    return table.narrow(0, vocab.start, vocab) if isinstance(vocab, Share) else table


def read_out(x_NC: torch.Tensor, head_VC: torch.Tensor, vocab_size: int, ranks: Ranks) -> torch.Tensor:
    """Logits (fp32) of the whole vocabulary, on every rank."""
    logits = linear(x_NC, head_VC)
    return (logits if len(head_VC) == vocab_size else ranks.all_gather(logits)).float()
