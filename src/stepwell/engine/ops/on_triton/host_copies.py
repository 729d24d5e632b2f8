"""Small arrays to the host (`ops/to_host.py`) and to the device (`passes/numbers.py`) by Triton kernels over pinned memory.

A copy engine that is busy with pages takes milliseconds for a few numbers. Importing needs Triton.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

import torch
import triton
import triton.language as tl

from stepwell.engine.ops.to_host import HostCopy

TO_HOST_BLOCK, FROM_HOST_BLOCK = 128, 1024


class TritonToHost:
    def __init__(self) -> None:
        self._in_flight: deque[HostCopy] = deque()  # torch would reuse memory that a kernel has yet to write

    def __call__(self, numbers_N: torch.Tensor) -> HostCopy:
        while self._in_flight and self._in_flight[0].is_there:
            self._in_flight.popleft()
        host_N = torch.empty(numbers_N.shape, dtype=numbers_N.dtype, pin_memory=numbers_N.is_cuda)
        grid = (triton.cdiv(numbers_N.numel(), TO_HOST_BLOCK),)
        _copy_kernel[grid](numbers_N.contiguous(), host_N, numbers_N.numel(), BLOCK=TO_HOST_BLOCK, num_warps=1)
        self._in_flight.append(HostCopy(host_N, numbers_N.device))
        return self._in_flight[-1]


class TritonFromHost:
    def __init__(self) -> None:
        self._lock = Lock()
        self._in_flight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()  # torch would reuse memory that is still read

    def __call__(self, target: torch.Tensor, pinned: torch.Tensor) -> None:
        kind = torch.int32 if pinned.nbytes % 4 == 0 else torch.uint8
        source, into = pinned.view(-1).view(kind), target.view(-1).view(kind)
        _copy_kernel[(triton.cdiv(len(source), FROM_HOST_BLOCK),)](source, into, len(source), BLOCK=FROM_HOST_BLOCK)
        if target.is_cuda:
            read = torch.cuda.Event()
            read.record(torch.cuda.current_stream(target.device))
            with self._lock:
                while self._in_flight and self._in_flight[0][0].query():
                    self._in_flight.popleft()
                self._in_flight.append((read, pinned))


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
