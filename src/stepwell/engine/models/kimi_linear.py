"""Kimi-Linear: delta nets whose channels fade one by one, and latent attention without positions in every fourth layer or so.

    x + mixer(norm(x)),  then  x + mlp(norm(x))        mlp: a gated block, or experts and one that all tokens visit

Tensors may have the names that transformers gives them or those of the published checkpoints. What a newer config says that this
code does not know is refused, and not ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.recurrent import KimiHeads, read_kimi_heads
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.base import Block, Decoder, Parts
from stepwell.engine.models.deepseek_v3 import decoder, layer_names, shared_block
from stepwell.engine.models.latent import LatentAttention, LatentSizes
from stepwell.engine.models.layers import INNER, GatedMLP, Linear, RMSNorm, activation, norm_eps, number, said
from stepwell.engine.models.moe import Experts, MixtureOfExperts, Route, WithShared, gated, sigmoid_in_groups
from stepwell.engine.ops.experts import ExpertWeights
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import Steps, Tokens
from stepwell.engine.passes.batch import Batch

MODEL_TYPES = ("kimi_linear", "kimi_k3")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KimiDelta:
    """`into` makes queries, keys and values, which are convolved; what decays and gates are made from; and betas."""

    layer: int
    heads: KimiHeads
    into: Linear
    decay: Linear
    gate: Linear
    out: Linear
    conv_WC: torch.Tensor
    act: Activation
    rate_H1: torch.Tensor
    step_bias_HD: torch.Tensor
    norm: RMSNorm
    kernels: Kernels

    def __call__(self, x_NC: torch.Tensor, points: Points, batch: Batch) -> torch.Tensor:
        heads = self.heads
        widths = (3 * heads.num * heads.dim, heads.dim, heads.dim, heads.num)
        mixed_NC, slow_ND, open_ND, beta_NH = self.into(x_NC).split(widths, dim=-1)
        mixed_NC = self.kernels.convolve(points, self.layer, mixed_NC, self.conv_WC, act=self.act)
        query, key, value = mixed_NC.unflatten(1, (3, heads.num, heads.dim)).unbind(1)
        steps = Steps(raw=self._by_head(self.decay(slow_ND)), bias=self.step_bias_HD, rate=self.rate_H1)
        tokens = Tokens(query_NKD=query, key_NKD=key, value_NHV=value, steps=steps, beta_NH=beta_NH)
        out_NHV = self.kernels.recur(points, self.layer, tokens)
        gate_NHV = self._by_head(self.gate(open_ND))
        normed_NHV = self.kernels.gated_norm(out_NHV, gate_NHV, self.norm.weight, self.norm.eps, act=torch.sigmoid)
        return self.out(normed_NHV.flatten(1).to(x_NC.dtype))

    def _by_head(self, x_NC: torch.Tensor) -> torch.Tensor:
        x_NHD: torch.Tensor = x_NC.unflatten(1, (self.heads.num, self.heads.dim))
        return x_NHD


@dataclass(frozen=True, slots=True, eq=False)
class Unrotated:
    """Latent attention that knows no positions."""

    attention: LatentAttention

    def __call__(self, x_NC: torch.Tensor, points: Points, batch: Batch) -> torch.Tensor:
        return self.attention(x_NC, None, batch)


def build(parts: Parts) -> Decoder:
    _refuse_unknown(parts.config)
    blocks = [_block(parts, name, layer) for name, layer in zip(layer_names(parts), parts.spec.layers, strict=True)]
    return decoder(parts, blocks, Points.of)


def _refuse_unknown(config: Fields) -> None:
    if not config.flag("mla_use_nope", True):
        raise ConfigError("config field mla_use_nope is false: rotated attention beside delta nets is not known here")
    if (config.text("moe_router_activation_func") or "sigmoid") != "sigmoid":
        raise ConfigError(
            f"config field moe_router_activation_func is {config.text('moe_router_activation_func')!r:.60}, not sigmoid"
        )
    for section in (config, config.section("linear_attn_config")):
        if section.has("gate_lower_bound"):
            raise ConfigError(f"config field {section.path}gate_lower_bound is set: decays with a bound are not known here")


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    eps, weights, (state, place) = norm_eps(parts.config), parts.weights, layer.place("kv", "ssm")
    hidden = parts.config.size("hidden_size")
    load = _attention if state == "kv" else _delta
    return Block(
        attention=load(parts, f"{name}.self_attn", place),
        mlp=_feed_forward(parts, name),
        kernels=parts.kernels,
        ranks=parts.ranks,
        before_attention=RMSNorm.load(weights, f"{name}.input_layernorm", hidden, eps),
        before_mlp=RMSNorm.load(weights, f"{name}.post_attention_layernorm", hidden, eps),
    )


def _attention(parts: Parts, name: str, layer: int) -> Unrotated:
    sizes, kept = LatentSizes.read(parts.config, parts.ranks), parts.spec.state("kv").dtype
    rows = sizes.rows(kept)
    return Unrotated(LatentAttention.load(parts.weights, name, sizes, state="kv", layer=layer, kept=rows, kernels=parts.kernels))


def _delta(parts: Parts, name: str, layer: int) -> KimiDelta:
    config, weights, heads = parts.config, parts.weights, read_kimi_heads(parts.config)
    heads = replace(heads, num=parts.ranks.share(heads.num, "heads of a delta net"))
    slow = f"{name}.forget_gate" if weights.has(f"{name}.forget_gate.A_log") else name
    hidden, channels = config.size("hidden_size"), heads.num * heads.dim
    joined = {f"{name}.{each}_proj": channels for each in "qkv"}
    joined |= {f"{slow}.f_a_proj": heads.dim, f"{name}.g_a_proj": heads.dim, f"{name}.b_proj": heads.num}
    bias_C = weights.take(f"{slow}.dt_bias", channels, dtype=torch.float32)
    rate_11H1 = -weights.take(f"{slow}.A_log", 1, 1, heads.num, 1, dtype=torch.float32).exp()
    return KimiDelta(
        layer=layer,
        heads=heads,
        into=Linear(torch.cat([weights.take(f"{each}.weight", outputs, hidden) for each, outputs in joined.items()])),
        decay=Linear.load(weights, {f"{slow}.f_b_proj": channels}, heads.dim, biased=False),
        gate=Linear.load(weights, {f"{name}.g_b_proj": channels}, heads.dim, biased=False),
        out=Linear.load(weights, {f"{name}.o_proj": hidden}, channels, biased=False),
        conv_WC=_convolution(weights, name, heads),
        act=activation(config),
        rate_H1=rate_11H1[0, 0],
        step_bias_HD=bias_C.view(heads.num, heads.dim),
        norm=RMSNorm(weights.take(f"{name}.o_norm.weight", heads.dim), norm_eps(config)),
        kernels=parts.kernels,
    )


def _convolution(weights: Weights, name: str, heads: KimiHeads) -> torch.Tensor:
    channels, columns = heads.num * heads.dim, heads.conv_columns
    if weights.has(f"{name}.conv1d.weight"):
        weight_C1W = weights.take(f"{name}.conv1d.weight", (channels, channels, channels), 1, columns)
    else:
        weight_C1W = torch.cat([weights.take(f"{name}.{each}_conv1d.weight", channels, 1, columns) for each in "qkv"])
    return weight_C1W[:, 0].T.contiguous()


# ---- feed-forward ---------------------------------------------------------------------------------


def _feed_forward(parts: Parts, layer: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Experts in the layers whose tensors say so (`first_k_dense_replace` and `mlp_layer_types` say the same)."""
    config, weights, act, hidden = parts.config, parts.weights, activation(parts.config), parts.config.size("hidden_size")
    # published checkpoints give experts another name than plain blocks, and transformers saves both under that one
    other = f"{layer}.block_sparse_moe"
    name = other if weights.has(f"{other}.gate.weight") or weights.has(f"{other}.gate_proj.weight") else f"{layer}.mlp"
    if not weights.has(f"{name}.gate.weight"):
        return GatedMLP.load(weights, name, act, parts.kernels, hidden=hidden, inner=said(config, "intermediate_size"))
    count = config.size("num_experts")
    experts = MixtureOfExperts(
        router=Linear(weights.take(f"{name}.gate.weight", count, hidden, dtype=torch.float32)),
        route=_route(config, weights.take(f"{name}.gate.e_score_correction_bias", count, dtype=torch.float32)),
        experts=_experts(parts, f"{name}.experts", count),
    )
    if not (shared := config.size("num_shared_experts", 0, least=0)):
        return experts
    return WithShared(experts=experts, shared=shared_block(parts, f"{name}.shared_experts", shared))


