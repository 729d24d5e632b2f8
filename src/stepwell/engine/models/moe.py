"""A feed-forward block of many experts of which each token visits a few. Shared by all families that have one.

    logits = router(x);  a family's route picks K experts a token, and their shares;  out = sum of share * expert(x)

Takes packed tokens `[N, C]` and returns the same shape, whatever requests they belong to: they are sorted by expert, and each
expert runs once over its own. A token's K results are added in the order of its choices, so that the order depends neither on its
neighbours nor on chance. Knows no shared expert: a family adds its own beside this block.

A family gives
    router   the product that scores experts, with or without a bias;
    route    from logits `[N, E]` to a `Routing`; `softmax_then_top` is what Qwen and Mixtral do;
    experts  weights as one tensor a matrix (`Experts.load` reads both namings of Hugging Face);
    combine  from gate and up, `[X, I]` each, to what the down product takes; `gated(silu)` for most.

Axes: N tokens, C channels, E experts, K experts a token, I inner channels, X = N * K visits sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.weights import Weights
from stepwell.engine.models.layers import Activation, Linear

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Which experts each token visits, and how much of each it takes."""

    expert_NK: torch.Tensor
    share_NK: torch.Tensor


Route = Callable[[torch.Tensor], Routing]


def softmax_then_top(count: int, *, sum_to_one: bool) -> Route:
    """The `count` most likely experts of all; `sum_to_one` (`norm_topk_prob`) makes their shares add up to 1."""

    def route(logits_NE: torch.Tensor) -> Routing:
        share_NK, expert_NK = logits_NE.softmax(dim=-1, dtype=torch.float32).topk(count, dim=-1)
        if sum_to_one:
            share_NK = share_NK / share_NK.sum(dim=-1, keepdim=True)
        return Routing(expert_NK=expert_NK, share_NK=share_NK.to(logits_NE.dtype))

    return route


def gated(act: Activation) -> Combine:
    return lambda gate, up: act(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """All experts of a layer, each `down(combine(gate(x), up(x)))`. Rows of `gate_up` are all gates, then all ups."""

    gate_up_EIC: torch.Tensor  # here I counts gates and ups
    down_ECI: torch.Tensor
    combine: Combine
    gate_up_bias_EI: torch.Tensor | None = None
    down_bias_EC: torch.Tensor | None = None

    @classmethod
    def load(cls, weights: Weights, name: str, *, count: int, combine: Combine) -> Experts:
        """Experts without biases: one tensor for all, as transformers keeps them, or one for each, as checkpoints on disk do."""
        if weights.has(f"{name}.gate_up_proj"):
            gate_up_EIC, down_ECI = weights.take(f"{name}.gate_up_proj"), weights.take(f"{name}.down_proj")
        else:
            each = [f"{name}.{index}" for index in range(count)]
            gate_up_EIC = torch.stack([weights.joined([f"{one}.gate_proj.weight", f"{one}.up_proj.weight"]) for one in each])
            down_ECI = torch.stack([weights.take(f"{one}.down_proj.weight") for one in each])
        if gate_up_EIC.shape[0] != count:
            raise ConfigError(f"tensor {name}.gate_up_proj holds {gate_up_EIC.shape[0]} experts, but its config says {count}")
        return cls(gate_up_EIC=gate_up_EIC, down_ECI=down_ECI, combine=combine)

    def __call__(self, x_NC: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_experts, (length, top) = self.gate_up_EIC.shape[0], routing.expert_NK.shape
        expert_X, order_X = routing.expert_NK.flatten().sort(stable=True)
        stops_E = torch.searchsorted(expert_X, torch.arange(num_experts, device=x_NC.device), right=True, out_int32=True)
        inner_XI = _product(x_NC[order_X // top], self.gate_up_EIC, self.gate_up_bias_EI, expert_X, stops_E)
        gate_XI, up_XI = inner_XI.chunk(2, dim=-1)
        out_XC = _product(self.combine(gate_XI, up_XI), self.down_ECI, self.down_bias_EC, expert_X, stops_E)
        unsorted_XC = torch.empty_like(out_XC).index_copy_(0, order_X, out_XC)
        return (unsorted_XC.view(length, top, -1) * routing.share_NK[..., None]).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureOfExperts:
    """The whole block: scores, a family's choice, and the chosen experts."""

    router: Linear
    route: Route
    experts: Experts

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return self.experts(x_NC, self.route(self.router(x_NC)))


def _product(
    x_XC: torch.Tensor, weight_EIC: torch.Tensor, bias_EI: torch.Tensor | None, expert_X: torch.Tensor, stops_E: torch.Tensor
) -> torch.Tensor:
    """Each row times its expert's matrix. Rows of expert e end before `stops_E[e]`."""
    out_XI, start = x_XC.new_empty(len(x_XC), weight_EIC.shape[1]), 0
    for expert, stop in enumerate(stops_E.tolist()):
        if stop > start:
            out_XI[start:stop] = x_XC[start:stop] @ weight_EIC[expert].mT
        start = stop
    return out_XI if bias_EI is None else out_XI + bias_EI[expert_X]
