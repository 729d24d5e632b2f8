"""One state of a model, and where its bytes lie inside an object. Data and arithmetic; knows no model as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd

from stepwell.base.errors import SpecError
from stepwell.base.spec.shapes import Point, Prefix, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One thing a model remembers.

    A row is what one layer keeps for one group of tokens (`Prefix`), one token (`Window`) or one
    boundary (`Point`). `shards` is into how many equal parts a row can be cut over ranks; 1 means
    that every rank keeps all of it.
    """

    name: str
    shape: Shape
    layers: int
    row_bytes: int
    dtype: str
    required: bool = True
    align: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        if self.layers < 1 or self.row_bytes < 1:
            raise SpecError(
                f"state {self.name!r} needs at least one layer and one byte per row, got {self.layers=} {self.row_bytes=}"
            )
        if isinstance(self.shape, Point) and not self.required:
            raise SpecError(f"state {self.name!r}: a point state cannot be optional, since nothing else marks that it is missing")
        if self.align < 1 or self.shards < 1:
            raise SpecError(f"state {self.name!r}: align and shards must be at least 1, got {self.align=} {self.shards=}")
        if self.row_bytes % self.shards:
            raise SpecError(f"state {self.name!r}: rows of {self.row_bytes} bytes cannot be cut into {self.shards} equal shards")

    @property
    def replicated(self) -> bool:
        return self.shards == 1

    def rows_per_page(self, page_tokens: int) -> int:
        """Rows of one layer in one prefix page. A group that spans pages lives in the page that completes it."""
        assert isinstance(self.shape, Prefix), self
        return ceil(Fraction(page_tokens, self.shape.ratio))

    def point_rows(self, boundary_step: int) -> int:
        """The most rows a point can have at any multiple of `boundary_step`."""
        assert isinstance(self.shape, Point), self
        period = self.shape.period
        return 1 if period is None else period - gcd(boundary_step, period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where one state's bytes lie inside an object, back to back: row `r` of layer `l` starts at
    `offset + l * layer_stride + r * row_stride`.
    """

    state: str
    offset: int
    size_bytes: int
    layers: int
    rows: int
    row_bytes: int
    layer_stride: int  # in bytes, from a row to the same row of the next layer
    row_stride: int  # in bytes, from a row to the next one of its layer


def part_of(state: str, offset: int, *, layers: int, rows: int, row_bytes: int) -> Part:
    """Rows back to back, layer behind layer."""
    stride = rows * row_bytes
    return Part(
        state=state, offset=offset, size_bytes=layers * stride, layers=layers, rows=rows, row_bytes=row_bytes,
        layer_stride=stride, row_stride=row_bytes,
    )  # fmt: skip
