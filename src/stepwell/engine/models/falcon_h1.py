"""Falcon-H1: attention and a Mamba-2 mixer side by side in every layer, then a gated feed-forward block.

    x + attention(norm(x)) + mixer(norm(x)),  then  x + mlp(norm(x))

Its config multiplies many things by constants. They go into the matrices while loading, so that a pass never multiplies by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.attention import Attention, heads_of_rank, queries_keys_values
from stepwell.engine.models.base import Decoder, Parts, head_of
from stepwell.engine.models.layers import GatedMLP, Linear, RMSNorm, activation, number, rotary_from, said
from stepwell.engine.models.mamba2 import GatedNorm, Mixer, Sizes, step_limits
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Angles
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks

MODEL_TYPES = ("falcon_h1",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """What all layers of a pass need."""

    angles: Angles
    points: Points


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    attention: Attention
    mixer: Mixer
    mlp: GatedMLP
    before_both: RMSNorm
    before_mlp: RMSNorm
    kernels: Kernels
    ranks: Ranks

    def __call__(self, x_NC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
        normed_NC = self.before_both(x_NC)
        mixed_NC = self.mixer(normed_NC, shared.points) + self.attention(normed_NC, shared.angles, batch)
        mixed_NC = self.ranks.all_reduce(mixed_NC)
        x_NC, normed_NC = self.kernels.add_norm(x_NC, mixed_NC, self.before_mlp.weight, self.before_mlp.eps)
        return x_NC + self.ranks.all_reduce(self.mlp(normed_NC))


def build(parts: Parts) -> Decoder:
    config, weights, kernels = parts.config, parts.weights, parts.kernels
    rotary = rotary_from(config, read_heads(config).key_dim, device=parts.device)
    hidden = config.size("hidden_size")
    embed = weights.take("model.embed_tokens.weight", said(config, "vocab_size"), hidden)
    return Decoder(
        spec=parts.spec,
        embed=embed,
        layers=[_block(parts, layer) for layer in parts.spec.layers],
        norm=RMSNorm.load(weights, "model.final_layernorm", hidden, _eps(config)),
        head=head_of(parts, embed),
        shared=lambda batch: Shared(angles=rotary.angles(batch.positions_N, embed.dtype, kernels), points=Points.of(batch)),
        embed_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=number(config, "lm_head_multiplier", 1.0),
        steady=(None,),
    )


def _block(parts: Parts, layer: LayerSpec) -> Block:
    config, weights, name = parts.config, parts.weights, f"model.layers.{layer.number}"
    hidden = config.size("hidden_size")
    return Block(
        attention=_attention(parts, layer),
        mixer=_mixer(parts, layer),
        mlp=_mlp(parts, layer.number),
        before_both=RMSNorm.load(weights, f"{name}.input_layernorm", hidden, _eps(config)),
        before_mlp=RMSNorm.load(weights, f"{name}.pre_ff_layernorm", hidden, _eps(config)),
        kernels=parts.kernels,
        ranks=parts.ranks,
    )


def _attention(parts: Parts, layer: LayerSpec) -> Attention:
    config, name = parts.config, f"model.layers.{layer.number}.self_attn"
    queries, heads = heads_of_rank(parts.ranks, config.size("num_attention_heads"), read_heads(config))
    width, hidden = heads.num * heads.key_dim, config.size("hidden_size")
    scales = (1.0, number(config, "key_multiplier", 1.0), 1.0)
    qkv = queries_keys_values(parts.weights, name, queries, heads, hidden)
    out = Linear.load(parts.weights, {f"{name}.o_proj": hidden}, queries * heads.key_dim)
    return Attention(
        state="kv",
        layer=layer.places["kv"],
        heads=queries,
        kv_heads=heads.num,
        head_dim=heads.key_dim,
        scale=heads.key_dim**-0.5,
        qkv=scaled(qkv, (queries * heads.key_dim, width, width), scales, into=number(config, "attention_in_multiplier", 1.0)),
        out=scaled(out, out.weight.shape[:1], [number(config, "attention_out_multiplier", 1.0)]),
        kernels=parts.kernels,
    )


def _mixer(parts: Parts, layer: LayerSpec) -> Mixer:
    config, weights, name = parts.config, parts.weights, f"model.layers.{layer.number}.mamba"
    heads = config.size("mamba_n_heads")
    inner = config.size("mamba_d_ssm", config.size("mamba_expand", 2) * config.size("hidden_size"))
    groups = config.size("mamba_n_groups", 1)
    sizes = Sizes.of_rank(
        parts.ranks,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state=config.size("mamba_d_state"),
        window=config.size("mamba_d_conv", 4),
    )
    norm = GatedNorm(
        weight=weights.take(f"{name}.norm.weight", sizes.inner) if config.flag("mamba_rms_norm", False) else None,
        eps=_eps(config),
        ranks=parts.ranks,
        groups=groups,
        gate_first=not config.flag("mamba_norm_before_gate", True),
    )
    hidden = config.size("hidden_size")
    into = Linear.load(weights, {f"{name}.in_proj": sizes.split}, hidden)
    out = Linear.load(weights, {f"{name}.out_proj": hidden}, sizes.inner)
    return Mixer.load(
        weights,
        name,
        layer=layer.places["ssm"],
        sizes=sizes,
        act=activation(config),
        norm=norm,
        into=scaled(into, sizes.split, _list(config, "ssm_multipliers", 5), into=number(config, "ssm_in_multiplier", 1.0)),
        out=scaled(out, out.weight.shape[:1], [number(config, "ssm_out_multiplier", 1.0)]),
        steps=step_limits(config),
        kernels=parts.kernels,
    )


def _mlp(parts: Parts, index: int) -> GatedMLP:
    config, name = parts.config, f"model.layers.{index}.feed_forward"
    gate, down = _list(config, "mlp_multipliers", 2)
    inner, hidden = config.size("intermediate_size"), config.size("hidden_size")
    plain = GatedMLP.load(parts.weights, name, activation(config), parts.kernels, hidden=hidden, inner=inner)
    gate_up = scaled(plain.gate_up, [len(plain.gate_up.weight) // 2] * 2, (gate, 1.0))
    return replace(plain, gate_up=gate_up, down=scaled(plain.down, (hidden,), [down]))


def scaled(product: Linear, rows: Sequence[int], scales: Sequence[float], *, into: float = 1.0) -> Linear:
    """The same product with its input times `into` and parts of its output, `rows` long each, times `scales`."""
    weight, bias = product.weight, product.bias
    if all(scale == 1.0 for scale in (*scales, into)):
        return product
    by_row = torch.tensor(scales, device=weight.device).repeat_interleave(torch.tensor(rows, device=weight.device))
    scaled_weight = (weight.float() * (by_row[:, None] * into)).to(weight.dtype)
    return Linear(scaled_weight, None if bias is None else (bias.float() * by_row).to(bias.dtype))


def _list(config: Fields, name: str, count: int) -> list[float]:
    """So many multipliers; all 1 when the config has none."""
    value = config.values.get(name)
    if value is None:
        return [1.0] * count
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ConfigError(f"config field {config.path}{name} must be a list of {count} numbers, got {value!r:.60}")
    return [number(Fields(values={name: each}, path=config.path), name, 1.0) for each in value]


def _eps(config: Fields) -> float:
    return number(config, "rms_norm_eps", 1e-5)
