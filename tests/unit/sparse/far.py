"""Pages so far apart that offsets in words of up to four bytes need more than 32 bits, though what lies between two does not.

A stride that needs more is handed to a kernel in 64 bits, and would hide a product that is computed in 32.
"""

from __future__ import annotations

from math import prod

import torch

from stepwell.transfer.torch_memory import pinned_bytes

PAGES = 9
APART = (1 << 30) + 4096  # bytes from one page to the next
WHICH = ("host", "rows", "hints", "headers")


def spread(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, *, far: bool, device: str = "cpu") -> torch.Tensor:
    """Pages that hold anything, back to back or far apart; on a `device` that may be `pinned`, which is the host's for CUDA. On
    the CPU only what is touched takes memory.
    """
    size = prod(shape[1:])
    stride = APART // dtype.itemsize if far else size
    count = (shape[0] - 1) * stride + size
    if device == "pinned":
        flat = pinned_bytes(count * dtype.itemsize).view(dtype)
    else:
        flat = torch.empty(count, dtype=dtype, device=device)
    return flat.as_strided(shape, (stride, *torch.empty(shape[1:], device="meta").stride()))
