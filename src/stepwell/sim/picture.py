"""A comparison of replays as one self-contained page: a bar for each, cut by where prompts came from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from stepwell.sim.report import Report

SOURCES = {"device": "#0b6e4f", "host": "#6bbf59", "store": "#f2b134", "computed": "#b23a48"}
LEFT, BAR, RIGHT, ROW, TOP = 260, 480, 220, 26, 26

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 980px; color: #222; }
h1 { font-size: 1.4rem; } svg { width: 100%; height: auto; } text { font: 12px system-ui, sans-serif; fill: #333; }
.key span { margin-right: 1.2em; } .key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; }"""


def draw(reports: Sequence[Report]) -> str:
    """The page."""
    keys = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in SOURCES.items())
    rows = "".join("".join(_row(report, TOP + at * ROW)) for at, report in enumerate(reports))
    heads = (
        f'<text x="{LEFT}" y="14">share of prompt tokens; the line is endless memory</text>'
        f'<text x="{LEFT + BAR + 12}" y="14">hit rate, first token p50 / p95</text>'
    )
    chart = f'<svg viewBox="0 0 {LEFT + BAR + RIGHT} {TOP + ROW * len(reports)}" role="img">{heads}{rows}</svg>'
    head = f'<head><meta charset="utf-8"><title>stepwell replay</title><style>{_STYLE}</style></head>'
    title = "<h1>Where the prompts of a trace came from</h1>"
    return f'<!doctype html><html lang="en">{head}<body>{title}<p class="key">{keys}</p>{chart}</body></html>\n'


def _row(report: Report, y: int) -> Iterator[str]:
    tokens = {
        "device": report.device_tokens,
        "host": report.host_tokens,
        "store": report.store_tokens,
        "computed": report.computed_tokens,
    }
    yield f'<text x="0" y="{y + 14}">{escape(f"{report.trace[:24]} {report.policy}")}</text>'
    x = float(LEFT)
    for name, count in tokens.items():
        width = count / max(report.prompt_tokens, 1) * BAR
        if width:
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 7}"'
            yield f'<rect {place} fill="{SOURCES[name]}"><title>{name}: {count:,} tokens</title></rect>'
        x += width
    line = LEFT + report.ceiling * BAR
    yield f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{y - 2}" y2="{y + ROW - 5}" stroke="#222"/>'
    figures = f"{report.hit_rate:.1%}, {report.ttft_p50_s:.2f} / {report.ttft_p95_s:.2f} s"
    yield f'<text x="{LEFT + BAR + 12}" y="{y + 14}">{figures}</text>'
