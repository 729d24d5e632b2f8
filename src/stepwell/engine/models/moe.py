"""A feed-forward block of many experts; each token visits a few. Shared by all families that have one.

    logits = router(x);  a family's route chooses K experts a token, and their shares;  out = sum of share * expert(x)

Takes packed tokens `[N, C]` and returns the same shape, whichever requests they belong to. The products are those of
`ops/experts.py`, or the kernel chosen in its place. Ranks share the inner channels of each expert: all choose alike, have the
same amount of work, and compute parts of one sum. An expert that all tokens visit is added by `WithShared`, or in a family's own
way. Routes never wait for the device, so that a decode step can be captured.

A family gives a `Route`, from logits `[N, E]` to a `Routing`: `softmax_then_top` is what Qwen and Mixtral do, `sigmoid_in_groups`
what DeepSeek, Kimi and GLM do.

Axes: N tokens, C channels, E experts, K experts a token, G groups of experts, I inner channels, X experts of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.models.layers import INNER, FeedForward, GatedMLP, Linear, Parts, activation, said
from stepwell.engine.ops.experts import Combine, ExpertWeights, Routing, RunExperts, run_experts
from stepwell.engine.ops.pointwise import Activation

_NO_SHARE = 1e-20  # a sum of shares is never 0


Route = Callable[[torch.Tensor], Routing]


def softmax_then_top(count: int, *, sum_to_one: bool) -> Route:
    """The `count` most likely experts of all; `sum_to_one` (`norm_topk_prob`) makes their shares add up to 1."""

    def route(logits_NE: torch.Tensor) -> Routing:
        share_NK, expert_NK = logits_NE.softmax(dim=-1, dtype=torch.float32).topk(count, dim=-1)
        if sum_to_one:
            share_NK = share_NK / share_NK.sum(dim=-1, keepdim=True)
        return Routing(expert_NK=expert_NK, share_NK=share_NK.to(logits_NE.dtype))

    return route


def sigmoid_in_groups(
    count: int, *, bias_E: torch.Tensor, groups: int, top_groups: int, sum_to_one: bool, scale: float
) -> Route:  # fmt: skip
    """The `count` best experts of the `top_groups` best groups; a group is as good as its two best experts.

    `bias_E` (`e_score_correction_bias`) counts for the choice and not for the shares; `scale` multiplies all shares. Raises
    ConfigError if those groups have fewer experts than a token visits.
    """
    if count > (open_experts := len(bias_E) // groups * top_groups):
        raise ConfigError(f"config field topk_group {top_groups} leaves {open_experts} experts to a token that visits {count}")

    def route(logits_NE: torch.Tensor) -> Routing:
        score_NE = logits_NE.float().sigmoid()
        choice_NGX = (score_NE + bias_E).unflatten(1, (groups, -1))
        best_NG = choice_NGX.topk(min(2, choice_NGX.shape[2]), dim=-1).values.sum(dim=-1)
        closed_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(1, best_NG.topk(top_groups, dim=-1).indices, False)
        expert_NK = choice_NGX.masked_fill(closed_NG[..., None], -torch.inf).flatten(1).topk(count, dim=-1).indices
        share_NK = score_NE.gather(1, expert_NK)
        if sum_to_one:
            share_NK = share_NK / (share_NK.sum(dim=-1, keepdim=True) + _NO_SHARE)
        return Routing(expert_NK=expert_NK, share_NK=share_NK * scale)

    return route


def gated(act: Activation) -> Combine:
    return lambda gate, up: act(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """All experts of a layer, each `down(combine(gate(x), up(x)))`, and what runs them."""

    weights: ExpertWeights
    combine: Combine
    run: RunExperts = run_experts

    @classmethod
    def load(cls, parts: Parts, name: str, count: int, *, combine: Combine | None = None) -> Experts:
        """Experts without biases: one tensor for all, as transformers keeps them, or one for each, as checkpoints on disk do.

        Every rank has all of them, each with its share of the inner channels.
        """
        weights, hidden, inner = parts.weights, parts.hidden, said(parts.config, "moe_intermediate_size")
        if weights.has(f"{name}.gate_up_proj"):
            inner = weights.shared(inner, INNER, of=f"{name}.down_proj", axis=2)
            gate_up_EIC = weights.take(f"{name}.gate_up_proj", count, None if inner is None else (inner, inner), hidden)
            down_ECI = weights.take(f"{name}.down_proj", count, hidden, inner)
        else:
            named = ("w1", "w3", "w2") if weights.has(f"{name}.0.w1.weight") else ("gate_proj", "up_proj", "down_proj")
            each = [[f"{name}.{index}.{part}.weight" for part in named] for index in range(count)]
            inner = weights.shared(inner, INNER, of=each[0][0], axis=0)
            gate_up_EIC = torch.stack([weights.joined(dict.fromkeys((gate, up), inner), hidden) for gate, up, _ in each])
            down_ECI = torch.stack([weights.take(down, hidden, inner) for _, _, down in each])
        fitting = (count, gate_up_EIC.shape[2], gate_up_EIC.shape[1] // 2)
        if down_ECI.shape != fitting:
            raise ConfigError(
                f"tensor {name}.down_proj has shape {list(down_ECI.shape)}, and {list(fitting)} would fit gate_up_proj"
            )
        matrices = ExpertWeights(gate_up_EIC=gate_up_EIC, down_ECI=down_ECI)
        return cls(weights=matrices, combine=combine or gated(activation(parts.config)), run=parts.kernels.experts)

    def __call__(self, x_NC: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self.run(x_NC, routing, self.weights, self.combine)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureOfExperts:
    """The whole block: scores, a family's choice, and the chosen experts. A router of fp32 scores in fp32."""

    router: Linear
    route: Route
    experts: Experts

    @classmethod
    def load(cls, parts: Parts, name: str, count: int, route: Route, *, dtype: torch.dtype | None = None) -> MixtureOfExperts:
        """The tensors `name`.gate and `name`.experts. `dtype` is what the router computes in, by default the model's."""
        router = Linear(parts.weights.take(f"{name}.gate.weight", count, parts.hidden, dtype=dtype))
        return cls(router=router, route=route, experts=Experts.load(parts, f"{name}.experts", count))

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        routing = self.route(self.router(x_NC.to(self.router.weight.dtype)))
        return self.experts(x_NC, routing)


def feed_forward(parts: Parts, name: str, load_experts: Callable[[Parts, str], FeedForward]) -> FeedForward:
    """A gated block, or experts in the layers that have a router. (Fields such as `first_k_dense_replace` say the same.)"""
    return load_experts(parts, name) if parts.weights.has(f"{name}.gate.weight") else GatedMLP.load(parts, name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WithShared:
    """Experts, and a block that all tokens visit."""

    experts: MixtureOfExperts
    shared: GatedMLP

    def __call__(self, x_NC: torch.Tensor) -> torch.Tensor:
        return self.experts(x_NC) + self.shared(x_NC)
