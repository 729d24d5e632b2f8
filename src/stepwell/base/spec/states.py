"""One state of a model, and where its bytes lie inside an object. Data and arithmetic; knows no model as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, gcd

from stepwell.base.errors import SpecError
from stepwell.base.spec.shapes import Point, Prefix, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Neighbouring bytes of a row, cut into `units` equal parts for ranks to share: heads, or groups of them."""

    num_bytes: int
    units: int

    def units_of(self, rank: int, ranks: int) -> range:
        """Those that one of `ranks` keeps. Where there are fewer than ranks, each keeps one, and several keep the same.

        Nothing, where they cannot be shared equally.
        """
        if self.units % ranks == 0:
            each = self.units // ranks
            return range(rank * each, (rank + 1) * each)
        if ranks % self.units == 0:
            return range(at := rank * self.units // ranks, at + 1)
        return range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One thing a model remembers.

    A row is what one layer keeps for one group of tokens (`Prefix`), one token (`Window`) or one
    boundary (`Point`). `shards` is into how many equal parts a row can be cut over ranks; 1 means
    that every rank keeps all of it. `cuts` is for rows whose parts are not cut alike: they follow one
    another, as often as the row is long. A row without them is one that `shards` says all of.
    """

    name: str
    shape: Shape
    layers: int
    row_bytes: int
    dtype: str
    required: bool = True
    align: int = 1
    shards: int = 1
    cuts: tuple[Cut, ...] = ()  # not in the fingerprint: they say nothing about where bytes of this row lie
    may_be_unwritten: bool = False  # at some boundaries its bytes are whatever they were before; not in the fingerprint either

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
        if self.cuts and (self.row_bytes % self._pattern or any(cut.num_bytes % cut.units for cut in self.cuts)):
            raise SpecError(f"state {self.name!r}: rows of {self.row_bytes} bytes are not made of {self.cuts}")

    @property
    def pieces(self) -> tuple[Cut, ...]:
        """What a row is made of, once or several times over."""
        return self.cuts or (Cut(num_bytes=self.row_bytes, units=self.shards),)

    @property
    def replicated(self) -> bool:
        """Whether all ranks keep the same bytes. To be asked of the whole model's spec: what one rank keeps may not be cut
        further, and still be its own.
        """
        return all(piece.units == 1 for piece in self.pieces)

    @property
    def _pattern(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def spans_of(self, rank: int, ranks: int) -> list[range]:
        """Which bytes of a whole row one of `ranks` keeps, in the order in which its own rows have them. Neighbours are joined.

        Ranks with the same spans keep the same bytes. Raises SpecError where ranks cannot share it equally.
        """
        spans: list[range] = []
        for start in range(0, self.row_bytes, self._pattern):
            for piece in self.pieces:
                if not (units := piece.units_of(rank, ranks)):
                    raise SpecError(f"{ranks} ranks cannot share the {piece.units} parts of state {self.name!r} equally")
                size = piece.num_bytes // piece.units
                span = range(start + units.start * size, start + units.stop * size)
                if spans and spans[-1].stop == span.start:
                    span = range(spans.pop().start, span.stop)
                spans.append(span)
                start += piece.num_bytes
        return spans

    def for_ranks(self, ranks: int) -> StateSpec:
        """What each of `ranks` keeps of it. Raises SpecError as `spans_of` does."""
        row_bytes = sum(len(span) for span in self.spans_of(0, ranks))
        cuts = tuple(_shared(cut, ranks) for cut in self.cuts)
        return replace(self, row_bytes=row_bytes, shards=max(self.shards // ranks, 1), cuts=cuts)

    def rows_per_page(self, page_tokens: int) -> int:
        """Rows of one layer in one prefix page. A group that spans pages lives in the page that completes it."""
        assert isinstance(self.shape, Prefix), self
        return ceil(Fraction(page_tokens, self.shape.ratio))

    def point_rows(self, boundary_step: int) -> int:
        """The most rows a point can have at any multiple of `boundary_step`."""
        assert isinstance(self.shape, Point), self
        period = self.shape.period
        return 1 if period is None else period - gcd(boundary_step, period)


def _shared(cut: Cut, ranks: int) -> Cut:
    units = len(cut.units_of(0, ranks))
    return Cut(num_bytes=cut.num_bytes // cut.units * units, units=units)


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
