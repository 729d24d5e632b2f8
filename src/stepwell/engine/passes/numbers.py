"""Numbers that a pass brings to the device: token ids, page tables, positions. The host waits for none of them.

The driver sends a small copy among a stream's own commands. A larger one goes through a copy engine, and there it waits until all
pages of a load beside it have been copied. So larger ones are read from pinned memory by a kernel, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

SMALL_BYTES = 16 << 10  # on an H200 copies of 24 KiB do not wait for a load, those of 28 KiB do

Send = Callable[[torch.Tensor, torch.Tensor], None]


def copy(target: torch.Tensor, pinned: torch.Tensor) -> None:
    """The plain way. Pinned memory is used again when copies from it are done: torch sees to that."""
    target.copy_(pinned, non_blocking=True)


_send_large: Send = copy


def send_large_by(send: Send) -> None:
    """How larger ones go to a CUDA device from now on, in this process."""
    global _send_large
    _send_large = send


def on_device(numbers: npt.ArrayLike, device: torch.device | str) -> torch.Tensor:
    """A tensor of these numbers."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    if torch.device(device).type != "cuda":
        return here.to(device)
    target = torch.empty(here.shape, dtype=here.dtype, device=device)
    _send(target, here)
    return target


def put(target: torch.Tensor, numbers: npt.ArrayLike) -> None:
    """The same, into a contiguous tensor that is there already."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    _send(target, here) if target.is_cuda else target.copy_(here)


def _send(target: torch.Tensor, here: torch.Tensor) -> None:
    pinned = here.pin_memory()
    copy(target, pinned) if pinned.nbytes <= SMALL_BYTES else _send_large(target, pinned)
