"""Hyper-connections: a stream of several lanes instead of one, and a block between two mixes of them.

    x_NMC --- read ---> block ---> written to every lane ---+--->
       \\------------------ lanes mixed ---------------------/

How lanes are read, written and mixed is computed from the stream itself, token by token, in fp32. Mixing adds nothing and loses
nothing: its matrix is brought near one whose rows and columns all sum to 1 (Sinkhorn). Axes: N tokens, M lanes, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm

from stepwell.base.spec.families.fields import Fields
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.layers import norm_eps, number
from stepwell.engine.passes.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix:
    """From a stream to numbers that say what is done with it: a product of all its lanes, scaled and shifted."""

    weight_XC: torch.Tensor
    scale_X: torch.Tensor
    shift_X: torch.Tensor
    eps: float  # of the norm before the product
    floor: float  # of what comes out

    @classmethod
    def load(cls, config: Fields, weights: Weights, name: str, counts: tuple[int, ...]) -> Mix:
        """`counts` says how many numbers each scale is for."""
        whole = torch.float32
        repeats = torch.tensor(counts, device=weights.device)
        return cls(
            weight_XC=weights.take(f"{name}fn", sum(counts), config.size("hc_mult", 4) * config.size("hidden_size"), dtype=whole),
            scale_X=weights.take(f"{name}scale", len(counts), dtype=whole).repeat_interleave(repeats),
            shift_X=weights.take(f"{name}base", sum(counts), dtype=whole),
            eps=norm_eps(config),
            floor=number(config, "hc_eps", 1e-6),
        )

    def __call__(self, x_NMC: torch.Tensor) -> torch.Tensor:
        flat_NC = x_NMC.flatten(1).float()
        mixed_NX = linear(rms_norm(flat_NC, flat_NC.shape[1:], eps=self.eps), self.weight_XC)
        return torch.addcmul(self.shift_X, mixed_NX, self.scale_X)

    def read(self, x_NMC: torch.Tensor, raw_NM: torch.Tensor) -> torch.Tensor:
        """One stream from all lanes, `[N, C]`."""
        return ((raw_NM.sigmoid() + self.floor)[..., None] * x_NMC).sum(dim=1).to(x_NMC.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HyperConnection:
    """Around one block."""

    lanes: int
    rounds: int
    mix: Mix

    @classmethod
    def load(cls, config: Fields, weights: Weights, name: str) -> HyperConnection:
        lanes = config.size("hc_mult", 4)
        mix = Mix.load(config, weights, f"{name}.", (lanes, lanes, lanes * lanes))
        return cls(lanes=lanes, rounds=config.size("hc_sinkhorn_iters", 20), mix=mix)

    def __call__(self, x_NMC: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        raw_NX = self.mix(x_NMC)
        read_NM, write_NM, lanes_NX = raw_NX.split((self.lanes, self.lanes, self.lanes * self.lanes), dim=-1)
        out_NC = block(self.mix.read(x_NMC, read_NM))
        kept_NMC = self._balanced(lanes_NX.unflatten(1, (self.lanes, self.lanes))).to(x_NMC.dtype).mT @ x_NMC
        return torch.addcmul(kept_NMC, (2 * write_NM.sigmoid()).to(x_NMC.dtype)[..., None], out_NC[:, None])

    def _balanced(self, raw_NMM: torch.Tensor) -> torch.Tensor:
        """Rows, then columns, divided by their sums in turn; columns last."""
        floor = self.mix.floor
        mixed_NMM = raw_NMM.softmax(dim=-1) + floor
        mixed_NMM = mixed_NMM / (mixed_NMM.sum(dim=-2, keepdim=True) + floor)
        for _ in range(self.rounds - 1):
            mixed_NMM = mixed_NMM / (mixed_NMM.sum(dim=-1, keepdim=True) + floor)
            mixed_NMM = mixed_NMM / (mixed_NMM.sum(dim=-2, keepdim=True) + floor)
        return mixed_NMM


@dataclass(frozen=True, slots=True)
class Spread:
    """What stands before the first block: every lane is the embedding."""

    lanes: int

    def __call__(self, x_NC: torch.Tensor, shared: object, batch: Batch) -> torch.Tensor:
        return x_NC[:, None].repeat(1, self.lanes, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """What stands behind the last block: one stream again."""

    mix: Mix

    @classmethod
    def load(cls, config: Fields, weights: Weights, name: str) -> Gather:
        return cls(Mix.load(config, weights, f"{name}.hc_", (config.size("hc_mult", 4),)))

    def __call__(self, x_NMC: torch.Tensor, shared: object, batch: Batch) -> torch.Tensor:
        return self.mix.read(x_NMC, self.mix(x_NMC))
