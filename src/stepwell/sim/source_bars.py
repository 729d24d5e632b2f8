"""Bars cut by where the tokens of prompts came from; the parts differ on grey paper too. Pure.

|#### device ####|:::: host ::::|//// store ////|     computed     |      dark, light, hatched, empty
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

SOURCES = ("device", "host", "store", "computed")
_FILLS = {"device": "var(--device)", "host": "var(--host)", "store": "url(#hatched)", "computed": "none"}
_HATCHED = (
    '<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--store)"/><path d="M1 0V6" stroke="var(--hatch)" stroke-width="2"/></pattern></defs>'
)


def key() -> str:
    """What the parts look like. A page with bars has it once, before them: what they are filled with is defined here."""
    parts = "".join(f"<span>{_swatch(name)} {name}</span>" for name in SOURCES)
    return f'<svg width="0" height="0" style="position:absolute">{_HATCHED}</svg><p class="key">{parts}</p>'


def cut_bar(tokens: Mapping[str, int], *, x: float, y: float, height: float, token_width: float) -> Iterator[str]:
    """One bar from `x` on, as wide as its tokens by source; parts without tokens are left out."""
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
