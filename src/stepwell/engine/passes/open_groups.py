"""Tokens of unfinished groups, between passes: the engine's own memory, outside the arena's pages.

    tokens     | . . . . | . . . . | o o                ratio 4: two tokens wait until their group is complete
    slot       [ layer ][ token of the group ][ element ]    one for each request that runs

A checkpoint holds these rows as they were at its boundary, in the request's point page. If the period divides every boundary,
there are none, and pages have no space for them. Does not know leases: the caller takes and releases slots.

Slots are not part of the device tier's budget, and their number never shrinks: the maximum of concurrent requests, rounded up to
a power of two. One of DeepSeek-V4-Flash takes 5.4 MiB in bf16, one of V4-Pro 8.3 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import Point
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.rows import TORCH_DTYPES

FEWEST_SLOTS = 4


class OpenGroups:
    """For every point state with a period, rows `[slot, layer, token of the group, element]`."""

    def __init__(self, pages: DevicePages, *, device: str | torch.device) -> None:
        spec = pages.spec
        self._pages = pages
        self._period: dict[str, int] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self._paged = {part.state for part in spec.parts(Kind.POINT)}
        for state in spec.of_shape(Point):
            assert isinstance(state.shape, Point)
            if state.shape.period is not None:
                dtype = TORCH_DTYPES[state.dtype]
                shape = (0, state.layers, state.shape.period, state.row_bytes // dtype.itemsize)
                self._period[state.name] = state.shape.period
                self._rows[state.name] = torch.empty(shape, dtype=dtype, device=device)
        self._num_slots = 0
        self._free: list[int] = []

    @property
    def needed(self) -> bool:
        """Whether the model leaves groups open at all."""
        return bool(self._rows)

    @property
    def num_slots(self) -> int:
        """The number of slots. When it grows, all of them move to other memory."""
        return self._num_slots

    @property
    def num_taken(self) -> int:
        return self._num_slots - len(self._free)

    def take(self) -> int:
        """A slot, with undefined rows. There is always one: memory grows with the number of concurrent requests."""
        if not self._free:
            more = max(self._num_slots, FEWEST_SLOTS)
            self._rows = {name: torch.cat([rows, rows.new_empty(more, *rows.shape[1:])]) for name, rows in self._rows.items()}
            self._free = list(range(self._num_slots + more - 1, self._num_slots - 1, -1))
            self._num_slots += more
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert 0 <= slot < self._num_slots and slot not in self._free, f"{slot=} of {self._num_slots} is not taken"
        self._free.append(slot)

    def layer(self, state: str, layer: int) -> torch.Tensor:
        """Rows `[slot, token of the group, element]` of one layer; writing through it writes the memory."""
        return self._rows[state][:, layer]

    def restore(self, slot: int, *, page: int, boundary: int) -> None:
        """Copies what a point page holds of a boundary to a slot."""
        for open_LRE, page_LRE in self._both(slot, page, boundary):
            open_LRE.copy_(page_LRE)

    def keep(self, slot: int, *, page: int, boundary: int) -> None:
        """Copies what is open in a slot at a boundary to a point page."""
        for open_LRE, page_LRE in self._both(slot, page, boundary):
            page_LRE.copy_(open_LRE)

    def _both(self, slot: int, page: int, boundary: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows that are open at a boundary, in a slot and in a page."""
        for name, period in self._period.items():
            if count := boundary % period:
                assert name in self._paged, f"token {boundary} is no boundary: {name} has {count} rows there, and pages have none"
                yield self._rows[name][slot, :, :count], self._pages.state_PLRE(name)[page, :, :count]
