"""Mamba-2: recurrent layers alone, and the mixer that hybrid families combine with attention.

    x + mixer(norm(x))

A mixer reads and writes its own layer of `ssm` and `conv`, and no prefix. The stream keeps the model's number format, even if a
config asks for fp32 between layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.base import Decoder, decoder
from stepwell.engine.models.layers import Linear, Parts, RMSNorm, activation, number
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import Activation
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import FOREVER, Steps, Tokens
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """The sizes of one mixer. Each of `groups` has one key and one query, of `state` channels, for its share of the heads.

    Ranks share the heads, and the groups that go with them; if there are fewer groups than ranks, several ranks have the same.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    window: int

    @classmethod
    def of_rank(cls, ranks: Ranks, *, heads: int, head_dim: int, groups: int, state: int, window: int) -> Sizes:
        heads, groups = ranks.share(heads, "heads of a mixer"), ranks.share_or_repeat(groups, "groups of a mixer")
        return cls(heads=heads, head_dim=head_dim, groups=groups, state=state, window=window)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def split(self) -> tuple[int, int, int, int, int]:
        """The outputs of the first product: gate, values, keys, queries, time steps."""
        return self.inner, self.inner, self.groups * self.state, self.groups * self.state, self.heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedNorm:
    """Over `groups` parts of the channels, after the gate or before it; without a weight there is only the gate.

    Ranks that share a part add up the sums of its squares.
    """

    weight: torch.Tensor | None
    eps: float
    ranks: Ranks
    groups: int = 1
    gate_first: bool = True

    def __call__(self, x_NC: torch.Tensor, gate_NC: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        if self.weight is not None and self.groups % self.ranks.size:
            return self._over_ranks(x_NC, gate_NC, self.weight)
        groups = max(self.groups // self.ranks.size, 1)
        return kernels.gated_norm(x_NC, gate_NC, self.weight, self.eps, groups=groups, gate_first=self.gate_first)

    def _over_ranks(self, x_NC: torch.Tensor, gate_NC: torch.Tensor, weight_C: torch.Tensor) -> torch.Tensor:
        ranks, gate_NC = self.ranks, silu(gate_NC.float())
        x_NC = x_NC.float() * gate_NC if self.gate_first else x_NC.float()
        mine, sum_NG = ranks.rank * self.groups // ranks.size, x_NC.new_zeros(len(x_NC), self.groups)
        sum_NG[:, mine] = x_NC.square().sum(dim=-1)
        mean_N = ranks.all_reduce(sum_NG)[:, mine] * (self.groups / (x_NC.shape[1] * ranks.size))
        normed_NC = x_NC * torch.rsqrt(mean_N[:, None] + self.eps) * weight_C.float()
        return normed_NC if self.gate_first else normed_NC * gate_NC


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixer:
    """`steps` are the least and the most time that may pass with a token; `rate_H` is the rate of decay of a head, below 0."""

    layer: int
    sizes: Sizes
    into: Linear
    out: Linear
    conv_WC: torch.Tensor
    conv_bias_C: torch.Tensor | None
    act: Activation
    rate_H: torch.Tensor
    step_bias_H: torch.Tensor
    skip_H: torch.Tensor
    norm: GatedNorm
    kernels: Kernels
    steps: tuple[float, float] = FOREVER

    @classmethod
    def load(cls, parts: Parts, name: str, layer: int, sizes: Sizes, norm: GatedNorm) -> Mixer:
        weights, channels, bias = parts.weights, sizes.split[1:4], f"{name}.conv1d.bias"
        rate_H, step_bias_H, skip_H = (parts.exact(f"{name}.{each}", sizes.heads) for each in ("A_log", "dt_bias", "D"))
        return cls(
            layer=layer,
            sizes=sizes,
            into=parts.linear(f"{name}.in_proj", sizes.split, parts.hidden),
            out=parts.linear(f"{name}.out_proj", parts.hidden, sizes.inner),
            conv_WC=weights.take(f"{name}.conv1d.weight", channels, 1, sizes.window)[:, 0].T.contiguous(),
            conv_bias_C=weights.take(bias, channels) if weights.has(bias) else None,
            act=activation(parts.config),
            rate_H=-rate_H.exp(),
            step_bias_H=step_bias_H,
            skip_H=skip_H,
            norm=norm,
            kernels=parts.kernels,
            steps=_step_limits(parts.config),
        )

    def __call__(self, x_NC: torch.Tensor, points: Points) -> torch.Tensor:
        sizes, (inner, _, shared, _, heads) = self.sizes, self.sizes.split
        gate_NC, mixed_NC, step_NH = self.into(x_NC).split((inner, inner + 2 * shared, heads), dim=-1)
        mixed_NC = self.kernels.convolve(points, self.layer, mixed_NC, self.conv_WC, self.conv_bias_C, act=self.act)
        value, key, query = mixed_NC.split((inner, shared, shared), dim=-1)
        tokens = Tokens(
            query_NKD=query.unflatten(1, (sizes.groups, sizes.state)),
            key_NKD=key.unflatten(1, (sizes.groups, sizes.state)),
            value_NHV=value.unflatten(1, (heads, sizes.head_dim)),
            steps=Steps(raw=step_NH, bias=self.step_bias_H, rate=self.rate_H, limits=self.steps),
            skip_H=self.skip_H,
        )
        out_NHV = self.kernels.recur(points, self.layer, tokens)
        return self.out(self.norm(out_NHV.flatten(1), gate_NC, self.kernels).to(x_NC.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    mixer: Mixer
    norm: RMSNorm
    ranks: Ranks

    def __call__(self, x_NC: torch.Tensor, shared: Points, batch: Batch) -> torch.Tensor:
        return x_NC + self.ranks.all_reduce(self.mixer(self.norm(x_NC), shared))


def build(parts: Parts) -> Decoder:
    parts = replace(parts, eps=number(parts.config, "layer_norm_epsilon", 1e-5))
    plural = parts.weights.has("backbone.embeddings.weight")  # the first checkpoints have the singular
    blocks = [_block(parts, f"backbone.layers.{layer.number}", layer) for layer in parts.spec.layers]
    embed = f"backbone.embedding{'s' if plural else ''}"
    return decoder(parts, blocks, Points.of, experts=False, embed=embed, norm="backbone.norm_f")


def _block(parts: Parts, name: str, layer: LayerSpec) -> Block:
    config, norm = parts.config, f"{name}.mixer.norm.weight"
    sizes = Sizes.of_rank(
        parts.ranks,
        heads=config.size("num_heads"),
        head_dim=config.size("head_dim"),
        groups=config.size("n_groups", 1),
        state=config.size("state_size"),
        window=config.size("conv_kernel", 4),
    )
    gated = GatedNorm(weight=parts.weights.take(norm, sizes.inner), eps=parts.eps, ranks=parts.ranks)
    mixer = Mixer.load(parts, f"{name}.mixer", layer.places["ssm"], sizes, gated)
    return Block(mixer=mixer, norm=parts.norm(f"{name}.norm"), ranks=parts.ranks)


def _step_limits(config: Fields) -> tuple[float, float]:
    """`time_step_limit`: the least and the most."""
    value = config.values.get("time_step_limit")
    if value is None:
        return FOREVER
    match value:
        case [int() | float() as least, int() | float() as most] if least <= most:
            return float(least), float(most)
    raise ConfigError(f"config field {config.path}time_step_limit must be two numbers, the least first, got {value!r:.60}")
