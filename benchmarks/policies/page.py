"""A policy report for people: the cells of its tables, its summary as sentences, and one page with the curves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from policies.gaps import LEAST_CLOSED, LEAST_GAP, MOST_BELOW, Row, Summary, summary_of
from stepwell.sim.page import bullets, glossary, page, table
from stepwell.sim.plan_chart import Axis, Curve, Mark, Style, chart, short_bytes
from stepwell.sim.policies import DEFAULT

REFERENCE, BEST_FIXED, BEST_OTHER = "offline", "best fixed", "best other"
STYLES = {
    REFERENCE: Style(colour="var(--ink)", dash="2 4", mark=Mark.TRIANGLE),
    DEFAULT: Style(colour="var(--green)", dash="none", mark=Mark.CIRCLE),
    BEST_FIXED: Style(colour="var(--red)", dash="8 4", mark=Mark.SQUARE),
    BEST_OTHER: Style(colour="var(--blue)", dash="10 3 2 3", mark=Mark.DIAMOND),
}
PICKED: Mapping[str, Callable[[Row], str | None]] = {
    REFERENCE: lambda row: row.reference,
    DEFAULT: lambda row: DEFAULT if DEFAULT in row.hit_rates else None,
    BEST_FIXED: lambda row: row.best_fixed,
    BEST_OTHER: lambda row: row.best_other,
}
ABOUT = (
    "Recorded requests, replayed through caches that differ only in what they keep when memory is short. "
    f"It shows how close {DEFAULT}, the policy that stepwell uses unless another is named, comes to the best that is known."
)
NOTES = (
    "Every point is a replay of the whole trace, or of its beginning where --requests was given, from an empty cache.",
    "Sizes are shares of the working set: the bytes of all distinct pages of the trace, checkpoints not counted.",
    "Offline is the better of two policies that know the whole trace beforehand. They are strong policies, not bounds.",
    "Fixed rules are end and every-*, with LRU. Where a model has no checkpoints these are one rule.",
    f"Best other is the best policy that is neither {DEFAULT}, nor a fixed rule, nor offline.",
    f"Figures are hit rates in percent. Ours is {DEFAULT}; ours - it, and the gap from the best fixed rule to offline, are in "
    "percentage points; closed is the share of that gap that ours closes.",
    "A dash: not replayed, or no cache can be that small for this model.",
)


def heads_of(policies: Sequence[str]) -> tuple[str, ...]:
    return ("budget", "size", *policies, "best fixed", "ours - it", "offline", "gap", "closed")


def cells_of_row(row: Row, policies: Sequence[str]) -> tuple[str, ...]:
    fixed, most = row.rate(row.best_fixed), row.rate(row.reference)
    return (
        f"{row.budget:g}%", short_bytes(row.budget_bytes), *(_percent(row.hit_rates.get(name)) for name in policies),
        "-" if fixed is None else f"{row.best_fixed} {_percent(fixed)}", _points(row.won), _percent(most), _points(row.gap),
        "-" if row.closed is None else f"{row.closed:.0%}",
    )  # fmt: skip


def said(summary: Summary) -> Iterator[str]:
    """The goals, and every row that misses one."""
    yield (
        f"goal (a), at most {MOST_BELOW * 100:g} points under the best fixed rule: "
        f"{summary.judged_a - len(summary.misses_a)} of {summary.judged_a} meet it"
    )
    for row in sorted(summary.misses_a, key=lambda row: row.won or 0.0):
        yield f"  misses (a): {_where(row)}: {_points(row.won)} against {row.best_fixed}"
    yield (
        f"goal (b), {LEAST_CLOSED:.0%} of the gap closed where it is more than {LEAST_GAP * 100:g} points: "
        f"{summary.judged_b - len(summary.misses_b)} of {summary.judged_b} meet it"
    )
    for row in sorted(summary.misses_b, key=lambda row: row.closed or 0.0):
        yield f"  misses (b): {_where(row)}: {row.closed or 0.0:.0%} of {_points(row.gap)} closed"


def draw(rows: Sequence[Row], policies: Sequence[str], ceilings: Mapping[tuple[str, str], float]) -> str:
    """The page. `ceilings` are by trace and model."""
    parts = ["<h1>Which checkpoints to keep: policies beside fixed rules and the future</h1>"]
    parts += ["<h2>Goals</h2>", bullets(said(summary_of(rows)))]
    for (trace, spec), group in groupby(rows, key=lambda row: (row.trace, row.spec)):
        parts += _section(trace, spec, list(group), policies, ceilings.get((trace, spec)))
    parts += ["<h2>How to read it</h2>", bullets(NOTES), glossary("hit rate", "endless memory", "policy", "checkpoint", "page")]
    return page("stepwell policy report", ABOUT, "".join(parts))


def _section(trace: str, spec: str, rows: Sequence[Row], policies: Sequence[str], ceiling: float | None) -> Iterator[str]:
    yield f"<h2>{escape(spec)} on {escape(trace)}</h2>"
    curves = [curve for name in STYLES if (curve := _curve(name, rows)).points]
    said_limit = "" if ceiling is None else f"endless memory: {ceiling:.1%}"
    sizes = [row.budget_bytes for row in rows]
    if curves and max(sizes) >= 2 * min(sizes):  # less is a point, not a curve
        title = f"hit rate, {spec} on {trace}"
        yield chart(curves, Axis(title=title, top=1.0, form="{:.0%}", exact="{:.1%}", limit=ceiling, limit_said=said_limit))
    heads, *lines = zip(heads_of(policies), *(cells_of_row(row, policies) for row in rows), strict=True)  # policies go down: many
    yield table(heads, lines)


def _curve(name: str, rows: Sequence[Row]) -> Curve:
    found = [(row.budget_bytes, row.rate(PICKED[name](row))) for row in rows]
    points = [(size_bytes, rate) for size_bytes, rate in found if rate is not None]
    return Curve(name=name, style=STYLES[name], points=points, given_bytes=0, knee_bytes=None)


def _where(row: Row) -> str:
    return f"{row.spec}, {row.trace}, {row.budget:g}%"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate * 100:.1f}"


def _points(difference: float | None) -> str:
    return "-" if difference is None else f"{round(difference * 100, 1) + 0.0:+.1f}"  # no -0.0
