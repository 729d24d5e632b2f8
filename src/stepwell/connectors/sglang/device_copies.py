"""Copies between the pages of a device pool and their place on the host: all of a page up, one layer of it down.

In plain torch, on the thread that calls: on a GPU, on a stream of its own, and a call returns when the bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stepwell.connectors.sglang.device_pools import DevicePool

Barrier = Callable[[], None]


class DeviceCopies:
    """Of one device. Each thread has one of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, pool: DevicePool, ids: torch.Tensor, rows: torch.Tensor, at: Sequence[int]) -> None:
        """Device pages `ids` to the rows `at`."""
        places, start = torch.tensor(at, dtype=torch.int64), 0
        with self._running():
            for buffer in pool.buffers:
                pages = buffer.pages.index_select(0, ids.to(buffer.pages.device))
                rows[places, start : start + buffer.page_bytes] = pages.to("cpu")
                start += buffer.page_bytes

    def to_device(self, pool: DevicePool, layer: int, ids: torch.Tensor, rows: torch.Tensor, at: Sequence[int]) -> None:
        """The rows `at` to device pages `ids`, of what one layer needs."""
        places, start = torch.tensor(at, dtype=torch.int64), 0
        with self._running():
            for buffer in pool.buffers:
                if buffer.layer == layer:
                    pages = rows[places, start : start + buffer.page_bytes]
                    device = buffer.pages.device
                    buffer.pages.index_copy_(0, ids.to(device), pages.to(device))
                start += buffer.page_bytes

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()
