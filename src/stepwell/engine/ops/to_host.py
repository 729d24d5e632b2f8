"""A few numbers of the device, such as a step's tokens, on their way to the host. Nobody waits until they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch


class HostCopy:
    """Numbers of the device on their way to the host: there when the stream that was current has come so far."""

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
        """Waits for them."""
        if self._there is not None:
            self._there.synchronize()
        numbers: list[int] = self._host_N.tolist()
        return numbers


def to_host(numbers_N: torch.Tensor) -> HostCopy:
    """By a copy engine; those of the host are there already."""
    if not numbers_N.is_cuda:
        return HostCopy(numbers_N, numbers_N.device)
    host_N = torch.empty(numbers_N.shape, dtype=numbers_N.dtype, pin_memory=True).copy_(numbers_N, non_blocking=True)
    return HostCopy(host_N, numbers_N.device)


ToHost = Callable[[torch.Tensor], HostCopy]
