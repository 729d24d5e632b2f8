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

from stepwell.engine.models.layers import Parts, number
from stepwell.engine.passes.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mix:
    """Computes the coefficients of a mix from the stream: a product of all its lanes, scaled and shifted."""

    weight_XC: torch.Tensor
    scale_X: torch.Tensor
    shift_X: torch.Tensor
    eps: float  # of the norm before the product
    floor: float  # of what comes out

    @classmethod
    def load(cls, parts: Parts, name: str, counts: tuple[int, ...]) -> Mix:
        """`counts` has the number of outputs that share each scale."""
        repeats = torch.tensor(counts, device=parts.device)
        return cls(
            weight_XC=parts.exact(f"{name}fn", sum(counts), parts.config.size("hc_mult", 4) * parts.hidden),
            scale_X=parts.exact(f"{name}scale", len(counts)).repeat_interleave(repeats),
            shift_X=parts.exact(f"{name}base", sum(counts)),
            eps=parts.eps,
            floor=number(parts.config, "hc_eps", 1e-6),
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
    def load(cls, parts: Parts, name: str) -> HyperConnection:
        lanes = parts.config.size("hc_mult", 4)
        mix = Mix.load(parts, f"{name}.", (lanes, lanes, lanes * lanes))
        return cls(lanes=lanes, rounds=parts.config.size("hc_sinkhorn_iters", 20), mix=mix)

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
    """Before the first block: every lane is the embedding."""

    lanes: int

    def __call__(self, x_NC: torch.Tensor, shared: object, batch: Batch) -> torch.Tensor:
        return x_NC[:, None].repeat(1, self.lanes, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """After the last block: one stream again."""

    mix: Mix

    @classmethod
    def load(cls, parts: Parts, name: str) -> Gather:
        return cls(Mix.load(parts, f"{name}.hc_", (parts.config.size("hc_mult", 4),)))

    def __call__(self, x_NMC: torch.Tensor, shared: object, batch: Batch) -> torch.Tensor:
        return self.mix.read(x_NMC, self.mix(x_NMC))