def _route(config: Fields, bias_E: torch.Tensor) -> Route:
    groups = config.size("num_expert_group", 1, most=len(bias_E))
    if len(bias_E) % groups:
        raise ConfigError(f"config field num_expert_group {groups} must cut {len(bias_E)} experts into groups of one size")
    if groups > 1 and not config.flag("use_grouped_topk", True):
        raise ConfigError(f"config field use_grouped_topk is false, and num_expert_group {groups}: only one of them can be meant")
    return sigmoid_in_groups(
        config.size("num_experts_per_token", most=len(bias_E)),
        bias_E=bias_E,
        groups=groups,
        top_groups=config.size("topk_group", groups, most=groups),
        sum_to_one=config.flag("moe_renormalize", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )


def _experts(parts: Parts, name: str, count: int) -> Experts:
    """Published checkpoints call gate, up and down w1, w3 and w2."""
    config, weights, combine = parts.config, parts.weights, gated(activation(parts.config))
    hidden, inner = config.size("hidden_size"), said(config, "moe_intermediate_size")
    if not weights.has(f"{name}.0.w1.weight"):
        return Experts.load(weights, name, count=count, hidden=hidden, inner=inner, combine=combine, run=parts.kernels.experts)
    each = [f"{name}.{index}" for index in range(count)]
    inner = weights.shared(inner, INNER, of=f"{each[0]}.w1.weight", axis=0)
    halves = [dict.fromkeys((f"{one}.w1.weight", f"{one}.w3.weight"), inner) for one in each]
    matrices = ExpertWeights(
        gate_up_EIC=torch.stack([weights.joined(half, hidden) for half in halves]),
        down_ECI=torch.stack([weights.take(f"{one}.w2.weight", hidden, inner) for one in each]),
    )
    return Experts(weights=matrices, combine=combine, run=parts.kernels.experts)
