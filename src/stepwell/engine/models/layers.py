"""What layers of all families are made of: products, norms, rotations, feed-forward blocks. No state, no pages.

Axes: N tokens, C channels, H heads, D width of a head, E experts, I inner channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.engine.loading.weights import Size, Weights
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.pointwise import ACTIVATIONS, Activation, Angles, norm
from stepwell.engine.ranks import Share

INNER = "inner channels of a feed-forward block"


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def load(cls, weights: Weights, outputs: Mapping[str, Size], inputs: Size, *, biased: bool | None = None) -> Linear:
        """One product for all names in `outputs`, side by side, with so many outputs each.

        `biased` None: with biases where the checkpoint has them. Where ranks share the inputs, what comes out is a share of a
        sum, to which the first of them adds the bias.
        """
        biases = {f"{name}.bias": size for name, size in outputs.items()}
        biased = weights.has(next(iter(biases))) if biased is None else biased
        bias = weights.joined(biases) if biased else None
        if isinstance(inputs, Share) and weights.ranks.rank > 0:
            bias = None
        return cls(weights.joined({f"{name}.weight": size for name, size in outputs.items()}, inputs), bias)

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return linear(x_NC, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    weight: torch.Tensor
    eps: float

    @classmethod
    def load(cls, weights: Weights, name: str, size: Size, eps: float, *, around_one: bool = False) -> RMSNorm:
        """`around_one` for checkpoints that keep the difference to 1: their sum is kept in fp32, for bf16 would round it."""
        if around_one:
            return cls(1.0 + weights.take(f"{name}.weight", size, dtype=torch.float32), eps)
        return cls(weights.take(f"{name}.weight", size), eps)

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return norm(x_NC, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """`down(act(gate(x)) * up(x))`, with gate and up in one product. Ranks share the channels between."""

    gate_up: Linear
    down: Linear
    act: Activation
    kernels: Kernels

    @classmethod
    def load(cls, weights: Weights, name: str, act: Activation, kernels: Kernels, *, hidden: Size, inner: int | None) -> GatedMLP:
        inner = weights.shared(inner, INNER, of=f"{name}.gate_proj.weight", axis=0)
        gate_up = Linear.load(weights, dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), inner), hidden)
        return cls(gate_up, Linear.load(weights, {f"{name}.down_proj": hidden}, inner), act, kernels)

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.gate(self.gate_up(x_NC), self.act))


# ---- rotations ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Turns the first `2 * len(frequencies)` channels of a head by its token's position, first half against second half."""

    frequencies: torch.Tensor
    scale: float = 1.0

    def angles(self, positions_N: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> Angles:
        """Cosines and sines `[N, 1, 2 * half]`, once for all layers of a pass."""
        return kernels.angles(positions_N, self.frequencies, self.scale, dtype)


def rotary_from(config: Fields, head_dim: int, *, theta: float | None = None, device: str | torch.device) -> Rotary:
    """The rotation a config describes, in either way of writing it. `theta` overrides its base and drops its scaling."""
    scaling = config.section("rope_parameters") if config.has("rope_parameters") else config.section("rope_scaling")
    base = theta or number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    share = number(scaling, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    return rotary(base, int(head_dim * share), scaling if theta is None else Fields(values={}), config, device)


def rotary(base: float, width: int, scaling: Fields, config: Fields, device: str | torch.device) -> Rotary:
    """Frequencies for `width` channels, scaled as `scaling` says."""
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / base**steps
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    scale = 1.0
    if kind == "linear":
        frequencies = frequencies / number(scaling, "factor", 1.0)
    elif kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif kind == "yarn":
        frequencies, scale = _yarn(frequencies, base, width, scaling, config)
    elif kind != "default":
        raise ConfigError(f"rope type {kind!r} is not known; known are default, linear, llama3 and yarn")
    return Rotary(frequencies.to(device), scale)


def _llama3(frequencies: torch.Tensor, scaling: Fields) -> torch.Tensor:
    """Slows low frequencies down by `factor`, leaves high ones, and blends between."""
    factor = number(scaling, "factor", 8.0)
    low, high = number(scaling, "low_freq_factor", 1.0), number(scaling, "high_freq_factor", 4.0)
    turns = number(scaling, "original_max_position_embeddings", 8192) * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - keep) + frequencies * keep


def _yarn(frequencies: torch.Tensor, base: float, width: int, scaling: Fields, config: Fields) -> tuple[torch.Tensor, float]:
    """As above, between two channels that are found from turns over the original length; and scores grow a little."""
    factor = number(scaling, "factor", 1.0)
    original = number(scaling, "original_max_position_embeddings", number(config, "max_position_embeddings", 4096))

    def channel(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(number(scaling, "beta_fast", 32.0)), channel(number(scaling, "beta_slow", 1.0))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = number(scaling, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return frequencies / factor * slow + frequencies * (1 - slow), scale


def number(config: Fields, name: str, default: float) -> float:
    """A positive number of a config, whole or not."""
    value = config.values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"config field {config.path}{name} must be a positive number, got {value!r:.60}")
    return float(value)


def activation(config: Fields, default: str = "silu") -> Activation:
    name = config.text("hidden_activation") or config.text("hidden_act") or default  # Gemma reads the first, and has had both
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def said(config: Fields, name: str) -> int | None:
    """A size where the config says it: makers leave out what their own code has a default for."""
    return config.size(name) if config.has(name) else None


def norm_eps(config: Fields) -> float:
    return number(config, "rms_norm_eps", 1e-6)
