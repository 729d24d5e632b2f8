"""The input of a recurrence: the outputs of a layer's products and convolution for each token, and their preparation.

The preparation is the same in every model, so that a kernel can do it on the way:

    step   = softplus(raw + bias), within limits        how long a token lasts, for each head or each channel of a key
    decay  = step * rate                                never above 0
    delta rule (there is a beta):   query = unit(query) / sqrt(D),  key = unit(key),  beta = sigmoid(beta)
    Mamba-2:                        value = step * value,  and  out + skip * value  in the end

In plain torch. Axes are those of `recurrent`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

UNIT_EPS = 1e-6  # of the squared lengths that queries and keys are divided by
FOREVER = (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """The steps of every token: `[N, H]` for heads that decay as a whole, `[N, H, D]` for channels that decay one by one."""

    raw: torch.Tensor
    bias: torch.Tensor  # [H] or [H, D], fp32
    rate: torch.Tensor  # [H] or [H, 1], fp32, below 0
    limits: tuple[float, float] = FOREVER

    @property
    def by_channel(self) -> bool:
        return self.raw.ndim == 3

    def taken(self) -> torch.Tensor:
        """Their length, in fp32."""
        taken: torch.Tensor = softplus(self.raw.float() + self.bias)
        return taken if self.limits == FOREVER else taken.clamp(*self.limits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """The input of `step` and `scan`."""

    query_NKD: torch.Tensor
    key_NKD: torch.Tensor
    value_NHV: torch.Tensor
    decay: torch.Tensor  # [N, H] or [N, H, D], fp32
    beta_NH: torch.Tensor | None = None

    def at(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        beta = None if self.beta_NH is None else self.beta_NH[rows]
        return self.query_NKD[rows], self.key_NKD[rows], self.value_NHV[rows], self.decay[rows], beta


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """All tokens of a batch, for one layer."""

    query_NKD: torch.Tensor
    key_NKD: torch.Tensor
    value_NHV: torch.Tensor
    steps: Steps
    beta_NH: torch.Tensor | None = None  # the delta rule's, before its sigmoid
    skip_H: torch.Tensor | None = None  # Mamba-2's, fp32

    def __post_init__(self) -> None:
        one_rule = (self.skip_H is None) if self.is_delta else not self.steps.by_channel
        assert one_rule, "a beta is for the delta rule; a skip, and steps of heads alone, are for Mamba-2"

    @property
    def is_delta(self) -> bool:
        return self.beta_NH is not None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of one segment's state: heads, width of a key, width of a value."""
        return self.value_NHV.shape[1], self.key_NKD.shape[2], self.value_NHV.shape[2]

    @property
    def query_scale(self) -> float:
        return float(self.key_NKD.shape[2] ** -0.5) if self.is_delta else 1.0

    def after(self, rows: int) -> Tokens:
        """Those from row `rows` on."""
        raw, beta_NH = self.steps.raw[rows:], None if self.beta_NH is None else self.beta_NH[rows:]
        query_NKD, key_NKD, value_NHV = self.query_NKD[rows:], self.key_NKD[rows:], self.value_NHV[rows:]
        steps = Steps(raw=raw, bias=self.steps.bias, rate=self.steps.rate, limits=self.steps.limits)
        return Tokens(query_NKD=query_NKD, key_NKD=key_NKD, value_NHV=value_NHV, steps=steps, beta_NH=beta_NH, skip_H=self.skip_H)

    def ready(self) -> Ready:
        """Prepared for the recurrence, in fp32."""
        taken, value_NHV = self.steps.taken(), self.value_NHV.float()
        decay = taken * self.steps.rate
        if self.beta_NH is None:
            value_NHV = value_NHV * taken[..., None]
            return Ready(query_NKD=self.query_NKD, key_NKD=self.key_NKD, value_NHV=value_NHV, decay=decay)
        query_NKD, key_NKD = _unit(self.query_NKD) * self.query_scale, _unit(self.key_NKD)
        beta_NH = self.beta_NH.float().sigmoid()
        return Ready(query_NKD=query_NKD, key_NKD=key_NKD, value_NHV=value_NHV, decay=decay, beta_NH=beta_NH)

    def skipped(self, out_NHV: torch.Tensor) -> torch.Tensor:
        """The output, with the skip added."""
        return out_NHV if self.skip_H is None else torch.addcmul(out_NHV, self.skip_H[:, None], self.value_NHV)


def _unit(x_NKD: torch.Tensor) -> torch.Tensor:
    """Heads of length 1, in fp32."""
    x_NKD = x_NKD.float()
    return x_NKD * torch.rsqrt(x_NKD.square().sum(-1, keepdim=True) + UNIT_EPS)
