"""Curves over sizes of tiers as one SVG: lines that differ by dash and mark as well as by colour. Pure.

y  |            ___o      sizes on a logarithmic axis, in bytes
   |     o-----o          filled: the sizes given; ringed: the knee; a line across: the most that can be had
   | o--/
   +---------------- x
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from math import ceil, floor, log2, log10

from stepwell.base.ids import Tier
from stepwell.base.units import format_bytes
from stepwell.sim.page import drawing

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 350, 60, 20, 40, 60
MOST_TICKS = 9
LEAST_SPAN = 1.5  # doublings of the size: with fewer there may be no power of two to name


class Mark(Enum):
    CIRCLE = "circle"
    SQUARE = "square"
    TRIANGLE = "triangle"
    DIAMOND = "diamond"


CORNERS = {
    Mark.SQUARE: ((-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)),
    Mark.TRIANGLE: ((0, -6), (5.5, 4), (-5.5, 4)),
    Mark.DIAMOND: ((0, -6.5), (6.5, 0), (0, 6.5), (-6.5, 0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    colour: str
    dash: str
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line: values over sizes, and which size was given, and which is the knee, if one is."""

    name: str
    style: Style
    points: Sequence[tuple[int, float]]
    given_bytes: int
    knee_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The values: from 0 to `top` or the next round one, with a line across at `limit`, labelled `limit_said`."""

    title: str
    top: float
    form: str  # of round values
    exact: str  # of a point's
    limit: float | None = None
    limit_said: str = ""


def chart(curves: Sequence[Curve], axis: Axis) -> str:
    """An SVG of at least one curve."""
    sizes = [size for curve in curves for size, _ in curve.points]
    frame = _Frame(log2(min(sizes)), log2(max(sizes)), axis)
    parts = [*frame.lines(), *frame.limit()]
    for at, curve in enumerate(curves):
        parts += [*_line(frame, curve), *_key(curve, LEFT + 150 * at)]
    return drawing(WIDTH, HEIGHT, "".join(parts), label=axis.title)


def short_bytes(size_bytes: int) -> str:
    return format_bytes(size_bytes).replace(".0 ", " ")


def said_sizes(sizes: Mapping[Tier, int]) -> str:
    """Tiers and their sizes in words; those of no bytes are left out."""
    return ", ".join(f"{tier.label} {short_bytes(size_bytes)}" for tier, size_bytes in sizes.items() if size_bytes)


class _Frame:
    """Where values lie on the paper."""

    def __init__(self, first: float, last: float, axis: Axis) -> None:
        margin = max(0.25, (LEAST_SPAN - (last - first)) / 2)
        self._first, self._last = first - margin, last + margin
        self._axis = axis
        self._steps = _steps(axis.top)

    def x(self, size_bytes: float) -> float:
        return LEFT + (log2(size_bytes) - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(value / self._steps[-1], 1.0) * (HEIGHT - TOP - BOTTOM)

    def exact(self, value: float) -> str:
        return self._axis.exact.format(value)

    def lines(self) -> Iterator[str]:
        for value in self._steps:
            y, colour = self.y(value), "var(--line)" if value else "var(--ink)"
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{self._axis.form.format(value)}</text>'
        powers = range(ceil(self._first), floor(self._last) + 1)
        for power in powers[:: max(ceil(len(powers) / MOST_TICKS), 1)]:
            x = self.x(2**power)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}" stroke="var(--ink)"/>'
            yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{short_bytes(2**power)}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle:g}" y="{HEIGHT - 12}" text-anchor="middle">memory, on a logarithmic scale</text>'

    def limit(self) -> Iterator[str]:
        if self._axis.limit is not None:
            y = self.y(self._axis.limit)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--ink)" stroke-width="1.5"/>'
            yield f'<text x="{WIDTH - RIGHT}" y="{y - 9:.1f}" text-anchor="end">{escape(self._axis.limit_said)}</text>'


def _line(frame: _Frame, curve: Curve) -> Iterator[str]:
    places = " ".join(f"{frame.x(size):.1f},{frame.y(value):.1f}" for size, value in curve.points)
    style = curve.style
    yield f'<polyline points="{places}" fill="none" stroke="{style.colour}" stroke-width="2" stroke-dasharray="{style.dash}"/>'
    for size, value in curve.points:
        x, y = frame.x(size), frame.y(value)
        if size == curve.knee_bytes:
            ring = f'r="10" fill="none" stroke="{style.colour}" stroke-width="1.5"'
            yield f'<circle class="knee" cx="{x:.1f}" cy="{y:.1f}" {ring}/>'
        title = f"{curve.name} {short_bytes(size)}: {frame.exact(value)}"
        yield _mark(style, x, y, filled=size == curve.given_bytes, title=title)


def _key(curve: Curve, x: float) -> Iterator[str]:
    style = curve.style
    look = f'stroke="{style.colour}" stroke-width="2" stroke-dasharray="{style.dash}"'
    yield f'<line x1="{x}" x2="{x + 40}" y1="12" y2="12" {look}/>'
    yield _mark(style, x + 20, 12, filled=False, title=curve.name)
    yield f'<text x="{x + 48}" y="16">{escape(curve.name)}</text>'


def _mark(style: Style, x: float, y: float, *, filled: bool, title: str) -> str:
    look = f'fill="{style.colour if filled else "var(--paper)"}" stroke="{style.colour}" stroke-width="1.5"'
    label = f"<title>{escape(title)}</title>"
    if style.mark is Mark.CIRCLE:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {look}>{label}</circle>'
    corners = " ".join(f"{x + right:.1f},{y + down:.1f}" for right, down in CORNERS[style.mark])
    return f'<polygon points="{corners}" {look}>{label}</polygon>'


def _steps(top: float) -> list[float]:
    """Round values from 0 to `top` or the next one, a handful."""
    rough = top / 6
    scale = 10 ** floor(log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    return [step * at for at in range(ceil(top / step * 0.999) + 1)]
