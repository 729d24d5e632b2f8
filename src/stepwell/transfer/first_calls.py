"""What has to be called once in a process before the numbers that torch computes there are kept.

Torch's builds for x86-64 have MKL 2024.2 for functions of whole tensors (cos, exp and others). It settles how a function is
computed when that is called for the first time. Where threads make that call together, each for its share of a tensor, one of
them may get a version with four right digits (pytorch/pytorch#188792). That happens once in a process, and is over with the next
call; but what it computed is cached, stored, and resumed by everybody. Imports torch, so it is imported when it is used.
"""

from __future__ import annotations

import torch

_FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sin", "sqrt", "tan",
    "tanh", "trunc",
)  # fmt: skip


def make_first_calls() -> None:
    """Calls each of them for a single number, which one thread does. Before the first pass; a second time it is cheap too."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(one, name)()
