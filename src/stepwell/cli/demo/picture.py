"""The demo's table as one self-contained page: a bar for each turn, divided by where its tokens came from, and its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from stepwell.sim.page import SOURCES, cut_bar, drawing, glossary, key, page

BAR, ROW, LEFT, RIGHT, TOP = 540, 24, 90, 270, 26
NUMBER = 60  # space for a count after the longest bar
LIVES = {
    "first": "As two users talked: device and host too small for all of it",
    "second": "After kill -9: a new process over the same disk",
    "cold": "Cold: everything computed",
}
ABOUT = (
    "Two users talk with a small language model whose server caches what it computed for earlier prompts. The server is "
    "killed, another starts over the same disk, and the same prompts are asked again."
)


def draw(model: str, turns: Sequence[Mapping[str, Any]]) -> str:
    """The page. `turns` are rows as the demo's JSON has them."""
    same = "yes" if all(turn["identical"] for turn in turns) else "NO"
    title = f"<h1>Where each prompt's tokens came from ({escape(model)})</h1>"
    verdict = f"<p>Answers cold, warm and after the restart identical: <strong>{same}</strong></p>"
    charts = "".join(f"<h2>{escape(said)}</h2>{_chart(turns, life, said)}" for life, said in LIVES.items())
    return page("stepwell demo", ABOUT, f"{title}{verdict}{key()}{charts}{glossary(*SOURCES)}")


def _chart(turns: Sequence[Mapping[str, Any]], life: str, label: str) -> str:
    longest = max(turn[each]["prompt_tokens"] for turn in turns for each in LIVES)
    slowest = max(turn[each]["first_token_s"] for turn in turns for each in LIVES)
    rows = "".join("".join(_row(turn, life, TOP + at * ROW, longest, slowest)) for at, turn in enumerate(turns))
    heads = (
        f'<text x="{LEFT}" y="14">tokens of the prompt</text><text x="{LEFT + BAR + 20}" y="14">seconds to the first word</text>'
    )
    return drawing(LEFT + BAR + RIGHT, TOP + ROW * len(turns), heads + rows, label=label)


def _row(turn: Mapping[str, Any], life: str, y: int, longest: int, slowest: float) -> Iterator[str]:
    reply, token_width = turn[life], (BAR - NUMBER) / max(longest, 1)
    yield f'<text x="0" y="{y + 14}">{escape(str(turn["person"]))} {turn["turn"]}</text>'
    yield from cut_bar(reply, x=LEFT, y=y, height=ROW - 7, token_width=token_width)
    yield f'<text x="{LEFT + reply["prompt_tokens"] * token_width + 6:.1f}" y="{y + 14}">{reply["prompt_tokens"]:,}</text>'
    seconds, start = reply["first_token_s"], LEFT + BAR + 20
    width = seconds / max(slowest, 1e-9) * (RIGHT - 20 - NUMBER)
    yield f'<rect x="{start}" y="{y + 3}" width="{width:.1f}" height="{ROW - 13}" fill="var(--bar)"/>'
    yield f'<text x="{start + width + 6:.1f}" y="{y + 14}">{seconds:.2f}</text>'
