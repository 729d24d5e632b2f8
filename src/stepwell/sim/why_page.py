"""Why tokens were computed, as one page to read or print: a bar for each reason, and the worst sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import chain

from stepwell.base.ids import Tier
from stepwell.sim.page import drawing, glossary, page, table
from stepwell.sim.plan_chart import said_sizes
from stepwell.sim.why import ADVICE, MEANING, Reason, Verdict
from stepwell.sim.why_replay import Explained

LEFT, BAR, RIGHT, ROW, TOP = 160, 560, 180, 26, 26
REASON_HEADS = ("reason", "what it means", "what helps", "tokens", "of prompts", "of computed")
SESSION_HEADS = ("session", "most of it", "requests", "prompt tokens", "computed", "computed again")


ABOUT = (
    "Recorded requests, replayed through a cache that keeps what a language model computed for earlier prompts. "
    "It shows why parts of the prompts were computed despite the cache, and what would help."
)


def draw_explained(explained: Sequence[Explained], sizes: Mapping[Tier, int], *, worst: int) -> str:
    """The page. `sizes` are those of the tiers, in bytes."""
    words = glossary(*(tier.label for tier in sizes), "page", "checkpoint", "policy", "computed")
    return page("stepwell explain", ABOUT, "".join(chain(*(_trace(each, sizes, worst) for each in explained))) + words)


def reason_rows(verdict: Verdict) -> list[tuple[str, ...]]:
    """The reasons and what they mean, with their tokens and shares; the last row is the sum."""
    rows = [
        (reason.value, MEANING[reason], ADVICE[reason], *_shares(tokens, verdict)) for reason, tokens in verdict.tokens.items()
    ]
    return [*rows, ("all computed", "", "", *_shares(verdict.computed_tokens, verdict))]


def session_rows(explained: Explained, *, worst: int) -> list[tuple[str, ...]]:
    """The sessions that computed most tokens again, with their main reason."""
    return [
        (
            name,
            _main_reason(verdict).value,
            f"{verdict.requests:,}",
            f"{verdict.prompt_tokens:,}",
            f"{verdict.computed_tokens:,}",
            f"{verdict.again_tokens:,}",
        )
        for name, verdict in explained.worst(worst)
    ]


def _main_reason(verdict: Verdict) -> Reason:
    return max((reason for reason in Reason if reason is not Reason.FIRST_USE), key=verdict.tokens.__getitem__)


def _shares(tokens: int, verdict: Verdict) -> tuple[str, str, str]:
    return f"{tokens:,}", f"{tokens / max(verdict.prompt_tokens, 1):.2%}", f"{tokens / max(verdict.computed_tokens, 1):.1%}"


def _trace(explained: Explained, sizes: Mapping[Tier, int], worst: int) -> Iterator[str]:
    total = explained.total
    about = f"{explained.spec}, {said_sizes(sizes)}, policy {explained.policy}, pages of {explained.page_tokens} tokens"
    sums = (
        f"{total.requests:,} requests had {total.prompt_tokens:,} prompt tokens. {total.computed_tokens:,} of them were "
        f"computed, and {total.again_tokens:,} of these had been seen before."
    )
    yield f"<h1>Why tokens were computed: {escape(explained.trace)}</h1><p>{escape(about)}. {sums}</p>"
    bars = "".join("".join(_bar(*each, total, TOP + at * ROW)) for at, each in enumerate(total.tokens.items()))
    head = f'<text x="{LEFT}" y="14">tokens, and their share of all that were computed</text>'
    yield drawing(LEFT + BAR + RIGHT, TOP + ROW * len(Reason), head + bars, label="tokens computed, by reason")
    yield table(REASON_HEADS, reason_rows(total), words=3)
    rows = session_rows(explained, worst=worst)
    if rows:
        yield f"<h2>The worst of {len(explained.sessions):,} sessions</h2>" + table(SESSION_HEADS, rows, words=2)
    yield (
        '<p class="small">A token has the first reason that applies: pages are looked up before checkpoints, and what any tier '
        "holds counts as cached. One request at a time; answers are not cached.</p>"
    )


def _bar(reason: Reason, tokens: int, total: Verdict, y: int) -> Iterator[str]:
    width = tokens / max(total.computed_tokens, 1) * BAR
    yield f'<text x="0" y="{y + 15}">{escape(reason.value)}</text>'
    yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 7}" fill="var(--bar)"/>'
    count, _, share = _shares(tokens, total)
    yield f'<text x="{LEFT + width + 8:.1f}" y="{y + 15}">{count} ({share})</text>'
