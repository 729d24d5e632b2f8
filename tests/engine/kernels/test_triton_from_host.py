"""Numbers on their way to the device by a kernel; on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from stepwell.engine.ops.on_triton.host_copies import TritonFromHost

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pinned(values: torch.Tensor) -> torch.Tensor:
    return values.pin_memory() if DEVICE == "cuda" else values


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (1023,), (1024, 3), (5001,)])
def test_numbers_come_to_the_device_as_they_are(shape: tuple[int, ...], kind: torch.dtype) -> None:
    values = torch.randint(-(2**30), 2**30, shape).to(kind)
    target = torch.zeros(shape, dtype=kind, device=DEVICE)
    TritonFromHost()(target, pinned(values))
    assert torch.equal(target.cpu(), values)


def test_no_more_than_asked_for_is_written() -> None:
    whole = torch.zeros(3000, dtype=torch.int64, device=DEVICE)
    TritonFromHost()(whole[:2500], pinned(torch.ones(2500, dtype=torch.int64)))
    assert whole.tolist() == [1] * 2500 + [0] * 500


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device here")
def test_memory_that_is_still_to_be_read_is_given_to_nobody_else() -> None:
    by_kernel, target = TritonFromHost(), torch.zeros(4096, dtype=torch.int64, device=DEVICE)
    by_kernel(target, torch.zeros(4096, dtype=torch.int64).pin_memory())  # built
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    by_kernel(target, torch.full((4096,), 7).pin_memory())  # and dropped by who asked
    others = [torch.zeros(4096, dtype=torch.int64).pin_memory() for _ in range(8)]
    torch.cuda.synchronize()
    assert target.tolist() == [7] * 4096 and len(others) == 8
    by_kernel(target, others[0])
    assert len(by_kernel._in_flight) == 1, "those that were read are not held any longer"
