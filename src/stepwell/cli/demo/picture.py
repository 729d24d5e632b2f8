"""The demo's table as one self-contained page: a bar a turn, cut by where its tokens came from, and times beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

SOURCES = {"device": "#0b6e4f", "host": "#6bbf59", "store": "#f2b134", "computed": "#b23a48"}
BAR, ROW, LEFT, RIGHT, TOP = 560, 22, 90, 250, 26

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 920px; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 1.8rem; } svg { width: 100%; height: auto; }
text { font: 12px system-ui, sans-serif; fill: #333; } .key span { margin-right: 1.2em; white-space: nowrap; }
.key i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -1px; }
@media print { body { margin: 0; } }"""


def draw(model: str, turns: Sequence[Mapping[str, Any]]) -> str:
    """The page. `turns` are rows as the demo's JSON has them."""
    same = "yes" if all(turn["identical"] for turn in turns) else "NO"
    keys = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in SOURCES.items())
    lives = (
        ("first", "As people talked: device and host too small for all of it"),
        ("second", "After kill -9: a new process over the same disk"),
        ("cold", "Cold: everything computed"),
    )
    charts = "".join(f"<h2>{escape(title)}</h2>{_chart(turns, life)}" for life, title in lives)
    head = f'<head><meta charset="utf-8"><title>stepwell demo</title><style>{_STYLE}</style></head>'
    title = f"<h1>Where each prompt's tokens came from ({escape(model)})</h1>"
    verdict = f"<p>Answers cold, warm and after the restart identical: <b>{same}</b></p>"
    return f'<!doctype html><html lang="en">{head}<body>{title}<p class="key">{keys}</p>{verdict}{charts}</body></html>\n'


def _chart(turns: Sequence[Mapping[str, Any]], life: str) -> str:
    longest = max(turn[each]["prompt_tokens"] for turn in turns for each in ("cold", "first", "second"))
    slowest = max(turn[each]["first_token_s"] for turn in turns for each in ("cold", "first", "second"))
    height, width = TOP + ROW * len(turns), LEFT + BAR + RIGHT
    rows = "".join("".join(_row(turn, life, TOP + at * ROW, longest, slowest)) for at, turn in enumerate(turns))
    heads = (
        f'<text x="{LEFT}" y="14">tokens of the prompt</text><text x="{LEFT + BAR + 20}" y="14">seconds to the first word</text>'
    )
    return f'<svg viewBox="0 0 {width} {height}" role="img">{heads}{rows}</svg>'


def _row(turn: Mapping[str, Any], life: str, y: int, longest: int, slowest: float) -> Iterator[str]:
    reply, x = turn[life], float(LEFT)
    yield f'<text x="0" y="{y + 14}">{escape(str(turn["person"]))} {turn["turn"]}</text>'
    for name, colour in SOURCES.items():
        width = reply[name] / longest * BAR
        if width:
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 5}"'
            yield f'<rect {place} fill="{colour}"><title>{name}: {reply[name]}</title></rect>'
        x += width
    yield f'<text x="{x + 4:.1f}" y="{y + 13}">{reply["prompt_tokens"]}</text>'
    seconds, start = reply["first_token_s"], LEFT + BAR + 45
    yield f'<rect x="{start}" y="{y + 3}" width="{seconds / slowest * (RIGHT - 100):.1f}" height="{ROW - 11}" fill="#555"/>'
    yield f'<text x="{start + seconds / slowest * (RIGHT - 100) + 5:.1f}" y="{y + 13}">{seconds:.2f}</text>'
