"""What is known of each value: one row of NumPy columns that grow; rows are reused. No files, no locks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.store.log.format.snapshot import SHAPES

Rows = npt.NDArray[np.int64]
Bytes2D = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

NO_SEGMENT = 0  # of an empty row: segments are numbered from 1


class Columns:
    """One row per value. Every column has `capacity` entries; rows are allocated and freed by number."""

    def __init__(self) -> None:
        self.capacity = 0
        self._free: list[int] = []
        for name, (kind, width) in SHAPES.items():
            setattr(self, name, np.zeros((0, width) if width else 0, kind))

    segment: Ints
    offset: Ints
    length: Ints
    seq: Ints
    used: Ints
    depth: npt.NDArray[np.int32]
    space: npt.NDArray[np.int32]
    key: Bytes2D
    parent: Bytes2D
    stamp: Bytes2D
    level: npt.NDArray[np.uint8]

    def take(self, count: int) -> list[int]:
        """Allocates empty rows."""
        while len(self._free) < count:
            self._grow(max(1024, 2 * self.capacity))
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - count :]
        return taken

    def give(self, rows: Rows) -> None:
        self.segment[rows] = NO_SEGMENT
        self._free += rows.tolist()

    def fill(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Loads whole columns, all rows in use. Only for columns that hold nothing yet."""
        assert not self.capacity, f"{self.capacity=} rows exist already"
        for name, column in columns.items():
            setattr(self, name, column)
        self.capacity = len(self.segment)

    def held(self) -> Rows:
        """The rows that hold a value."""
        return np.flatnonzero(self.segment)

    def _grow(self, capacity: int) -> None:
        for name, (kind, width) in SHAPES.items():
            grown = np.zeros((capacity, width) if width else capacity, kind)
            grown[: self.capacity] = getattr(self, name)
            setattr(self, name, grown)
        self._free += range(capacity - 1, self.capacity - 1, -1)
        self.capacity = capacity
