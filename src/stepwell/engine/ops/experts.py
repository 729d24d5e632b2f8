"""Tokens through the experts that a router chose for them. The plain torch version: it runs everywhere, and is the reference.

    out = sum over a token's choices of share * down(combine(gate(x), up(x)))

Takes packed tokens `[N, C]` and returns the same shape and type, whichever requests they belong to: they are sorted by expert,
and each expert runs once over its own. A token's K results are added in the order of its choices, so that the order depends
neither on its neighbours nor on chance. Never chooses experts: that is a family's route. Waits for the device, so it cannot be
captured in a CUDA graph; `on_triton/experts.py` can.

Axes: N tokens, C channels, E experts, K experts a token, I inner channels, X = N * K visits sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # gate and up, `[X, I]` each, to what the down product takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Which experts each token visits, and how much of each it takes."""

    expert_NK: torch.Tensor
    share_NK: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """All experts of a layer, one tensor a matrix. Rows of `gate_up` are all gates, then all ups."""

    gate_up_EIC: torch.Tensor  # here I counts gates and ups
    down_ECI: torch.Tensor
    gate_up_bias_EI: torch.Tensor | None = None
    down_bias_EC: torch.Tensor | None = None


RunExperts = Callable[[torch.Tensor, Routing, ExpertWeights, Combine], torch.Tensor]


def run_experts(x_NC: torch.Tensor, routing: Routing, weights: ExpertWeights, combine: Combine) -> torch.Tensor:
    """One product after the other, for each expert with tokens."""
    num_experts, (length, top) = weights.gate_up_EIC.shape[0], routing.expert_NK.shape
    expert_X, order_X = routing.expert_NK.flatten().sort(stable=True)
    stops_E = torch.searchsorted(expert_X, torch.arange(num_experts, device=x_NC.device), right=True, out_int32=True)
    stops = stops_E.tolist()  # waits for the device: once for both products
    inner_XI = _product(x_NC[order_X // top], weights.gate_up_EIC, weights.gate_up_bias_EI, expert_X, stops)
    gate_XI, up_XI = inner_XI.chunk(2, dim=-1)
    out_XC = _product(combine(gate_XI, up_XI), weights.down_ECI, weights.down_bias_EC, expert_X, stops)
    unsorted_XC = torch.empty_like(out_XC).index_copy_(0, order_X, out_XC)
    return (unsorted_XC.view(length, top, -1) * routing.share_NK[..., None]).sum(dim=1).to(x_NC.dtype)


def _product(
    x_XC: torch.Tensor, weight_EIC: torch.Tensor, bias_EI: torch.Tensor | None, expert_X: torch.Tensor, stops: list[int]
) -> torch.Tensor:
    """Each row times its expert's matrix. Rows of expert e end before `stops[e]`."""
    out_XI, start = x_XC.new_empty(len(x_XC), weight_EIC.shape[1]), 0
    for expert, stop in enumerate(stops):
        if stop > start:
            out_XI[start:stop] = x_XC[start:stop] @ weight_EIC[expert].mT
        start = stop
    return out_XI if bias_EI is None else out_XI + bias_EI[expert_X]
