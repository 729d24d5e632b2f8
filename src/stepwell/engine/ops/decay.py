"""Decay inside one chunk of a recurrence: the sums of its logarithms, and products of tokens under it.

A decay is one number for a whole head, or one for each channel of its keys. In the first case it stands outside every product of
two channels; in the second inside, and no product of a chunk can be made without it. Axes are those of `recurrent`, and B tokens
of a block. Decay never amplifies: no exponent that counts is positive.

Sums are kept in float64. Each exponent is a difference of two sums, and after one strong decay early in a chunk both are large:
fp32 would blur the weak decays after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

BLOCK_TOKENS = 16


class Decay(Protocol):
    """The decay of one chunk, with its keys. G is 1 if channels decay one by one."""

    def products(self, query_KTD: torch.Tensor) -> torch.Tensor:
        """Query i times key j, decayed from token j to token i; `[K, G, T, T]`, 0 for j > i."""
        ...

    def query_state(self, query_KTD: torch.Tensor, state_KDX: torch.Tensor) -> torch.Tensor:
        """Each query times the state before the chunk, decayed up to its token; `[K, G, T, V]`."""
        ...

    def final_state(self, state_KDX: torch.Tensor, new_KGTV: torch.Tensor) -> torch.Tensor:
        """The state at the end of the chunk: the state before it and what its tokens add, each decayed; `[K, D, X]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadDecay:
    """`decay` from token j to token i, `begun` from the chunk's start to token i, `left` from token j to the chunk's end."""

    key_KTD: torch.Tensor
    decay_KGTT: torch.Tensor
    begun_KGT1: torch.Tensor
    left_KGT1: torch.Tensor

    @classmethod
    def of(cls, key_KTD: torch.Tensor, decay_KGT: torch.Tensor) -> HeadDecay:
        kind, sums_KGT = key_KTD.dtype, decay_KGT.double().cumsum(-1)
        between_KGTT = (sums_KGT[..., None] - sums_KGT[..., None, :]).to(kind).exp()
        left_KGT = (sums_KGT[..., -1:] - sums_KGT).to(kind).exp()
        begun_KGT = sums_KGT.to(kind).exp()
        return cls(
            key_KTD=key_KTD, decay_KGTT=between_KGTT.tril(), begun_KGT1=begun_KGT[..., None], left_KGT1=left_KGT[..., None]
        )

    def products(self, query_KTD: torch.Tensor) -> torch.Tensor:
        return (query_KTD @ self.key_KTD.mT)[:, None] * self.decay_KGTT

    def query_state(self, query_KTD: torch.Tensor, state_KDX: torch.Tensor) -> torch.Tensor:
        out_KTGV: torch.Tensor = (query_KTD @ state_KDX).unflatten(2, (self.begun_KGT1.shape[1], -1))
        return out_KTGV.transpose(1, 2) * self.begun_KGT1

    def final_state(self, state_KDX: torch.Tensor, new_KGTV: torch.Tensor) -> torch.Tensor:
        taken_KDX = self.key_KTD.mT @ (new_KGTV * self.left_KGT1).transpose(1, 2).flatten(2)
        state_KDGV: torch.Tensor = state_KDX.unflatten(2, (self.begun_KGT1.shape[1], -1))
        return taken_KDX + (state_KDGV * self.begun_KGT1[:, None, :, -1]).flatten(2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A few tokens of a chunk, and the keys for their queries: in the block pair by pair, before it decayed to its edge.

        0 ...... j ......| edge ... i ....|          exp(sum_i - sum_j) = exp(sum_i - sum_edge) * exp(sum_edge - sum_j)

    Neither factor is more than 1, however strong decays are. One edge for the whole chunk would not do: after it the second
    factor grows without bound.
    """

    rows: slice
    pair_KBBD: torch.Tensor  # key j decayed to token i, for j <= i; arbitrary numbers above the diagonal
    begun_KBD: torch.Tensor
    earlier_KTD: torch.Tensor  # keys decayed to the edge

    @classmethod
    def of(cls, key_KTD: torch.Tensor, sums_KTD: torch.Tensor, start: int) -> Block:
        rows, kind = slice(start, start + BLOCK_TOKENS), key_KTD.dtype
        sums_KBD, edge_K1D = sums_KTD[:, rows], sums_KTD[:, start - 1 : start] if start else torch.zeros_like(sums_KTD[:, :1])
        pair_KBBD = (sums_KBD[:, :, None] - sums_KBD[:, None]).clamp_max_(0.0).to(kind).exp_()
        earlier_KTD = (edge_K1D - sums_KTD[:, :start]).to(kind).exp_()
        return cls(
            rows=rows,
            pair_KBBD=pair_KBBD.mul_(key_KTD[:, None, rows]),
            begun_KBD=(sums_KBD - edge_K1D).to(kind).exp_(),
            earlier_KTD=earlier_KTD.mul_(key_KTD[:, :start]),
        )

    def products(self, query_KTD: torch.Tensor) -> torch.Tensor:
        """Rows of this block and columns up to its last token, `[K, B, T]`."""
        query_KBD = query_KTD[:, self.rows]
        own_KBB = (query_KBD[:, :, None] * self.pair_KBBD).sum(-1)
        return torch.cat([query_KBD * self.begun_KBD @ self.earlier_KTD.mT, own_KBB], dim=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelDecay:
    """Channels that decay one by one: `begun` from the chunk's start to token i; `left_key` are keys decayed to its end."""

    begun_KTD: torch.Tensor
    left_key_KTD: torch.Tensor
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, key_KTD: torch.Tensor, decay_KTD: torch.Tensor) -> ChannelDecay:
        kind, sums_KTD = key_KTD.dtype, decay_KTD.double().cumsum(1)
        return cls(
            begun_KTD=sums_KTD.to(kind).exp(),
            left_key_KTD=(sums_KTD[:, -1:] - sums_KTD).to(kind).exp() * key_KTD,
            blocks=tuple(Block.of(key_KTD, sums_KTD, start) for start in range(0, key_KTD.shape[1], BLOCK_TOKENS)),
        )

    def products(self, query_KTD: torch.Tensor) -> torch.Tensor:
        made_KBT = [block.products(query_KTD) for block in self.blocks]
        padded_KBT = [pad(each, (0, query_KTD.shape[1] - each.shape[2])) for each in made_KBT]
        return torch.cat(padded_KBT, dim=1).tril()[:, None]

    def query_state(self, query_KTD: torch.Tensor, state_KDX: torch.Tensor) -> torch.Tensor:
        return (query_KTD * self.begun_KTD @ state_KDX)[:, None]

    def final_state(self, state_KDX: torch.Tensor, new_KGTV: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.left_key_KTD.mT @ new_KGTV[:, 0], self.begun_KTD[:, -1, :, None], state_KDX)
