"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and full attention with a gate in every fourth layer.

    x + mixer(norm(x)),  then  x + mlp(norm(x))        mlp: a gated block, or experts and one that all tokens visit

Loads the text model alone, and neither vision tower nor next-token-prediction layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Size, Weights
from stepwell.engine.models.attention import Attention, heads_of_rank
from stepwell.engine.models.base import Block, Decoder, Hybrid, decoder
from stepwell.engine.models.layers import GatedMLP, Linear, Parts, RMSNorm, activation, rotary_from, side_by_side
from stepwell.engine.models.moe import MixtureOfExperts, feed_forward, softmax_then_top
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import Steps, Tokens
from stepwell.engine.passes.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """The sizes of one delta net."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Queries, keys and values, as they lie in tensors for all three."""
        return self.keys, self.keys, self.values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaNet:
    """`into` computes queries, keys, values, gates, betas and decays, side by side; the first three are convolved."""

    layer: int
    sizes: Sizes
    into: Linear
    out: Linear
    conv_WC: torch.Tensor
    act: Activation
    rate_H: torch.Tensor
    step_bias_H: torch.Tensor
    norm: RMSNorm
    kernels: Kernels

    def __call__(self, x_NC: torch.Tensor, shared: Hybrid, batch: Batch) -> torch.Tensor:
        sizes = self.sizes
        widths = (2 * sizes.keys + sizes.values, sizes.values, sizes.value_heads, sizes.value_heads)
        mixed_NC, gate_NC, beta_NH, step_NH = self.into(x_NC).split(widths, dim=-1)
        mixed_NC = self.kernels.convolve(shared.points, self.layer, mixed_NC, self.conv_WC, act=self.act)
        query, key, value = mixed_NC.split((sizes.keys, sizes.keys, sizes.values), dim=-1)
        tokens = Tokens(
            query_NKD=query.unflatten(1, (sizes.key_heads, sizes.key_dim)),
            key_NKD=key.unflatten(1, (sizes.key_heads, sizes.key_dim)),
            value_NHV=value.unflatten(1, (sizes.value_heads, sizes.value_dim)),
            steps=Steps(raw=step_NH, bias=self.step_bias_H, rate=self.rate_H),
            beta_NH=beta_NH,
        )
        out_NHV = self.kernels.recur(shared.points, self.layer, tokens)
        gate_NHV = gate_NC.unflatten(1, (sizes.value_heads, sizes.value_dim))
        normed_NHV = self.kernels.gated_norm(out_NHV, gate_NHV, self.norm.weight, self.norm.eps)
        return self.out(normed_NHV.flatten(1).to(x_NC.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedAttention:
    """Attention whose output is multiplied, channel by channel, by a gate computed from the token."""

    attention: Attention
    gate: Linear

    def __call__(self, x_NC: torch.Tensor, shared: Hybrid, batch: Batch) -> torch.Tensor:
        seen_NC = self.attention.attend(x_NC, shared.angles, batch)
        return self.attention.out(seen_NC * self.gate(x_NC).sigmoid())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedExperts:
    """Experts, and one that all tokens visit, weighted by a gate."""

    experts: MixtureOfExperts
    shared: GatedMLP
    gate: Linear

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.experts(x_NC), self.gate(x_NC).sigmoid(), self.shared(x_NC))


def build(parts: Parts) -> Decoder:
    config, weights = parts.config, parts.weights
    weights.skip("mtp.", "model.visual.", "visual.")
    root = "model.language_model" if weights.has("model.language_model.embed_tokens.weight") else "model"
    turned = Fields(values={"partial_rotary_factor": 0.25, **config.values}, path=config.path)
    angles = parts.angles(rotary_from(turned, read_heads(config).key_dim, device=parts.device))
    parts = replace(parts, around_one=True)
    if not weights.has("lm_head.weight"):  # the text part of some configs says that it is not tied, and it is
        parts = replace(parts, config=Fields(values={**config.values, "tie_word_embeddings": True}, path=config.path))
    blocks = [_block(parts, f"{root}.layers.{layer.number}", layer) for layer in parts.spec.layers]
    return decoder(
        parts,
        blocks,
        lambda batch: Hybrid(angles=angles(batch), points=Points.of(batch)),
        experts=any(block.has_experts for block in blocks),
        embed=f"{root}.embed_tokens",
        norm=f"{root}.norm",
    )


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    state, place = layer.place("kv", "ssm")
    mixer = _attention(parts, f"{name}.self_attn", layer) if state == "kv" else _delta_net(parts, f"{name}.linear_attn", place)
    return Block.load(parts, name, mixer, feed_forward(parts, f"{name}.mlp", _experts))


def _attention(parts: Parts, name: str, layer: LayerSpec) -> GatedAttention:
    whole = read_heads(parts.config)
    queries, heads = heads_of_rank(parts, whole)
    product = parts.linear(f"{name}.q_proj", 2 * queries * heads.key_dim, parts.hidden)
    query, gate = _query_and_gate(product, queries)
    width = heads.num * heads.key_dim
    kv = Linear.load(parts.weights, {f"{name}.k_proj": width, f"{name}.v_proj": width}, parts.hidden)
    return GatedAttention(
        attention=Attention.load(parts, name, layer, whole, qkv=side_by_side(query, kv), normed=True), gate=gate
    )


def _query_and_gate(product: Linear, heads: int) -> tuple[Linear, Linear]:
    """Rows of `q_proj` are, head by head, queries and then gates."""
    weight = product.weight.unflatten(0, (heads, 2, -1)).unbind(1)
    bias = (None, None) if product.bias is None else product.bias.unflatten(0, (heads, 2, -1)).unbind(1)
    query, gate = (Linear(w.flatten(0, 1), None if b is None else b.flatten()) for w, b in zip(weight, bias, strict=True))
    return query, gate


def _delta_net(parts: Parts, name: str, layer: int) -> DeltaNet:
    config, weights = parts.config, parts.weights
    sizes = Sizes(
        key_heads=parts.ranks.share(config.size("linear_num_key_heads"), "key heads of a delta net"),
        key_dim=config.size("linear_key_head_dim"),
        value_heads=parts.ranks.share(config.size("linear_num_value_heads"), "value heads of a delta net"),
        value_dim=config.size("linear_value_head_dim"),
    )
    window = config.size("linear_conv_kernel_dim", 4)
    return DeltaNet(
        layer=layer,
        sizes=sizes,
        into=_into(weights, name, sizes, parts.hidden),
        out=parts.linear(f"{name}.out_proj", parts.hidden, sizes.values),
        conv_WC=weights.take(f"{name}.conv1d.weight", sizes.convolved, 1, window)[:, 0].T.contiguous(),
        act=activation(config),
        rate_H=-parts.exact(f"{name}.A_log", sizes.value_heads).exp(),
        step_bias_H=parts.exact(f"{name}.dt_bias", sizes.value_heads),
        norm=RMSNorm(weights.take(f"{name}.norm.weight", sizes.value_dim), parts.eps),
        kernels=parts.kernels,
    )


def _into(weights: Weights, name: str, sizes: Sizes, hidden: int) -> Linear:
    """Qwen3.5 stores the parts of this product one by one, Qwen3-Next key head by key head."""
    if weights.has(f"{name}.in_proj_qkv.weight"):
        made: dict[str, Size] = {"qkv": sizes.convolved, "z": sizes.values, "b": sizes.value_heads, "a": sizes.value_heads}
        return Linear.load(weights, {f"{name}.in_proj_{each}": size for each, size in made.items()}, hidden)
    group = sizes.value_heads // sizes.key_heads
    widths = (sizes.key_dim, sizes.key_dim, group * sizes.value_dim, group * sizes.value_dim)
    mixed = weights.take(f"{name}.in_proj_qkvz.weight", sizes.key_heads * sum(widths), hidden)
    by_head = mixed.unflatten(0, (sizes.key_heads, -1)).split(widths, dim=1)
    rates = weights.take(f"{name}.in_proj_ba.weight", 2 * sizes.value_heads, hidden)
    beta_decay = rates.unflatten(0, (sizes.key_heads, -1)).split((group, group), dim=1)
    return Linear(torch.cat([part.flatten(0, 1) for part in (*by_head, *beta_decay)]))


def _experts(parts: Parts, name: str) -> SharedExperts:
    config, count = parts.config, parts.config.size("num_experts")
    top = config.size("num_experts_per_tok", most=count)
    route = softmax_then_top(top, sum_to_one=config.flag("norm_topk_prob", True))
    return SharedExperts(
        experts=MixtureOfExperts.load(parts, name, count, route),
        shared=GatedMLP.load(parts, f"{name}.shared_expert", width="shared_expert_intermediate_size"),
        gate=parts.linear(f"{name}.shared_expert_gate", 1, parts.hidden),
    )
