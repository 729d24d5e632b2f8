"""`ops/to_host.py` as a Triton kernel, which writes into pinned memory. Importing needs Triton."""

from __future__ import annotations

from collections import deque

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.to_host import HostCopy

BLOCK = 128


class TritonToHost:
    """Numbers written into pinned memory by a kernel: a copy engine that is busy with pages takes milliseconds for a few."""

    def __init__(self) -> None:
        self._under_way: deque[HostCopy] = deque()  # torch would give memory to others that a kernel is still to write

    def __call__(self, numbers_N: torch.Tensor) -> HostCopy:
        while self._under_way and self._under_way[0].is_there:
            self._under_way.popleft()
        host_N = torch.empty(numbers_N.shape, dtype=numbers_N.dtype, pin_memory=numbers_N.is_cuda)
        grid = (triton.cdiv(numbers_N.numel(), BLOCK),)
        _to_host_kernel[grid](numbers_N.contiguous(), host_N, numbers_N.numel(), BLOCK=BLOCK, num_warps=1)
        self._under_way.append(HostCopy(host_N, numbers_N.device))
        return self._under_way[-1]


@triton.jit(do_not_specialize=["count"])
def _to_host_kernel(numbers, host, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + at, tl.load(numbers + at, mask=at < count), mask=at < count)
