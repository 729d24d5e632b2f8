"""Experts with random weights and random routings, on any device."""

from __future__ import annotations

import torch

from stepwell.engine.ops.experts import ExpertWeights, Routing


def random(*shape: int, seed: int = 0, scale: float | None = None, device: str = "cpu") -> torch.Tensor:
    """Rows of length 1 on average, or `scale` times normal numbers."""
    numbers = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return numbers * (shape[-1] ** -0.5 if scale is None else scale)


def some_weights(count: int, channels: int, inner: int, *, biases: bool, seed: int = 0, device: str = "cpu") -> ExpertWeights:
    return ExpertWeights(
        gate_up_EIC=random(count, 2 * inner, channels, seed=seed, device=device),
        down_ECI=random(count, channels, inner, seed=seed + 1, device=device),
        gate_up_bias_EI=random(count, 2 * inner, seed=seed + 2, scale=0.3, device=device) if biases else None,
        down_bias_EC=random(count, channels, seed=seed + 3, scale=0.3, device=device) if biases else None,
    )


def some_routing(tokens: int, count: int, top: int, *, among: int | None = None, seed: int = 0) -> Routing:
    """Each token visits `top` different experts, all of them among the last `among`."""
    logits_NE = random(tokens, count, seed=seed, scale=1.0)
    if among is not None:
        logits_NE[:, : count - among] = -torch.inf
    share_NK, expert_NK = logits_NE.softmax(dim=-1).topk(top, dim=-1)
    return Routing(expert_NK=expert_NK, share_NK=share_NK)
