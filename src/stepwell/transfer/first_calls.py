"""Functions that must be called once in a process before results that torch computes there on a CPU are stored.

Torch's builds for x86-64 use MKL 2024.2 for functions of whole tensors (cos, exp and others). MKL chooses the implementation of a
function at its first call in a process. If several threads make that call together, each for its part of a tensor, one of them
may get an implementation with four correct digits (pytorch/pytorch#188792). The next call is correct, but the result of the first
would be cached, stored, and resumed by other requests. Remove this file once every supported torch is built with MKL 2025 or
later. Imports torch, so it is imported when it is used.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sin", "sqrt", "tan",
    "tanh", "trunc",
)  # fmt: skip


def make_first_calls() -> None:
    """Calls each of them with a single number, which uses one thread. Before the first pass; later calls take microseconds.

    vLLM calls this in each of its processes before it loads a model (`pyproject.toml`, `vllm.general_plugins`).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in FUNCTIONS:
            getattr(one, name)()
