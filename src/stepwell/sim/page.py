"""Self-contained HTML pages and their parts: no scripts and no other files; they print, and work in light and dark mode. Pure.

Colours have names and two values each: a drawing uses `var(--green)`. What is wider than the screen scrolls in its own box.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

WORDS: Mapping[str, str] = {
    "device": "the part of the accelerator's own memory that the cache has",
    "host": "the server's main memory",
    "store": "the tier below, such as a disk",
    "hit rate": "the share of all prompt tokens that came from the cache and were not computed again",
    "endless memory": "the hit rate if nothing ever had to be evicted",
    "prefill": "the work on a prompt before its answer begins: computing what is not cached, and loading what is",
    "speed-up": "how many times as long prefill would take without a cache; 1x means no gain",
    "TTFT": "time to the first token of an answer; half of all requests are faster than p50, 95 of 100 are faster than p95",
    "knee": "the size after which a byte begins to give less than the average byte did",
    "page": "a run of tokens, the unit in which prompts are kept",
    "checkpoint": "what some models need, in addition to the pages of a prompt, to resume at one place in it",
    "policy": "the rule that decides what the cache keeps when memory is short",
    "computed": "prompt tokens that were not in the cache, so the model had to process them",
}

STYLE = """:root { color-scheme: light dark; --paper: #fff; --ink: #222; --soft: #595959; --line: #d8d8d8; --bar: #595959;
  --green: #0b6e4f; --blue: #1f4e9c; --red: #b23a48; --device: #0b6e4f; --host: #7cc48a; --store: #f7d184; --hatch: #8a5a00; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e8e8e8; --soft: #a9adb3; --line: #3a3e44;
  --bar: #a9adb3; --green: #4fc795; --blue: #83aefc; --red: #ff8490; --device: #2fa878; --host: #a5dcae; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; max-width: 980px; }
body { color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; line-height: 1.25; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h1, h2, li, p { overflow-wrap: anywhere; } .small, header { color: var(--soft); font-size: .87em; } code { white-space: nowrap; }
.wide { overflow-x: auto; } .wide svg { display: block; width: 100%; min-width: 640px; height: auto; }
text { font: 13px system-ui, sans-serif; fill: var(--ink); } .key span { margin-right: 1.2em; white-space: nowrap; }
table { border-collapse: collapse; margin: .5rem 0; } th, td { text-align: left; vertical-align: top; }
th, td { padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { vertical-align: bottom; } td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
td { min-width: 6em; } td + td:not(.n) { min-width: 9em; } td.n { min-width: 0; } h1 ~ h1 { margin-top: 4rem; }
dt { font-weight: 600; float: left; clear: left; margin-right: .6em; } dd { margin: 0 0 .2rem 0; }
@media print { body { margin: 0; padding: 0; max-width: none; font-size: 12px; } .wide { overflow: visible; }
  .wide svg { min-width: 0; } svg, table, tr, li { break-inside: avoid; } td:not(.n) { overflow-wrap: anywhere; min-width: 7em; }
  h1, h2 { break-after: avoid; } h1 ~ h1 { break-before: page; } }"""


def page(title: str, about: str, body: str) -> str:
    """A whole page around `body`, which is HTML. `title`, and `about` for first readers, are plain text."""
    view = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{view}<title>{escape(title)}</title><style>{STYLE}</style></head>"
    header = f"<header><p>{escape(title)}. {prose(about)}</p></header>"
    return f'<!doctype html><html lang="en">{head}<body>{header}{body}</body></html>\n'


def prose(text: str) -> str:
    """Plain text as HTML; flags such as --policy are not broken over lines."""
    return re.sub(r"(?<![\w-])--[a-z][a-z0-9-]*", r"<code>\g<0></code>", escape(text))


def drawing(width: int, height: int, body: str, *, label: str) -> str:
    """An SVG around `body`; the label is its description for screen readers."""
    opening = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return f'<div class="wide">{opening}{body}</svg></div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table of plain text; the first `words` columns hold words, the others figures."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if at < words else ' class="n"' for at in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{kind}>{prose(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{line("th", heads)}</thead><tbody>{body}</tbody></table></div>'


def bullets(lines: Iterable[str]) -> str:
    """A list of plain text."""
    return f"<ul>{''.join(f'<li>{prose(line)}</li>' for line in lines)}</ul>"


def glossary(*names: str) -> str:
    """The meaning of these `WORDS`."""
    return f"<h2>Words</h2><dl>{''.join(f'<dt>{escape(name)}</dt><dd>{prose(WORDS[name])}</dd>' for name in names)}</dl>"


# ---- bars by where tokens came from ---------------------------------------------------------------
#
# |#### device ####|:::: host ::::|//// store ////|     computed     |      dark, light, hatched, empty: they differ on grey paper

SOURCES = ("device", "host", "store", "computed")
_FILLS = {"device": "var(--device)", "host": "var(--host)", "store": "url(#hatched)", "computed": "none"}
_HATCHED = (
    '<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--store)"/><path d="M1 0V6" stroke="var(--hatch)" stroke-width="2"/></pattern></defs>'
)


def key() -> str:
    """The legend. A page with bars has it once, before them, because it defines their patterns."""
    parts = "".join(f"<span>{_swatch(name)} {name}</span>" for name in SOURCES)
    return f'<svg width="0" height="0" style="position:absolute">{_HATCHED}</svg><p class="key">{parts}</p>'


def cut_bar(tokens: Mapping[str, int], *, x: float, y: float, height: float, token_width: float) -> Iterator[str]:
    """One bar from `x` on, divided by source; parts without tokens are left out."""
    for name in SOURCES:
        width = tokens[name] * token_width
        if width:
            place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
            yield f"<rect {place} {_look(name)}><title>{name}: {tokens[name]:,} tokens</title></rect>"
        x += width


def _swatch(name: str) -> str:
    return f'<svg width="15" height="13"><rect x=".5" y=".5" width="14" height="12" {_look(name)}/></svg>'


def _look(name: str) -> str:
    return f'fill="{_FILLS[name]}" stroke="var(--ink)" stroke-width=".6"'
