"""How much of the past a state needs to resume at a boundary: three shapes describe every hybrid model.

    tokens      0 ................................. B
    Prefix      |===================================|     all of [0, B), one row per `ratio` tokens
    Window                           |==============|     the last `tokens` tokens
    Point                                           o     one object, exactly at B

Data only: a shape holds no bytes and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stepwell.base.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Needs every token of [0, B); one row for each group of `ratio` tokens."""

    ratio: int = 1

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise SpecError(f"Prefix ratio must be at least 1, got {self.ratio}")

    def __str__(self) -> str:
        return "prefix" if self.ratio == 1 else f"prefix/{self.ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Needs the last `tokens` tokens before B."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SpecError(f"Window tokens must be at least 1, got {self.tokens}")

    def __str__(self) -> str:
        return f"window {self.tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Needs one object at exactly B.

    With a `period` the object is the unfinished group of a compressor: `B % period` rows, so nothing
    at all at multiples of the period. Between boundaries those rows are the engine's own; the object holds
    them as they were at one. Without a period it is always a single row.
    """

    period: int | None = None

    def __post_init__(self) -> None:
        if self.period is not None and self.period < 2:
            raise SpecError(f"Point period must be at least 2, got {self.period}")

    def rows_at(self, boundary: int) -> int:
        return 1 if self.period is None else boundary % self.period

    def __str__(self) -> str:
        return "point" if self.period is None else f"point mod {self.period}"


Shape: TypeAlias = Prefix | Window | Point
