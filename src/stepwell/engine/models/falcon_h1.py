"""Falcon-H1: attention and a Mamba-2 mixer side by side in every layer, then a gated feed-forward block.

    x + attention(norm(x)) + mixer(norm(x)),  then  x + mlp(norm(x))

Its config multiplies many things by constants. They are folded into the matrices while loading, so a pass never multiplies by
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.attention import read_heads
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.attention import Attention
from stepwell.engine.models.base import Decoder, Hybrid, decoder
from stepwell.engine.models.layers import GatedMLP, Linear, Parts, RMSNorm, number, rotary_from
from stepwell.engine.models.mamba2 import GatedNorm, Mixer, Sizes
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    attention: Attention
    mixer: Mixer
    mlp: GatedMLP
    before_both: RMSNorm
    before_mlp: RMSNorm
    kernels: Kernels
    ranks: Ranks

    def __call__(self, x_NC: torch.Tensor, shared: Hybrid, batch: Batch) -> torch.Tensor:
        normed_NC = self.before_both(x_NC)
        mixed_NC = self.mixer(normed_NC, shared.points) + self.attention(normed_NC, shared.angles, batch)
        mixed_NC = self.ranks.all_reduce(mixed_NC)
        x_NC, normed_NC = self.kernels.add_norm(x_NC, mixed_NC, self.before_mlp.weight, self.before_mlp.eps)
        return x_NC + self.ranks.all_reduce(self.mlp(normed_NC))


def build(parts: Parts) -> Decoder:
    config = parts.config
    parts = replace(parts, eps=number(config, "rms_norm_eps", 1e-5))
    angles = parts.angles(rotary_from(config, read_heads(config).key_dim, device=parts.device))
    return decoder(
        parts,
        [_block(parts, f"model.layers.{layer.number}", layer) for layer in parts.spec.layers],
        lambda batch: Hybrid(angles=angles(batch), points=Points.of(batch)),
        experts=False,
        norm="model.final_layernorm",
        embed_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=number(config, "lm_head_multiplier", 1.0),
    )


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    return Block(
        attention=_attention(parts, f"{name}.self_attn", layer),
        mixer=_mixer(parts, f"{name}.mamba", layer.places["ssm"]),
        mlp=_mlp(parts, f"{name}.feed_forward"),
        before_both=parts.norm(f"{name}.input_layernorm"),
        before_mlp=parts.norm(f"{name}.pre_ff_layernorm"),
        kernels=parts.kernels,
        ranks=parts.ranks,
    )


def _attention(parts: Parts, name: str, layer: LayerSpec) -> Attention:
    config, plain = parts.config, Attention.load(parts, name, layer, read_heads(parts.config), normed=False)
    width = plain.kv_heads * plain.head_dim
    rows, scales = (plain.heads * plain.head_dim, width, width), (1.0, number(config, "key_multiplier", 1.0), 1.0)
    qkv = scaled(plain.qkv, rows, scales, into=number(config, "attention_in_multiplier", 1.0))
    return replace(plain, qkv=qkv, out=scaled(plain.out, (parts.hidden,), [number(config, "attention_out_multiplier", 1.0)]))


def _mixer(parts: Parts, name: str, layer: int) -> Mixer:
    config, heads = parts.config, parts.config.size("mamba_n_heads")
    inner = config.size("mamba_d_ssm", config.size("mamba_expand", 2) * parts.hidden)
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
        weight=parts.weights.take(f"{name}.norm.weight", sizes.inner) if config.flag("mamba_rms_norm", False) else None,
        eps=parts.eps,
        ranks=parts.ranks,
        groups=groups,
        gate_first=not config.flag("mamba_norm_before_gate", True),
    )
    plain = Mixer.load(parts, name, layer, sizes, norm)
    into = number(config, "ssm_in_multiplier", 1.0)
    return replace(
        plain,
        into=scaled(plain.into, sizes.split, _list(config, "ssm_multipliers", 5), into=into),
        out=scaled(plain.out, (parts.hidden,), [number(config, "ssm_out_multiplier", 1.0)]),
    )


def _mlp(parts: Parts, name: str) -> GatedMLP:
    plain, (gate, down) = GatedMLP.load(parts, name), _list(parts.config, "mlp_multipliers", 2)
    gate_up = scaled(plain.gate_up, [len(plain.gate_up.weight) // 2] * 2, (gate, 1.0))
    return replace(plain, gate_up=gate_up, down=scaled(plain.down, (parts.hidden,), [down]))


def scaled(product: Linear, rows: Sequence[int], scales: Sequence[float], *, into: float = 1.0) -> Linear:
    """The same product with its input times `into` and parts of its output, `rows` long each, times `scales`."""
    weight, bias = product.weight, product.bias
    if all(scale == 1.0 for scale in (*scales, into)):
        return product
    by_row = torch.tensor(scales, device=weight.device).repeat_interleave(torch.tensor(rows, device=weight.device))
    scaled_weight = (weight.float() * (by_row[:, None] * into)).to(weight.dtype)
    return Linear(scaled_weight, None if bias is None else (bias.float() * by_row).to(bias.dtype))


def _list(config: Fields, name: str, count: int) -> list[float]:
    """`count` multipliers; all 1 when the config has none."""
    value = config.values.get(name)
    if value is None:
        return [1.0] * count
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ConfigError(f"config field {config.path}{name} must be a list of {count} numbers, got {value!r:.60}")
    return [number(Fields(values={name: each}, path=config.path), name, 1.0) for each in value]
