"""Kimi-Linear: delta nets whose channels decay one by one, and latent attention without positions in every fourth layer or so.

    x + mixer(norm(x)),  then  x + mlp(norm(x))        mlp: a gated block, or experts and one that all tokens visit

Tensors may have the names that transformers gives them or those of the published checkpoints. Fields of newer configs that this
code does not know are refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.recurrent import KimiHeads, read_kimi_heads
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.base import Block, Decoder, Layer, decoder
from stepwell.engine.models.deepseek_v3 import GroupedFields, grouped_experts, layer_names
from stepwell.engine.models.latent import LatentAttention
from stepwell.engine.models.layers import FeedForward, Linear, Parts, RMSNorm, activation
from stepwell.engine.models.moe import feed_forward
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import Steps, Tokens
from stepwell.engine.passes.batch import Batch

_FIELDS = GroupedFields(
    experts="num_experts", groups="num_expert_group", top="num_experts_per_token", sum_to_one="moe_renormalize",
    shared="num_shared_experts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KimiDelta:
    """`into` computes queries, keys and values, which are convolved; the sources of decays and gates; and betas."""

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
    """Latent attention without positions."""

    attention: LatentAttention

    def __call__(self, x_NC: torch.Tensor, points: Points, batch: Batch) -> torch.Tensor:
        return self.attention(x_NC, None, batch)


def build(parts: Parts) -> Decoder:
    _refuse_unknown(parts.config)
    blocks = [_block(parts, name, layer) for name, layer in zip(layer_names(parts), parts.spec.layers, strict=True)]
    return decoder(parts, blocks, Points.of, experts=True)


def _refuse_unknown(config: Fields) -> None:
    if not config.flag("mla_use_nope", True):
        raise ConfigError("config field mla_use_nope is false: rotated attention with delta nets is not known here")
    if (config.text("moe_router_activation_func") or "sigmoid") != "sigmoid":
        raise ConfigError(
            f"config field moe_router_activation_func is {config.text('moe_router_activation_func')!r:.60}, not sigmoid"
        )
    for section in (config, config.section("linear_attn_config")):
        if section.has("gate_lower_bound"):
            raise ConfigError(f"config field {section.path}gate_lower_bound is set: bounded decays are not known here")


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    (state, place), attention = layer.place("kv", "ssm"), f"{name}.self_attn"
    if state == "kv":
        mixer: Layer = Unrotated(LatentAttention.load(parts, attention, layer=place, rotates=False))
    else:
        mixer = _delta(parts, attention, place)
    # published checkpoints give experts another name than plain blocks, and transformers saves both under that one
    other = f"{name}.block_sparse_moe"
    is_other = parts.weights.has(f"{other}.gate.weight") or parts.weights.has(f"{other}.gate_proj.weight")
    return Block.load(parts, name, mixer, feed_forward(parts, other if is_other else f"{name}.mlp", _experts))


def _delta(parts: Parts, name: str, layer: int) -> KimiDelta:
    config, weights, heads = parts.config, parts.weights, read_kimi_heads(parts.config)
    heads = replace(heads, num=parts.ranks.share(heads.num, "heads of a delta net"))
    slow = f"{name}.forget_gate" if weights.has(f"{name}.forget_gate.A_log") else name
    hidden, channels = parts.hidden, heads.num * heads.dim
    joined = {f"{name}.{each}_proj": channels for each in "qkv"}
    joined |= {f"{slow}.f_a_proj": heads.dim, f"{name}.g_a_proj": heads.dim, f"{name}.b_proj": heads.num}
    bias_C = parts.exact(f"{slow}.dt_bias", channels)
    rate_11H1 = -parts.exact(f"{slow}.A_log", 1, 1, heads.num, 1).exp()
    return KimiDelta(
        layer=layer,
        heads=heads,
        into=Linear.load(weights, joined, hidden, biased=False),
        decay=parts.linear(f"{slow}.f_b_proj", channels, heads.dim, biased=False),
        gate=parts.linear(f"{name}.g_b_proj", channels, heads.dim, biased=False),
        out=parts.linear(f"{name}.o_proj", hidden, channels, biased=False),
        conv_WC=_convolution(weights, name, heads),
        act=activation(config),
        rate_H1=rate_11H1[0, 0],
        step_bias_HD=bias_C.view(heads.num, heads.dim),
        norm=parts.norm(f"{name}.o_norm", heads.dim),
        kernels=parts.kernels,
    )


def _convolution(weights: Weights, name: str, heads: KimiHeads) -> torch.Tensor:
    channels, columns = heads.num * heads.dim, heads.conv_columns
    if weights.has(f"{name}.conv1d.weight"):
        weight_C1W = weights.take(f"{name}.conv1d.weight", (channels, channels, channels), 1, columns)
    else:
        weight_C1W = torch.cat([weights.take(f"{name}.{each}_conv1d.weight", channels, 1, columns) for each in "qkv"])
    return weight_C1W[:, 0].T.contiguous()


def _experts(parts: Parts, name: str) -> FeedForward:
    config, groups = parts.config, parts.config.size("num_expert_group", 1)
    if groups > 1 and not config.flag("use_grouped_topk", True):
        raise ConfigError(f"config field use_grouped_topk is false, and num_expert_group {groups}: only one of them can be meant")
    return grouped_experts(parts, name, _FIELDS)
