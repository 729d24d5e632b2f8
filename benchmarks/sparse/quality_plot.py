"""Perplexity against the budget as one picture, a panel for each model and context. Pure: figures in, SVG out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

Series = Mapping[str, Sequence[tuple[int, float]]]  # by method: budget and perplexity

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 270, 52, 14, 40, 44
COLOURS = ("#0b6e99", "#c8553d", "#5a8f29", "#8a6fb3", "#777777")


def draw(panels: Mapping[str, tuple[float, Series]], columns: int = 2) -> str:
    """`panels` by title: the dense perplexity, and that of each method."""
    names = list(dict.fromkeys(name for _, series in panels.values() for name in series))
    rows = -(-len(panels) // columns)
    height = rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * WIDTH} {height}" width="{columns * WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{columns * WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (title, (dense, series)) in enumerate(panels.items()):
        x, y = number % columns * WIDTH, number // columns * HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(title, dense, series, names), "</g>"]
    parts += [*_key(names, rows * HEIGHT + 16), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(title: str, dense: float, series: Series, names: Sequence[str]) -> Iterator[str]:
    budgets = sorted({budget for points in series.values() for budget, _ in points})
    top = max([dense, *(value for points in series.values() for _, value in points)])
    low, high = dense - 0.08 * (top - dense or 1), top + 0.05 * (top - dense or 1)

    def across(budget: float) -> float:
        share = math.log2(budget / budgets[0]) / (math.log2(budgets[-1] / budgets[0]) or 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{LEFT}" y="22" font-size="13" font-weight="bold">{escape(title)}</text>'
    for step in range(5):
        value = low + (high - low) * step / 4
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
    for budget in budgets:
        yield f'<text x="{across(budget):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{budget:,}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - BOTTOM + 32}" text-anchor="middle">tokens picked</text>'
    yield (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(dense):.1f}" y2="{up(dense):.1f}" stroke="black" '
        f'stroke-dasharray="5 4"/>'
        f'<text x="{WIDTH - RIGHT}" y="{up(dense) + 13:.1f}" text-anchor="end">dense {dense:.2f}</text>'
    )
    for name, points in series.items():
        colour = COLOURS[names.index(name) % len(COLOURS)]
        line = " ".join(f"{across(budget):.1f},{up(value):.1f}" for budget, value in sorted(points))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for budget, value in points:
            at = f'cx="{across(budget):.1f}" cy="{up(value):.1f}"'
            yield f'<circle {at} r="3" fill="{colour}"><title>{value:.2f}</title></circle>'


def _key(names: Sequence[str], y: int) -> Iterator[str]:
    x = LEFT
    for number, name in enumerate(names):
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>'
        yield f'<text x="{x + 15}" y="{y}">{escape(name)}</text>'
        x += 45 + 6 * len(name)
