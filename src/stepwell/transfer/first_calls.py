"""What has to be called once in a process before what torch computes there on a CPU is kept.

Torch's builds for x86-64 have MKL 2024.2 for functions of whole tensors (cos, exp and others). It settles how a function is
computed at that function's first call in a process. Where threads make that call together, each for its share of a tensor, one
of them may get a version with four right digits (pytorch/pytorch#188792). The next call is right; but what the first computed
is cached, stored, and resumed by everybody. This file can go once every torch that we support is built with MKL 2025 or later.
Imports torch, so it is imported when it is used.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sin", "sqrt", "tan",
    "tanh", "trunc",
)  # fmt: skip


def make_first_calls() -> None:
    """Calls each of them for a single number, which one thread does. Before the first pass; again it costs microseconds.

    vLLM calls this in each of its processes before it loads a model (`pyproject.toml`, `vllm.general_plugins`).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in FUNCTIONS:
            getattr(one, name)()
