"""Converts numbers of a checkpoint to eight bits and back: one byte for each, with the largest number of each group of 64.

    row          |x0 x1 ... x63|x64 ...|                    fp32, bf16 or fp16
    narrow row   |v0 v1 ... v63 v64 ...|a0 a1 ...|          a: the largest of a group, unchanged; v: x / a, in 127ths or as fp8

The largest number is restored exactly, so saving a restored row again gives the same bytes: rounding moved every other number by
less than half a step (except fp8 numbers near the smallest that the format has). The same numbers give the same bytes on every
device. Values that are not finite are refused. Imports torch, and is imported when it is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from stepwell.base.spec.narrow import GROUP

_WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NotFinite(ValueError):
    """State with infinite numbers or NaN. It is not saved; the device keeps it unchanged."""


class _Narrowed(NamedTuple):
    dtype: torch.dtype
    largest: float  # the code of a group's largest number
    whole: bool  # codes are integers, and numbers are rounded to them


NARROWED = {"int8": _Narrowed(torch.int8, 127.0, True), "fp8": _Narrowed(torch.float8_e4m3fn, 448.0, False)}


class RowCode:
    """Converts between rows of one number format and rows of eight bits. All arguments and results are bytes, `[row, byte]`."""

    def __init__(self, narrow: str, wide: str) -> None:
        self._wide, self._narrow = _WIDE[wide], NARROWED[narrow]

    def encode(self, rows_RB: torch.Tensor) -> torch.Tensor:
        """Raises NotFinite. On a GPU it waits for that check."""
        x_RN = rows_RB.contiguous().view(self._wide).float()
        numbers = x_RN.shape[1]
        x_RGN = pad(x_RN, (0, -numbers % GROUP)).unflatten(1, (-1, GROUP))
        largest_RG1 = x_RGN.abs().amax(2, keepdim=True)
        if not bool(largest_RG1.isfinite().all()):
            raise NotFinite("state of a checkpoint is not finite, so it cannot be kept in eight bits")
        scaled_RGN = x_RGN / largest_RG1.masked_fill(largest_RG1 == 0, 1.0) * self._narrow.largest
        if self._narrow.whole:
            scaled_RGN = scaled_RGN.round()
        values_RN = scaled_RGN.flatten(1)[:, :numbers].to(self._narrow.dtype).view(torch.uint8)
        return torch.cat((values_RN, largest_RG1.squeeze(2).to(self._wide).view(torch.uint8)), 1)

    def decode(self, rows_RB: torch.Tensor) -> torch.Tensor:
        """The numbers given to `encode`, as precisely as eight bits allow."""
        numbers = self.numbers_of(rows_RB.shape[1])
        # Cloned: one row alone counts as contiguous wherever it lies, even at an address that is not aligned for numbers.
        largest_RB = rows_RB[:, numbers:].clone(memory_format=torch.contiguous_format)
        largest_RG1 = largest_RB.view(self._wide).float().unsqueeze(2)
        values_RN = rows_RB[:, :numbers].contiguous().view(self._narrow.dtype).float()
        # As a share of the largest, not as a number of steps: its own share is exactly 1. Divided by a tensor: on a GPU torch
        # multiplies by the inverse of a Python number, which rounds differently.
        steps_1 = values_RN.new_full((1,), self._narrow.largest)
        shares_RGN = pad(values_RN, (0, -numbers % GROUP)).unflatten(1, (-1, GROUP)) / steps_1
        found_RN: torch.Tensor = (shares_RGN * largest_RG1).flatten(1)[:, :numbers]
        return found_RN.to(self._wide).contiguous().view(torch.uint8)

    def numbers_of(self, row_bytes: int) -> int:
        """The number of numbers in a narrow row of this many bytes."""
        width = self._wide.itemsize
        groups = -(-row_bytes // (GROUP + width))
        return row_bytes - groups * width
