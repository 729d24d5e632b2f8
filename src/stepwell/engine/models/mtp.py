"""The layer after the last one of DeepSeek-V3 and V3.2, which predicts one token further than the model.

    token j, hidden j-1    into(norm(embedded token j) | norm(hidden j-1))  ->  block  ->  norm  ->  hidden, logits of token j+1

A hidden state is what an output matrix reads: after the final norm, in the model as in this layer. (The reports leave that open;
engines measure more guesses accepted this way than with the stream before the norm.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families.fields import Fields
from stepwell.engine.loading.eight_bits import block_in
from stepwell.engine.loading.weights import Region, TensorSource, Weights
from stepwell.engine.models import deepseek_v3, deepseek_v32
from stepwell.engine.models.base import Decoder, Layer, read_out
from stepwell.engine.models.latent import latent_rotary
from stepwell.engine.models.layers import Linear, Parts, RMSNorm, norm_eps
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MtpLayer:
    """Writes a row for each token into its states, and returns hidden states and logits."""

    model_norm: RMSNorm  # the model's final one
    embed: torch.Tensor
    token_norm: RMSNorm
    hidden_norm: RMSNorm
    into: Linear
    block: Layer
    shared: Callable[[Batch], Any]
    norm: RMSNorm
    head: torch.Tensor
    ranks: Ranks

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def read(self, stream_NC: torch.Tensor) -> torch.Tensor:
        """Hidden states of the model, from its stream after the last layer."""
        return self.model_norm(stream_NC)

    @torch.inference_mode()
    def __call__(self, batch: Batch, before_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all tokens, and logits (fp32) of the rows the batch wants, given hidden states of those before."""
        batch.prepare()
        token_NC = embedding(batch.tokens_N, self.embed)
        x_NC = self.into(torch.cat([self.token_norm(token_NC), self.hidden_norm(before_NC)], dim=-1))
        hidden_NC = self.norm(self.block(x_NC, self.shared(batch), batch))
        batch.finish()
        return hidden_NC, read_out(hidden_NC[batch.wanted], self.head, len(self.embed), self.ranks)


def load_mtp(config: Mapping[str, object], source: TensorSource, target: Decoder, spec: ModelSpec) -> MtpLayer:
    """The layer of a model, whose states are those of `spec`. Shares embedding and head with the model if they are the same."""
    outer = Fields(values=config)
    text = outer.section("text_config") if outer.has("text_config") else outer
    if (count := text.size("num_nextn_predict_layers")) != 1:
        raise ConfigError(f"the engine drafts with one layer after the last, and this model has {count}")
    name, block = f"model.layers.{text.num_layers()}", block_in(text, outer)
    begun = _Prefixed(source, f"{name}.")
    weights = Weights(begun, dtype=target.dtype, device=target.device, block=block, config=text.values, ranks=target.ranks)
    parts = Parts(config=text, spec=spec, weights=weights, kernels=target.kernels, eps=norm_eps(text))
    angles, layer = parts.angles(latent_rotary(text, device=parts.device)), _block(parts, name)
    made = MtpLayer(
        model_norm=target.norm,
        embed=_same(weights, f"{name}.embed_tokens.weight", target.embed, len(target.embed)),
        token_norm=parts.norm(f"{name}.enorm"),
        hidden_norm=parts.norm(f"{name}.hnorm"),
        into=parts.linear(f"{name}.eh_proj", parts.hidden, 2 * parts.hidden),
        block=layer,
        shared=(lambda batch: deepseek_v32.Shared(angles=angles(batch))) if _is_sparse(spec) else angles,
        norm=parts.norm(f"{name}.shared_head.norm"),
        head=_same(weights, f"{name}.shared_head.head.weight", target.head, target.ranks.share_or_all(len(target.embed))),
        ranks=target.ranks,
    )
    weights.finish()
    return made


class _Prefixed:
    """The tensors of a source whose names have a prefix."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    def names(self) -> Iterable[str]:
        return [name for name in self._source.names() if name.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        return self._source.read(name, region)


def _same(weights: Weights, name: str, of_model: torch.Tensor, rows: int) -> torch.Tensor:
    """Checkpoints repeat the model's own tensor here, or leave it out: only one copy is kept."""
    if not weights.has(name):
        return of_model
    taken = weights.take(name, rows, of_model.shape[1])
    return of_model if torch.equal(taken, of_model) else taken


def _block(parts: Parts, name: str) -> Layer:
    if _is_sparse(parts.spec):
        return deepseek_v32.sparse_block(parts, name, 0, 0, states=("draft", "draft_index"))
    return deepseek_v3.latent_block(parts, name, layer=0, state="draft")


def _is_sparse(spec: ModelSpec) -> bool:
    return any(state.name == "draft_index" for state in spec.states)
