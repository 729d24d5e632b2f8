"""Gemma 3: windows in most layers and the whole past in some, each kind with a rotation of its own.

    x + norm(attention(norm(x))),  then  x + norm(mlp(norm(x)))

Norms are stored as differences to 1; queries and keys are normed. Text only: it loads the text model of a multimodal checkpoint
and skips the rest. Never looks ahead: configs with attention in both directions are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.attention import gemma3_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.attention import Attention, windows_of
from stepwell.engine.models.base import Decoder, decoder
from stepwell.engine.models.layers import GatedMLP, Parts, RMSNorm, Rotary, activation, number, rotary
from stepwell.engine.ops.pointwise import Angles
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks

# Where the text model's tensors begin, and its output matrix: alone, in a multimodal checkpoint, and in an older one.
_ROOTS = {
    "model": "lm_head",
    "model.language_model": "lm_head",
    "language_model.model": "language_model.lm_head",
}
_NOT_TEXT = tuple(f"{outer}{part}." for outer in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    window: int | None
    attention: Attention
    mlp: GatedMLP
    before_attention: RMSNorm
    after_attention: RMSNorm
    before_mlp: RMSNorm
    after_mlp: RMSNorm
    ranks: Ranks

    def __call__(self, x_NC: torch.Tensor, shared: Mapping[int | None, Angles], batch: Batch) -> torch.Tensor:
        seen_NC = self.ranks.all_reduce(self.attention(self.before_attention(x_NC), shared[self.window], batch))
        x_NC = x_NC + self.after_attention(seen_NC)
        return x_NC + self.after_mlp(self.ranks.all_reduce(self.mlp(self.before_mlp(x_NC))))


def build(parts: Parts) -> Decoder:
    config, weights = parts.config, parts.weights
    if config.flag("use_bidirectional_attention", False):
        raise ConfigError("use_bidirectional_attention is set: the engine runs models that look back only")
    weights.skip(*_NOT_TEXT)
    root, parts = _root(weights), replace(parts, around_one=True)
    windows = dict.fromkeys(layer.window for layer in parts.spec.layers)
    angles = {window: parts.angles(_rotary(config, window, parts.device)) for window in windows}
    scale = torch.tensor(parts.hidden**0.5).to(weights.dtype)  # in bf16 the root is rounded, and so was in training
    blocks = [_block(parts, f"{root}.layers.{layer.number}", layer) for layer in parts.spec.layers]
    return decoder(
        parts,
        blocks,
        lambda batch: {window: angles_of(batch) for window, angles_of in angles.items()},
        experts=False,
        windows=windows_of(blocks),
        embed=f"{root}.embed_tokens",
        norm=f"{root}.norm",
        head=_ROOTS[root],
        tied=True,  # most configs do not say it
        embed_scale=scale.item(),
        logit_cap=_cap(config, "final_logit_softcapping"),
    )


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    config = parts.config
    attention = Attention.load(
        parts,
        f"{name}.self_attn",
        layer,
        gemma3_heads(config),
        queries=config.size("num_attention_heads", 8),
        biased=config.flag("attention_bias", False),
        normed=True,
        scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        cap=_cap(config, "attn_logit_softcapping"),
    )
    return Block(
        window=layer.window,
        attention=attention,
        mlp=GatedMLP.load(parts, f"{name}.mlp", act=activation(config, "gelu_pytorch_tanh")),
        before_attention=parts.norm(f"{name}.input_layernorm"),
        after_attention=parts.norm(f"{name}.post_attention_layernorm"),
        before_mlp=parts.norm(f"{name}.pre_feedforward_layernorm"),
        after_mlp=parts.norm(f"{name}.post_feedforward_layernorm"),
        ranks=parts.ranks,
    )


def _root(weights: Weights) -> str:
    for root in _ROOTS:
        if weights.has(f"{root}.embed_tokens.weight"):
            return root
    raise ConfigError(f"the checkpoint has no tensor 'embed_tokens.weight' under any of: {', '.join(_ROOTS)}")


def _rotary(config: Fields, window: int | None, device: str | torch.device) -> Rotary:
    """The rotation of layers with a window, or of full ones. Configs list both, or are flat, with scaling for full ones."""
    full = window is None
    width = gemma3_heads(config).key_dim
    base = number(config, "rope_theta", 1e6) if full else number(config, "rope_local_base_freq", 1e4)
    if not config.has("rope_parameters"):
        return rotary(base, width, config.section("rope_scaling") if full else Fields(values={}), config, device)
    by_kind = config.section("rope_parameters")
    if by_kind.has("rope_theta") or by_kind.has("rope_type"):
        raise ConfigError("config field rope_parameters must say full_attention and sliding_attention apart for this model")
    own = by_kind.section("full_attention" if full else "sliding_attention")
    return rotary(number(own, "rope_theta", base), width, own, config, device)


def _cap(config: Fields, name: str) -> float | None:
    return number(config, name, 1.0) if config.has(name) else None
