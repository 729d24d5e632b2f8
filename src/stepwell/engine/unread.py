"""Decode passes whose tokens the host has not read yet: the device chooses them, and may go on from them at once.

    device    | pass 1 | pass 2 | pass 3 |          pass 2 reads the tokens of pass 1 where they lie
    host               | reads 1, starts 3 | ...    and does what follows from a token while the next pass runs

Tokens may be the likeliest or drawn: what a draw needs is known before the tokens before it are. Not for requests with logprobs,
which the host computes, nor where there is a draft. A request whose answer ends with what the host reads, by a stop string too,
was computed once too often; that row is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stepwell.engine.ops.drawing import Pick
from stepwell.engine.ops.to_host import HostCopy, ToHost
from stepwell.engine.passes.numbers import on_device
from stepwell.engine.request import Request
from stepwell.engine.sampling import draw_of
from stepwell.tiers.lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unread:
    """A pass that was started, over the last tokens of `requests`, and what it chooses for each."""

    requests: Sequence[Request]
    leases: Sequence[Lease | None]  # that they were computed under
    token_B: torch.Tensor
    on_host: HostCopy

    @classmethod
    def of(
        cls, requests: Sequence[Request], logits_BV: torch.Tensor, *, after: int, pick: Pick, to_host: ToHost
    ) -> Unread:  # fmt: skip
        """Chooses on the device, and starts to bring the tokens to the host.

        The requests have read all tokens that these come from, or all but the last one (`after` 1).
        """
        token_B = pick(logits_BV, [draw_of(request, after) for request in requests])
        leases = [request.lease for request in requests]
        return cls(requests=requests, leases=leases, token_B=token_B, on_host=to_host(token_B))

    def read(self) -> list[int]:
        """The token of each request. Waits for the pass."""
        return self.on_host.read()

    def valid_requests(self) -> list[Request]:
        """Those that still have the lease they were computed under. What was computed for the others is dropped."""
        return [request for request, lease in zip(self.requests, self.leases, strict=True) if request.lease is lease]

    def tokens_of(self, requests: Sequence[Request]) -> torch.Tensor:
        """The tokens of some of the requests, on the device, for a pass that goes on from them. Unsound ones count as 0."""
        token_B = self.token_B.clamp_min(0)
        if len(requests) == len(self.requests):
            return token_B
        rows = {request.id: row for row, request in enumerate(self.requests)}
        return token_B[on_device([rows[request.id] for request in requests], token_B.device)]
