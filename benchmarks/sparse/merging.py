"""Two parts of attention merged by their softmax sums: one program for each query and head. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def merge(one_BHR: torch.Tensor, one_BH: torch.Tensor, other_BHR: torch.Tensor, other_BH: torch.Tensor) -> torch.Tensor:
    """As `split.merge`. Rows without gaps."""
    out_BHR = torch.empty_like(one_BHR)
    width = one_BHR.shape[2]
    _merge_kernel[(one_BH.numel(),)](
        one_BHR, one_BH, other_BHR, other_BH, out_BHR, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
    )
    return out_BHR


@triton.jit
def _merge_kernel(one, one_sum, other, other_sum, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    item, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = channel < WIDTH, item * WIDTH + channel
    ahead = tl.load(one_sum + item).to(tl.float32) - tl.load(other_sum + item).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp2(-ahead))
    first = tl.load(one + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    merged = first * share + second * (1.0 - share)
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
