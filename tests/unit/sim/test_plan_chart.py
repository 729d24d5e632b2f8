"""Charts stay readable for curves that are short, flat, or as good as can be."""

from __future__ import annotations

import re

import pytest

from stepwell.base.ids import Tier
from stepwell.sim.plan_chart import CORNERS, Axis, Curve, Mark, Style, chart, said_sizes

GIB = 2**30


def drawn(*points: tuple[int, float], top: float = 1.0, limit: float | None = None, mark: Mark = Mark.CIRCLE) -> str:
    style = Style(colour="var(--green)", dash="none", mark=mark)
    curve = Curve(name="<host>", style=style, points=points, given_bytes=points[0][0], knee_bytes=None)
    return chart([curve], Axis(title="hits & more", top=top, form="{:.3g}", exact="{:.1%}", limit=limit, limit_said="all < 1"))


def heights(html: str, stroke: str) -> list[float]:
    return [
        float(y) for y in re.findall(rf'<line x1="60" x2="880" y1="([0-9.]+)" y2="[0-9.]+" stroke="{re.escape(stroke)}"', html)
    ]


@pytest.mark.parametrize("size", [GIB, 80 * GIB, 3 * GIB // 2])
def test_one_point_has_a_scale_to_read_it_by(size: int) -> None:
    html = drawn((size, 0.5))
    assert len(re.findall(r">[0-9.]+ [GT]iB</text>", html)) >= 1
    assert "memory" in html


@pytest.mark.parametrize("top", [0.9, 1.0, 2.0, 6.73, 7.87, 8.0, 101.0])
def test_no_value_lies_above_the_last_line(top: float) -> None:
    html = drawn((GIB, 0.0), (2 * GIB, top), top=top)
    mark = float(re.findall(r'<circle cx="[0-9.]+" cy="([0-9.]+)"', html)[1])
    assert 40 == min(heights(html, "var(--line)")) <= mark
    assert 3 <= len(heights(html, "var(--line)")) <= 7


def test_what_the_limit_says_is_clear_of_marks_that_reach_it() -> None:
    html = drawn((GIB, 0.87), (16 * GIB, 0.87), limit=0.87)
    line = heights(html, "var(--ink)")[-1]
    said = float(re.findall(r'y="([0-9.]+)" text-anchor="end">all', html)[0])
    assert said < line - 7, "above the marks, which are drawn around the line"


def test_names_are_escaped_and_points_tell_their_values() -> None:
    html = drawn((GIB, 0.1234), limit=0.5)
    assert "<host>" not in html and "&lt;host&gt; 1 GiB: 12.3%" in html
    assert 'aria-label="hits &amp; more"' in html and "all &lt; 1" in html


@pytest.mark.parametrize("mark", list(CORNERS))
def test_every_mark_has_its_own_shape(mark: Mark) -> None:
    assert drawn((GIB, 0.5), mark=mark).count("<polygon") == 2, "on the line and in the key"
    assert len(set(CORNERS.values())) == len(CORNERS) == len(Mark) - 1


def test_tiers_that_are_not_there_are_not_told() -> None:
    assert said_sizes({Tier.DEVICE: GIB, Tier.HOST: 0, Tier.STORE: 4096 * GIB}) == "device 1 GiB, store 4 TiB"
