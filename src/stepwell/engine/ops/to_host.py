"""Copies a few numbers from the device to the host, such as a step's tokens. Waits only when they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch


class HostCopy:
    """Numbers on their way to the host: there once the stream that was current reaches this copy."""

    def __init__(self, host_N: torch.Tensor, device: torch.device) -> None:
        self._host_N = host_N
        self._there: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(device))

    @property
    def is_there(self) -> bool:
        return self._there is None or self._there.query()

    def read(self) -> list[int]:
        """Waits for the numbers."""
        if self._there is not None:
            self._there.synchronize()
        numbers: list[int] = self._host_N.tolist()
        return numbers


def to_host(numbers_N: torch.Tensor) -> HostCopy:
    """By a copy engine; numbers on the host are there already."""
    if not numbers_N.is_cuda:
        return HostCopy(numbers_N, numbers_N.device)
    host_N = torch.empty(numbers_N.shape, dtype=numbers_N.dtype, pin_memory=True).copy_(numbers_N, non_blocking=True)
    return HostCopy(host_N, numbers_N.device)


ToHost = Callable[[torch.Tensor], HostCopy]
