"""Numbers on their way to the device by a Triton kernel, which reads them from pinned memory. Importing needs Triton."""

from __future__ import annotations

from collections import deque
from threading import Lock

import torch
import triton
import triton.language as tl

BLOCK = 1024


class TritonFromHost:
    """A copy engine that is busy with the pages of a load would get to them when it has copied them all."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor]] = (
            deque()
        )  # torch would give memory to others that is still read

    def __call__(self, target: torch.Tensor, pinned: torch.Tensor) -> None:
        kind = torch.int32 if pinned.nbytes % 4 == 0 else torch.uint8
        source, into = pinned.view(-1).view(kind), target.view(-1).view(kind)
        _from_host_kernel[(triton.cdiv(len(source), BLOCK),)](source, into, len(source), BLOCK=BLOCK)
        if target.is_cuda:
            read = torch.cuda.Event()
            read.record(torch.cuda.current_stream(target.device))
            with self._lock:
                while self._under_way and self._under_way[0][0].query():
                    self._under_way.popleft()
                self._under_way.append((read, pinned))


@triton.jit(do_not_specialize=["count"])
def _from_host_kernel(pinned, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(pinned + at, mask=at < count), mask=at < count)
