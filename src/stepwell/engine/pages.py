"""The device tier as a model sees it: each state a tensor `[page, layer, row, element]` over the arena's bytes, without a copy.

Knows no requests: which pages are whose is said by a `Batch`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec, Part
from stepwell.engine.rows import RowFormat, Rows

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STORED = {**TORCH_DTYPES, "fp8": torch.uint8}  # eight bits and their scales are bytes, until a row format reads them


class DevicePages:
    """All states of a model in one tier's memory. `rows` holds, for each kind, all of its pages as `[page, byte]`."""

    def __init__(self, spec: ModelSpec, rows: Mapping[Kind, torch.Tensor]) -> None:
        self.spec = spec
        self._rows = rows
        self._states = {
            part.state: self._typed(rows[kind], part, spec.state(part.state).dtype) for kind in rows for part in spec.parts(kind)
        }

    def state_PLRE(self, name: str) -> torch.Tensor:
        """Every page, layer and row of a state; writing through it writes the memory."""
        return self._states[name]

    def rows(self, name: str, layer: int, kept: RowFormat, dtype: torch.dtype) -> Rows:
        """One layer of a state, to compute with in `dtype`."""
        return Rows(self._states[name][:, layer], kept, dtype)

    def clear(self, kind: Kind, ids: list[int]) -> None:
        """Zeros these pages, so that rows nobody has written yet hold numbers, whatever the bytes were before."""
        if ids:
            self._rows[kind][torch.tensor(ids, device=self._rows[kind].device)] = 0

    @staticmethod
    def _typed(rows: torch.Tensor, part: Part, dtype: str) -> torch.Tensor:
        if dtype not in _STORED:
            raise ConfigError(f"the engine cannot compute with a state of {dtype}; choose one of: {', '.join(_STORED)}")
        state_PX: torch.Tensor = rows[:, part.offset : part.offset + part.size_bytes].view(_STORED[dtype])
        return state_PX.view(len(rows), part.layers, part.rows, -1)
