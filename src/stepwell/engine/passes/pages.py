"""The device tier as a model sees it: each state a tensor `[page, layer, row, element]` over the arena's bytes, without a copy.

Does not know requests: a `Batch` assigns pages to requests.
"""

from __future__ import annotations

import copy as shallow
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.engine.passes.numbers import Send, copy, on_device
from stepwell.engine.passes.rows import RowFormat, Rows, part_PLRE, typed_PLRE
from stepwell.engine.passes.spilling import Spilling
from stepwell.jobs.executors import Arriving


class DevicePages:
    """All states of a model in one tier's memory. `rows` holds, for each kind, all of its pages as `[page, byte]`.

    If two models share pages, `inside` is the full content of the pages, and `names` maps states of this model to their names
    there, if these differ. A state whose rows may be on the host alone is that of ROWS pages here; `spilling` finds the rows of
    prefix pages, for models that read or write them.
    """

    def __init__(
        self, spec: ModelSpec, rows: Mapping[Kind, torch.Tensor], *, inside: ModelSpec | None = None,
        names: Mapping[str, str] | None = None, spilling: Spilling | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.spilling = spilling
        self._arriving: tuple[Arriving, ...] = ()
        self._points_PB = rows.get(Kind.POINT)
        whole = inside or spec
        parts = {part.state: (kind, part) for kind in rows for part in whole.device_parts(kind)}
        called = {state.name: (names or {}).get(state.name, state.name) for state in spec.states}
        self._called = called
        found = {name: parts[there] for name, there in called.items() if there in parts}  # some have rows at no boundary
        self._states = {name: typed_PLRE(rows[kind], part, spec.state(name).dtype) for name, (kind, part) in found.items()}
        self._bytes = {name: part_PLRE(rows[kind], part, torch.uint8) for name, (kind, part) in found.items()}
        # What is cleared: whole pages, or the part of this model.
        self._cleared = {kind: [rows[kind]] for kind in rows}
        if inside is not None or spec.spill is not None:
            self._cleared = {kind: [self._bytes[name] for name, (of, _) in found.items() if of is kind] for kind in rows}

    def while_arriving(self, arriving: Sequence[Arriving]) -> DevicePages:
        """Like this object, for one pass over pages that are partly being loaded. A request for a layer, or for a whole state,
        makes what is queued on the device from then on wait for it.
        """
        made = shallow.copy(self)
        made._arriving = tuple(arriving)
        return made

    def wait_for(self, name: str, layer: int) -> None:
        """Work queued on the device from now on runs after all bytes of this layer have arrived."""
        for each in self._arriving:
            each.wait(self._called[name], layer)

    def wait_for_state(self, name: str) -> None:
        """Like `wait_for`, for all layers of a state."""
        for layer in range(self._states[name].shape[1] if self._arriving else 0):
            self.wait_for(name, layer)

    def state_PLRE(self, name: str) -> torch.Tensor:
        """Every page, layer and row of a state; writing through it writes the memory."""
        self.wait_for_state(name)
        return self._states[name]

    def layer_PRE(self, name: str, layer: int) -> torch.Tensor:
        """Every page and row of one layer; the same."""
        self.wait_for(name, layer)
        return self._states[name][:, layer]

    def bytes_PLRB(self, name: str) -> torch.Tensor:
        """Every page, layer and row of a state, byte by byte."""
        self.wait_for_state(name)
        return self._bytes[name]

    def rows(self, name: str, layer: int, kept: RowFormat, dtype: torch.dtype, *, spilled: bool = False) -> Rows:
        """One layer of a state, to compute with in `dtype`; with `spilled`, some of its rows may be on the host alone."""
        places = self.spilling.of_layer(name, layer) if spilled and self.spilling is not None else None
        return Rows(self.layer_PRE(name, layer), kept, dtype, places)

    def clear(self, kind: Kind, ids: list[int], send: Send = copy) -> None:
        """Zeros these pages, so that rows not written yet hold numbers, whatever the bytes were before."""
        if ids:
            for pages in self._cleared[kind]:
                pages[on_device(np.array(ids, np.int64), pages.device, send)] = 0
            if kind is Kind.PREFIX and self.spilling is not None:
                self.clear(Kind.ROWS, self.spilling.rows_of(np.array(ids, np.int32)).tolist(), send)

    def copy_point(self, source: int, target: int) -> None:
        """Copies a point page, after what is queued on the device."""
        assert self._points_PB is not None, "this model has no point state"
        self._points_PB[target].copy_(self._points_PB[source])
