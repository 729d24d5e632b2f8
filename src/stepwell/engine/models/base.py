"""What every model is to the engine, and the frame they share: embed, layers, norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import embedding, linear

from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families.fields import Fields
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.layers import RMSNorm
from stepwell.engine.ops.kernels import TORCH, Kernels
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import ALONE, Ranks, Share

OnLayer = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a model is built from: its config, its memory, and its tensors. Of several ranks, the last two are this one's."""

    config: Fields
    spec: ModelSpec
    weights: Weights
    kernels: Kernels = TORCH
    selector: Selector | None = None  # of layers that look at all of the past

    @property
    def device(self) -> str | torch.device:
        return self.weights.device

    @property
    def ranks(self) -> Ranks:
        return self.weights.ranks


class Layer(Protocol):
    def __call__(self, x_NC: torch.Tensor, shared: Any, batch: Batch, /) -> torch.Tensor:
        """The stream after this layer. `shared` is what the model computed once for all layers of the pass."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Attention of some kind and a feed-forward block, each beside the stream with a norm before it, as most models have them.

    Both give this rank's share of what they add to the stream.
    """

    attention: Layer
    mlp: Callable[[torch.Tensor], torch.Tensor]
    before_attention: RMSNorm
    before_mlp: RMSNorm
    kernels: Kernels
    ranks: Ranks

    def __call__(self, x_NC: torch.Tensor, shared: Any, batch: Batch) -> torch.Tensor:
        x_NC, more_NC = self.beside(x_NC, None, shared, batch)
        return x_NC + more_NC

    def beside(
        self, x_NC: torch.Tensor, more_NC: torch.Tensor | None, shared: Any, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream, and what this block adds to it: a sum that the next norm makes on its way. `more_NC` is the last one's."""
        norm, add_norm = self.before_attention, self.kernels.add_norm
        x_NC, normed_NC = (x_NC, norm(x_NC)) if more_NC is None else add_norm(x_NC, more_NC, norm.weight, norm.eps)
        seen_NC = self.ranks.all_reduce(self.attention(normed_NC, shared, batch))
        x_NC, normed_NC = add_norm(x_NC, seen_NC, self.before_mlp.weight, self.before_mlp.eps)
        return x_NC, self.ranks.all_reduce(self.mlp(normed_NC))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoder:
    """A decoder-only model. `shared` computes what all layers of one pass need, such as the angles of its rotations.

    `steady` is for models whose decode steps do the same work whatever the numbers are, so that one can be recorded and played
    again: the windows that its layers look at, None for all tokens.
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
    steady: tuple[int | None, ...] = ()
    selected: int = 0  # rows that a query reads at most where rows are picked
    kernels: Kernels = TORCH
    selector: Selector | None = None
    ranks: Ranks = ALONE

    @property
    def vocab_size(self) -> int:
        return self.embed.shape[0]  # of the head this may be a part

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Writes what the batch's tokens leave behind into its pages, and returns logits (fp32) of the rows it wants."""
        batch.prepare()
        logits = self.compute(batch, on_layer)
        self.finish(batch)
        return logits

    def finish(self, batch: Batch) -> None:
        """After the pass: what could not be written before all of it was computed."""
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
                x_NC, more_NC = layer.beside(x_NC, more_NC, shared, batch)
            return x_NC if more_NC is None else x_NC + more_NC
        for number, layer in enumerate(self.layers):
            x_NC = layer(x_NC, shared, batch)
            if on_layer is not None:
                on_layer(number, x_NC)
        return x_NC


def head_of(parts: Parts, embed: torch.Tensor, *, name: str = "lm_head", tied: bool | None = None) -> torch.Tensor:
    """The output matrix: its own tensor, or the embedding again. `tied` is what configs mean that do not say it.

    Every rank has the whole embedding, and of this a part, where the vocabulary can be cut equally.
    """
    if parts.config.flag("tie_word_embeddings", not parts.weights.has(f"{name}.weight") if tied is None else tied):
        parts.weights.skip(f"{name}.")
        return tied_head(parts, embed)
    return parts.weights.take(f"{name}.weight", parts.ranks.share_or_all(len(embed)), embed.shape[1])


def tied_head(parts: Parts, embed: torch.Tensor) -> torch.Tensor:
    vocab = parts.ranks.share_or_all(len(embed))
    return embed.narrow(0, vocab.start, vocab) if isinstance(vocab, Share) else embed


def read_out(x_NC: torch.Tensor, head_VC: torch.Tensor, vocab_size: int, ranks: Ranks) -> torch.Tensor:
    """Logits (fp32) of the whole vocabulary, on every rank."""
    logits = linear(x_NC, head_VC)
    return (logits if len(head_VC) == vocab_size else ranks.all_gather(logits)).float()
