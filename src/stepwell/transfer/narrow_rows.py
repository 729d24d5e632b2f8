"""Numbers of a checkpoint in eight bits, and back: a byte for each, and the largest number of each group of 64 beside them.

    row          |x0 x1 ... x63|x64 ...|                    fp32, bf16 or fp16
    narrow row   |v0 v1 ... v63 v64 ...|a0 a1 ...|          a: the largest of a group, as it is; v: x / a, in 127ths or as fp8

The largest comes back as it was, so a row that was restored and is saved again becomes the same bytes: rounding moved every
other number by less than half a step (in fp8 numbers near the smallest that a format has are excepted). The same numbers become
the same bytes on every device. Nothing that is not finite is taken. Imports torch, and is imported when it is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from stepwell.base.spec.narrow import GROUP

_WIDE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NotFinite(ValueError):
    """State that has infinite numbers, or what is no number. It is not saved; the device has it as it is."""


class _Narrowed(NamedTuple):
    dtype: torch.dtype
    largest: float  # that a group's largest number becomes
    whole: bool  # numbers are whole, and are rounded to be


NARROWED = {"int8": _Narrowed(torch.int8, 127.0, True), "fp8": _Narrowed(torch.float8_e4m3fn, 448.0, False)}


class RowCode:
    """Between rows of one kind of numbers and rows of eight bits. All arguments and answers are bytes, `[row, byte]`."""

    def __init__(self, narrow: str, wide: str) -> None:
        self._wide, self._narrow = _WIDE[wide], NARROWED[narrow]

    def encode(self, rows_RB: torch.Tensor) -> torch.Tensor:
        """Raises NotFinite. On a GPU it waits until that is known."""
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
        """What `encode` was given, as nearly as eight bits say."""
        numbers = self.numbers_of(rows_RB.shape[1])
        # Cloned: one row alone counts as contiguous wherever it lies, also where no number may begin.
        largest_RB = rows_RB[:, numbers:].clone(memory_format=torch.contiguous_format)
        largest_RG1 = largest_RB.view(self._wide).float().unsqueeze(2)
        values_RN = rows_RB[:, :numbers].contiguous().view(self._narrow.dtype).float()
        # A share of the largest, not so many steps: its own share is exactly 1. Divided by a tensor: on a GPU torch multiplies by
        # the inverse of a plain number, which rounds otherwise.
        steps_1 = values_RN.new_full((1,), self._narrow.largest)
        shares_RGN = pad(values_RN, (0, -numbers % GROUP)).unflatten(1, (-1, GROUP)) / steps_1
        found_RN: torch.Tensor = (shares_RGN * largest_RG1).flatten(1)[:, :numbers]
        return found_RN.to(self._wide).contiguous().view(torch.uint8)

    def numbers_of(self, row_bytes: int) -> int:
        """How many numbers a narrow row of so many bytes has."""
        width = self._wide.itemsize
        groups = -(-row_bytes // (GROUP + width))
        return row_bytes - groups * width
