"""Passes in flight: the next pass is started before the host has read the last one, and continues from its results.

    device    | pass 1 | pass 2 | pass 3 |          pass 2 reads the tokens of pass 1 on the device
    host               | reads 1, starts 3 | ...    and commits, streams and plans while the next pass runs

A pass over a part of a prompt chooses nothing: reading it means that it has ended. Tokens may be the likeliest or drawn: inputs
of a draw are known before the previous tokens, and so are biases. Not for tokens with logprobs, which come with them, nor for
those whose choice depends on the previous token, nor with a draft, nor for passes that begin while their pages arrive. A request
whose answer ends with what the host reads, also by a stop string, was computed once too often; that row is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stepwell.engine.ops.editing import edited
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.ops.to_host import HostCopy
from stepwell.engine.passes.numbers import on_device
from stepwell.engine.requests.request import Chunk
from stepwell.engine.sampling.choices import draw_of
from stepwell.engine.sampling.edits import edit_of
from stepwell.tiers.lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unread:
    """A pass in flight, and the tokens chosen for those of its chunks that complete their requests."""

    chunks: Sequence[Chunk]
    leases: Sequence[Lease | None]  # that they were computed under
    rows: Mapping[int, int]  # of `token_B`, by request
    token_B: torch.Tensor
    on_host: HostCopy

    @classmethod
    def of(cls, chunks: Sequence[Chunk], logits_BV: torch.Tensor, kernels: Kernels) -> Unread:
        """Chooses on the device, and starts to copy the tokens to the host."""
        completed = [chunk for chunk in chunks if chunk.completes]
        unread = [(chunk.request, chunk.end - len(chunk.request.tokens)) for chunk in completed]
        logits_BV = edited(logits_BV, [edit_of(request, unread=count) for request, count in unread], kernels.send)
        token_B = kernels.pick(logits_BV, [draw_of(request, count) for request, count in unread])
        return cls(
            chunks=chunks,
            leases=[chunk.request.lease for chunk in chunks],
            rows={chunk.request.id: row for row, chunk in enumerate(completed)},
            token_B=token_B,
            on_host=kernels.to_host(token_B),
        )

    def read(self) -> list[int]:
        """The tokens, by row. Waits for the pass."""
        return self.on_host.read()

    def put_into(self, token_N: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        """The tokens of the next pass, `token_N`, with those filled in from which its chunks continue. Unsound ones count as 0.

        On the device, without waiting.
        """
        places = [at for at, chunk in enumerate(chunks) if chunk.follows]  # a chunk of one token is where its number says
        if not places:
            return token_N
        rows = [self.rows[chunks[at].request.id] for at in places]
        token_B = self.token_B.clamp_min(0)
        if rows != list(range(len(token_B))):
            token_B = token_B[on_device(rows, token_B.device)]
        if len(places) == len(token_N):
            return token_B
        return token_N.index_copy(0, on_device(places, token_N.device), token_B)
