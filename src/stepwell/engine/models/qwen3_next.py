"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and full attention with a gate in every fourth layer.

    x + mixer(norm(x)),  then  x + mlp(norm(x))        mlp: a gated block, or experts and one that all tokens visit

Never loads what a checkpoint has beside the text model: its vision tower, its next-token-prediction layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.loading.weights import Size, Weights
from stepwell.engine.models.attention import Attention, head_norms, heads_of_rank
from stepwell.engine.models.base import Block, Decoder, Parts, head_of, tied_head
from stepwell.engine.models.layers import GatedMLP, Linear, RMSNorm, activation, norm_eps, rotary_from, said
from stepwell.engine.models.moe import Experts, MixtureOfExperts, gated, softmax_then_top
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Activation, Angles
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import Steps, Tokens
from stepwell.engine.passes.batch import Batch

MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """What all layers of a pass need."""

    angles: Angles
    points: Points


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """Of one delta net."""

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
    """`into` makes queries, keys, values, gates, betas and decays, side by side; the first three are convolved."""

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

    def __call__(self, x_NC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
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
    """Attention whose output is multiplied, channel by channel, by how much the token wants of it."""

    attention: Attention
    gate: Linear

    def __call__(self, x_NC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
        seen_NC = self.attention.look(x_NC, shared.angles, batch)
        return self.attention.out(seen_NC * self.gate(x_NC).sigmoid())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedExperts:
    """Experts, and one that all tokens visit, as far as a gate opens."""

    experts: MixtureOfExperts
    shared: GatedMLP
    gate: Linear

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.experts(x_NC), self.gate(x_NC).sigmoid(), self.shared(x_NC))


def build(parts: Parts) -> Decoder:
    config, weights, kernels = parts.config, parts.weights, parts.kernels
    weights.skip("mtp.", "model.visual.", "visual.")
    root = "model.language_model" if weights.has("model.language_model.embed_tokens.weight") else "model"
    turned = Fields(values={"partial_rotary_factor": 0.25, **config.values}, path=config.path)
    rotary = rotary_from(turned, read_heads(config).key_dim, device=parts.device)
    blocks = [_block(parts, f"{root}.layers.{layer.number}", layer) for layer in parts.spec.layers]
    recordable = parts.kernels.experts_stay_on_device or all(isinstance(block.mlp, GatedMLP) for block in blocks)
    hidden = config.size("hidden_size")
    embed = weights.take(f"{root}.embed_tokens.weight", said(config, "vocab_size"), hidden)
    return Decoder(
        spec=parts.spec,
        embed=embed,
        layers=blocks,
        norm=RMSNorm.load(weights, f"{root}.norm", hidden, norm_eps(config), around_one=True),
        head=head_of(parts, embed) if weights.has("lm_head.weight") else tied_head(parts, embed),
        shared=lambda batch: Shared(angles=rotary.angles(batch.positions_N, embed.dtype, kernels), points=Points.of(batch)),
        steady=(None,) if recordable else (),
    )


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    eps, hidden, (state, place) = norm_eps(parts.config), parts.config.size("hidden_size"), layer.place("kv", "ssm")
    mixer = _attention(parts, name, place) if state == "kv" else _delta_net(parts, name, place)
    return Block(
        attention=mixer,
        mlp=_mlp(parts, f"{name}.mlp"),
        kernels=parts.kernels,
        ranks=parts.ranks,
        before_attention=RMSNorm.load(parts.weights, f"{name}.input_layernorm", hidden, eps, around_one=True),
        before_mlp=RMSNorm.load(parts.weights, f"{name}.post_attention_layernorm", hidden, eps, around_one=True),
    )


def _attention(parts: Parts, name: str, layer: int) -> GatedAttention:
    config, weights, eps, name = parts.config, parts.weights, norm_eps(parts.config), f"{name}.self_attn"
    queries, heads = heads_of_rank(parts.ranks, config.size("num_attention_heads"), read_heads(config))
    hidden = config.size("hidden_size")
    width = heads.num * heads.key_dim

    def norm(of: str) -> RMSNorm:
        return RMSNorm.load(weights, f"{name}.{of}", heads.key_dim, eps, around_one=True)

    query, gate = _query_and_gate(Linear.load(weights, {f"{name}.q_proj": 2 * queries * heads.key_dim}, hidden), queries)
    attention = Attention(
        state="kv",
        layer=layer,
        heads=queries,
        kv_heads=heads.num,
        head_dim=heads.key_dim,
        scale=heads.key_dim**-0.5,
        qkv=_joined(query, Linear.load(weights, {f"{name}.k_proj": width, f"{name}.v_proj": width}, hidden)),
        out=Linear.load(weights, {f"{name}.o_proj": hidden}, queries * heads.key_dim),
        norms=head_norms(norm("q_norm"), norm("k_norm")),
        kernels=parts.kernels,
    )
    return GatedAttention(attention=attention, gate=gate)


def _query_and_gate(product: Linear, heads: int) -> tuple[Linear, Linear]:
    """Rows of `q_proj` are, head by head, queries and then gates."""
    weight = product.weight.unflatten(0, (heads, 2, -1)).unbind(1)
    bias = (None, None) if product.bias is None else product.bias.unflatten(0, (heads, 2, -1)).unbind(1)
    query, gate = (Linear(w.flatten(0, 1), None if b is None else b.flatten()) for w, b in zip(weight, bias, strict=True))
    return query, gate


def _joined(one: Linear, other: Linear) -> Linear:
    biases = [each.bias for each in (one, other) if each.bias is not None]
    return Linear(torch.cat([one.weight, other.weight]), torch.cat(biases) if biases else None)


def _delta_net(parts: Parts, name: str, layer: int) -> DeltaNet:
    config, weights, name = parts.config, parts.weights, f"{name}.linear_attn"
    sizes = Sizes(
        key_heads=parts.ranks.share(config.size("linear_num_key_heads"), "key heads of a delta net"),
        key_dim=config.size("linear_key_head_dim"),
        value_heads=parts.ranks.share(config.size("linear_num_value_heads"), "value heads of a delta net"),
        value_dim=config.size("linear_value_head_dim"),
    )
    window, hidden = config.size("linear_conv_kernel_dim", 4), config.size("hidden_size")
    return DeltaNet(
        layer=layer,
        sizes=sizes,
        into=_into(weights, name, sizes, hidden),
        out=Linear.load(weights, {f"{name}.out_proj": hidden}, sizes.values),
        conv_WC=weights.take(f"{name}.conv1d.weight", sizes.convolved, 1, window)[:, 0].T.contiguous(),
        act=activation(config),
        rate_H=-weights.take(f"{name}.A_log", sizes.value_heads, dtype=torch.float32).exp(),
        step_bias_H=weights.take(f"{name}.dt_bias", sizes.value_heads, dtype=torch.float32),
        norm=RMSNorm.load(weights, f"{name}.norm", sizes.value_dim, norm_eps(config)),
        kernels=parts.kernels,
    )


def _into(weights: Weights, name: str, sizes: Sizes, hidden: int) -> Linear:
    """Qwen3.5 keeps the parts of this product one by one; Qwen3-Next keeps them key head by key head."""
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


def _mlp(parts: Parts, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    config, weights, act, hidden = parts.config, parts.weights, activation(parts.config), parts.config.size("hidden_size")
    if not weights.has(f"{name}.gate.weight"):
        return GatedMLP.load(weights, name, act, parts.kernels, hidden=hidden, inner=said(config, "intermediate_size"))
    count = config.size("num_experts")
    experts = MixtureOfExperts(
        router=Linear.load(weights, {f"{name}.gate": count}, hidden),
        route=softmax_then_top(config.size("num_experts_per_tok", most=count), sum_to_one=config.flag("norm_topk_prob", True)),
        experts=Experts.load(
            weights,
            f"{name}.experts",
            count=count,
            hidden=hidden,
            inner=said(config, "moe_intermediate_size"),
            run=parts.kernels.experts,
            combine=gated(act),
        ),
    )
    inner = said(config, "shared_expert_intermediate_size")
    shared = GatedMLP.load(weights, f"{name}.shared_expert", act, parts.kernels, hidden=hidden, inner=inner)
    gate = Linear.load(weights, {f"{name}.shared_expert_gate": 1}, hidden)
    return SharedExperts(experts=experts, shared=shared, gate=gate)
