"""Numbers on their way to the host, by a kernel and by plain torch; the kernel on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from stepwell.engine.ops.to_host import to_host

pytest.importorskip("triton")
from stepwell.engine.ops.on_triton.host_copies import TritonToHost

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("count", [1, 64, 300, 0])
def test_numbers_come_to_the_host_as_they_are(count: int) -> None:
    by_kernel = TritonToHost()
    lists = [torch.randint(-(2**40), 2**40, (count, 2), device=DEVICE)[:, 0] for _ in range(5)]  # not contiguous
    read = [by_kernel(numbers) for numbers in lists]
    assert [each.read() for each in read] == [numbers.tolist() for numbers in lists]
    assert [to_host(numbers).read() for numbers in lists] == [numbers.tolist() for numbers in lists]
    by_kernel(lists[0])
    assert len(by_kernel._in_flight) == 1, "those that are there are not held any longer"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device here")
def test_memory_that_is_still_to_be_written_is_given_to_nobody_else() -> None:
    by_kernel, numbers = TritonToHost(), torch.full((64,), 7, device=DEVICE)
    by_kernel(numbers).read()  # built
    torch.cuda._sleep(400_000_000)
    by_kernel(numbers)  # and dropped by who asked
    others = [torch.zeros(64, dtype=torch.int64, pin_memory=True) for _ in range(8)]
    torch.cuda.synchronize()
    assert all(not each.any() for each in others)
