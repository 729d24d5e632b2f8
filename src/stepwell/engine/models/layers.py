"""What layers of all families are made of: products, norms, rotations, feed-forward blocks; and `Parts`, which loads them.

Keeps no state and reads no pages. Ranks appear in sizes alone: `Linear.load` cuts its outputs where these are shared (a column
of Megatron), or its inputs (a row), and what is loaded through `Parts` needs no further word on them.

Axes: N tokens, C channels, H heads, D width of a head, E experts, I inner channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families.fields import Fields
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.loading.weights import Size, Weights
from stepwell.engine.ops.kernels import TORCH, Kernels
from stepwell.engine.ops.pointwise import ACTIVATIONS, Activation, Angles, norm
from stepwell.engine.passes.batch import Batch
from stepwell.engine.ranks import Ranks, Share

INNER = "inner channels of a feed-forward block"
FeedForward = Callable[[torch.Tensor], torch.Tensor]  # from [N, C] to [N, C]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a model is built from: its config, its spec, its tensors and kernels. With several ranks, spec and tensors are this
    rank's. `eps` and `around_one` are for its norms; a family whose norms differ from most replaces them.
    """

    config: Fields
    spec: ModelSpec
    weights: Weights
    kernels: Kernels = TORCH
    selector: Selector | None = None  # for layers that attend to the whole past
    eps: float = 1e-6
    around_one: bool = False  # whether norms are stored as differences to 1
    exact_norms: bool = False  # whether their weights stay in fp32

    @property
    def device(self) -> str | torch.device:
        return self.weights.device

    @property
    def ranks(self) -> Ranks:
        return self.weights.ranks

    @property
    def hidden(self) -> int:
        return self.config.size("hidden_size")

    def norm(self, name: str, size: Size = None) -> RMSNorm:
        """Over the stream, or over `size` channels."""
        size = self.hidden if size is None else size
        if self.around_one:  # the sum stays in fp32, for bf16 would round it
            return RMSNorm(1.0 + self.exact(f"{name}.weight", size), self.eps)
        dtype = torch.float32 if self.exact_norms else None
        return RMSNorm(self.weights.take(f"{name}.weight", size, dtype=dtype), self.eps)

    def linear(self, name: str, outputs: Size, inputs: Size, *, biased: bool | None = None) -> Linear:
        return Linear.load(self.weights, {name: outputs}, inputs, biased=biased)

    def exact(self, name: str, *shape: Size) -> torch.Tensor:
        """A tensor in fp32, whatever the model computes in."""
        return self.weights.take(name, *shape, dtype=torch.float32)

    def angles(self, rotary: Rotary) -> Callable[[Batch], Angles]:
        """Computes a pass's rotation. Must not refer to `self`, which would keep every tensor that was read."""
        dtype, kernels = self.weights.dtype, self.kernels
        return lambda batch: rotary.angles(batch.positions_N, dtype, kernels)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def load(cls, weights: Weights, outputs: Mapping[str, Size], inputs: Size, *, biased: bool | None = None) -> Linear:
        """One product for all names in `outputs`, side by side, with the number of outputs that each has.

        `biased` None: with biases if the checkpoint has them. If ranks share the inputs, each computes a part of a sum, and the
        first of them adds the bias.
        """
        biases = {f"{name}.bias": size for name, size in outputs.items()}
        biased = weights.has(next(iter(biases))) if biased is None else biased
        bias = weights.joined(biases) if biased else None
        if isinstance(inputs, Share) and weights.ranks.rank > 0:
            bias = None
        return cls(weights.joined({f"{name}.weight": size for name, size in outputs.items()}, inputs), bias)

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return linear(x_NC, self.weight, self.bias)


def side_by_side(one: Linear, other: Linear) -> Linear:
    """Both as one product. Outputs without a bias get one of 0 if the others have one."""
    weight = torch.cat([one.weight, other.weight])
    if one.bias is None and other.bias is None:
        return Linear(weight)
    biases = [weight.new_zeros(len(each.weight)) if each.bias is None else each.bias for each in (one, other)]
    return Linear(weight, torch.cat(biases))


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    weight: torch.Tensor
    eps: float

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
    def load(
        cls, parts: Parts, name: str, *, act: Activation | None = None, width: str = "intermediate_size", times: int = 1
    ) -> GatedMLP:  # fmt: skip
        """As wide as the config field `width` says, times `times`; where it says nothing, as the tensors are."""
        inner = said(parts.config, width)
        inner = None if inner is None else inner * times
        inner = parts.weights.shared(inner, INNER, of=f"{name}.gate_proj.weight", axis=0)
        gate_up = Linear.load(parts.weights, dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), inner), parts.hidden)
        return cls(
            gate_up, parts.linear(f"{name}.down_proj", parts.hidden, inner), act or activation(parts.config), parts.kernels
        )

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
