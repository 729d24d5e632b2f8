"""Curves over sizes of tiers as one SVG: lines that differ by dash and mark as well as by colour. Pure.

y  |            ___o      sizes on a logarithmic axis, in bytes
   |     o-----o          filled: the sizes given; ringed: the knee; a thin line across: what endless memory would give
   | o--/
   +---------------- x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10

from stepwell.base.units import format_bytes

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 330, 60, 20, 30, 40
MOST_TICKS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    colour: str
    dash: str
    sides: int  # of the mark; 0 for a circle


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
    """The values: from 0 to `top`, shown as `form` says, with a line across at `limit`, which `limit_said` tells."""

    title: str
    top: float
    form: str
    limit: float | None = None
    limit_said: str = ""

    def show(self, value: float) -> str:
        return self.form.format(value)


def chart(curves: Sequence[Curve], axis: Axis) -> str:
    """An SVG of at least one curve."""
    sizes = [size for curve in curves for size, _ in curve.points]
    frame = _Frame(log2(min(sizes)), log2(max(sizes)), axis)
    parts = [*frame.lines(), *frame.limit()]
    for at, curve in enumerate(curves):
        parts += [*_line(frame, curve), *_key(curve, LEFT + 150 * at)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axis.title)}">{"".join(parts)}</svg>'


def short_bytes(size_bytes: int) -> str:
    return format_bytes(size_bytes).replace(".0 ", " ")


class _Frame:
    """Where values lie on the paper."""

    def __init__(self, first: float, last: float, axis: Axis) -> None:
        self._first, self._last = first - 0.25, last + 0.25
        self._axis = axis

    def x(self, size_bytes: float) -> float:
        return LEFT + (log2(size_bytes) - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(value / self._axis.top, 1.0) * (HEIGHT - TOP - BOTTOM)

    def lines(self) -> Iterator[str]:
        for value in _steps(self._axis.top):
            y = self.y(value)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{self._axis.show(value)}</text>'
        powers = range(ceil(self._first), floor(self._last) + 1)
        for power in powers[:: max(ceil(len(powers) / MOST_TICKS), 1)]:
            x = self.x(2**power)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}" stroke="#333"/>'
            yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{short_bytes(2**power)}</text>'

    def limit(self) -> Iterator[str]:
        if self._axis.limit is not None:
            y = self.y(self._axis.limit)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222" stroke-width="1"/>'
            yield f'<text x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(self._axis.limit_said)}</text>'


def _line(frame: _Frame, curve: Curve) -> Iterator[str]:
    places = " ".join(f"{frame.x(size):.1f},{frame.y(value):.1f}" for size, value in curve.points)
    style = curve.style
    yield f'<polyline points="{places}" fill="none" stroke="{style.colour}" stroke-width="2" stroke-dasharray="{style.dash}"/>'
    for size, value in curve.points:
        x, y = frame.x(size), frame.y(value)
        if size == curve.knee_bytes:
            yield f'<circle class="knee" cx="{x:.1f}" cy="{y:.1f}" r="10" fill="none" stroke="#222"/>'
        yield _mark(style, x, y, filled=size == curve.given_bytes, title=f"{curve.name} {short_bytes(size)}: {value:.4g}")


def _key(curve: Curve, x: float) -> Iterator[str]:
    style = curve.style
    look = f'stroke="{style.colour}" stroke-width="2" stroke-dasharray="{style.dash}"'
    yield f'<line x1="{x}" x2="{x + 40}" y1="12" y2="12" {look}/>'
    yield _mark(style, x + 20, 12, filled=False, title=curve.name)
    yield f'<text x="{x + 48}" y="16">{escape(curve.name)}</text>'


def _mark(style: Style, x: float, y: float, *, filled: bool, title: str) -> str:
    look = f'fill="{style.colour if filled else "#fff"}" stroke="{style.colour}" stroke-width="1.5"'
    told = f"<title>{escape(title)}</title>"
    if style.sides == 4:
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {look}>{told}</rect>'
    if style.sides == 3:
        corners = f"{x:.1f},{y - 6:.1f} {x - 5.5:.1f},{y + 4:.1f} {x + 5.5:.1f},{y + 4:.1f}"
        return f'<polygon points="{corners}" {look}>{told}</polygon>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {look}>{told}</circle>'


def _steps(top: float) -> list[float]:
    """Round values from 0 to `top`, about five."""
    rough = top / 6
    scale = 10 ** floor(log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    return [step * at for at in range(int(top / step * 1.001) + 1)]
