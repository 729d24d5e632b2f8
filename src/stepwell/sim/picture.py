"""Pages that stand alone: no scripts, no files beside them, and they print. First of them a comparison of replays. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from stepwell.sim.report import Report

SOURCES = {"device": "#0b6e4f", "host": "#6bbf59", "store": "#f2b134", "computed": "#b23a48"}
LEFT, BAR, RIGHT, ROW, TOP = 260, 480, 220, 26, 26

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 980px; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; } text { font: 12px system-ui, sans-serif; fill: #333; }
.key span { margin-right: 1.2em; } .key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; }
table { border-collapse: collapse; margin: .5rem 0; } caption { text-align: left; font-weight: 600; }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
td.n, th.n { text-align: right; } .small { color: #555; font-size: 13px; }
@media print { body { margin: 0; max-width: none; font-size: 12px; } svg, table { break-inside: avoid; } }"""


def page(title: str, body: str) -> str:
    """A whole page around `body`, which is HTML; the title is not."""
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>\n'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table of plain text; the first `words` columns hold words, the others figures."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if at < words else ' class="n"' for at in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"

    return f"<table>{line('th', heads)}{''.join(line('td', row) for row in rows)}</table>"


def draw(reports: Sequence[Report]) -> str:
    """A bar for each replay, cut by where its prompts came from."""
    keys = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in SOURCES.items())
    rows = "".join("".join(_row(report, TOP + at * ROW)) for at, report in enumerate(reports))
    heads = (
        f'<text x="{LEFT}" y="14">share of prompt tokens; the line is endless memory</text>'
        f'<text x="{LEFT + BAR + 12}" y="14">hit rate, first token p50 / p95</text>'
    )
    chart = f'<svg viewBox="0 0 {LEFT + BAR + RIGHT} {TOP + ROW * len(reports)}" role="img">{heads}{rows}</svg>'
    title = "<h1>Where the prompts of a trace came from</h1>"
    return page("stepwell replay", f'{title}<p class="key">{keys}</p>{chart}')


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
