"""Numbers that a pass sends to the device: token ids, page tables, positions. The host waits for none of them.

The driver sends a small copy among a stream's own commands. A larger one goes through a copy engine, where it waits until all
pages of a concurrent load have been copied. So a model that has a kernel for it (`Kernels.send`) passes that as `send`, and the
kernel reads larger ones from pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

SMALL_BYTES = 16 << 10  # on an H200 copies of 24 KiB do not wait for a load, those of 28 KiB do

Send = Callable[[torch.Tensor, torch.Tensor], None]


def copy(target: torch.Tensor, pinned: torch.Tensor) -> None:
    """The plain way. Torch reuses pinned memory only after the copies from it have ended."""
    target.copy_(pinned, non_blocking=True)


def on_device(numbers: npt.ArrayLike, device: torch.device | str, send: Send = copy) -> torch.Tensor:
    """A tensor of these numbers. `send` copies larger ones to a CUDA device."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    if torch.device(device).type != "cuda":
        return here.to(device)
    target = torch.empty(here.shape, dtype=here.dtype, device=device)
    _send(target, here, send)
    return target


def several_on_device(
    values: Sequence[npt.NDArray[np.integer]], device: torch.device | str, send: Send = copy
) -> tuple[torch.Tensor, ...]:
    """Several lists of numbers, sent together."""
    joined = on_device(np.concatenate(values).astype(np.int64, copy=False), device, send)
    parts: tuple[torch.Tensor, ...] = joined.split([len(each) for each in values])
    return parts


def put(target: torch.Tensor, numbers: npt.ArrayLike, send: Send = copy) -> None:
    """The same, into a contiguous tensor that exists already."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    _send(target, here, send) if target.is_cuda else target.copy_(here)


def _send(target: torch.Tensor, here: torch.Tensor, send: Send) -> None:
    pinned = here.pin_memory()
    copy(target, pinned) if pinned.nbytes <= SMALL_BYTES else send(target, pinned)
