"""Gemma 3: windows in most layers and the whole past in some, each kind with a rotation of its own.

    x + norm(attention(norm(x))),  then  x + norm(mlp(norm(x)))

Norms are kept as differences to 1; queries and keys are normed. Text only: of a multimodal checkpoint it takes the text model and
leaves the rest. Never looks ahead: configs with attention in both directions are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.attention import gemma3_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.attention import Attention, head_norms, heads_of_rank, queries_keys_values, windows_of
from stepwell.engine.models.base import Decoder, Parts, head_of
from stepwell.engine.models.layers import GatedMLP, Linear, RMSNorm, Rotary, activation, norm_eps, number, rotary, said
from stepwell.engine.ops.pointwise import Angles
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks

MODEL_TYPES = ("gemma3", "gemma3_text")

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
    config, weights, kernels = parts.config, parts.weights, parts.kernels
    if config.flag("use_bidirectional_attention", False):
        raise ConfigError("use_bidirectional_attention is set: the engine runs models that look back only")
    weights.skip(*_NOT_TEXT)
    root = _root(weights)
    windows = dict.fromkeys(layer.window for layer in parts.spec.layers)
    rotaries = {window: _rotary(config, window, parts.device) for window in windows}
    hidden = config.size("hidden_size")
    embed = weights.take(f"{root}.embed_tokens.weight", said(config, "vocab_size"), hidden)
    scale = torch.tensor(hidden**0.5).to(embed.dtype)  # in bf16 the root is rounded, and so was in training
    blocks = [_block(parts, f"{root}.layers.{layer.number}", layer) for layer in parts.spec.layers]
    return Decoder(
        spec=parts.spec,
        embed=embed,
        layers=blocks,
        norm=RMSNorm.load(weights, f"{root}.norm", hidden, norm_eps(config), around_one=True),
        head=head_of(parts, embed, name=_ROOTS[root], tied=True),  # most configs say nothing of it
        shared=lambda batch: {window: turn.angles(batch.positions_N, embed.dtype, kernels) for window, turn in rotaries.items()},
        embed_scale=scale.item(),
        logit_cap=_cap(config, "final_logit_softcapping"),
        steady=windows_of(blocks),
    )


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    config, weights, hidden = parts.config, parts.weights, parts.config.size("hidden_size")
    queries, heads = heads_of_rank(parts.ranks, config.size("num_attention_heads", 8), gemma3_heads(config))

    def norm(of: str, size: int = hidden) -> RMSNorm:
        return RMSNorm.load(weights, f"{name}.{of}", size, norm_eps(config), around_one=True)

    biased, (state, place) = config.flag("attention_bias", False), layer.place("kv", "swa")
    attention = Attention(
        state=state,
        layer=place,
        window=layer.window,
        heads=queries,
        kv_heads=heads.num,
        head_dim=heads.key_dim,
        scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        qkv=queries_keys_values(weights, f"{name}.self_attn", queries, heads, hidden, biased=biased),
        out=Linear.load(weights, {f"{name}.self_attn.o_proj": hidden}, queries * heads.key_dim, biased=biased),
        norms=head_norms(norm("self_attn.q_norm", heads.key_dim), norm("self_attn.k_norm", heads.key_dim)),
        kernels=parts.kernels,
        cap=_cap(config, "attn_logit_softcapping"),
        selector=parts.selector if layer.window is None else None,
    )
    return Block(
        window=layer.window,
        attention=attention,
        mlp=GatedMLP.load(
            weights,
            f"{name}.mlp",
            activation(config, "gelu_pytorch_tanh"),
            parts.kernels,
            hidden=hidden,
            inner=said(config, "intermediate_size"),
        ),
        before_attention=norm("input_layernorm"),
        after_attention=norm("post_attention_layernorm"),
        before_mlp=norm("pre_feedforward_layernorm"),
        after_mlp=norm("post_feedforward_layernorm"),
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
