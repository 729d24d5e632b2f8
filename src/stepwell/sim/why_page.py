"""Why tokens were computed, as one page to read or print: a bar for each reason, and the worst sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain

from stepwell.sim.picture import page, table
from stepwell.sim.why import ADVICE, MEANING, Reason, Verdict
from stepwell.sim.why_replay import Explained

LEFT, BAR, RIGHT, ROW = 160, 560, 180, 26
REASON_HEADS = ("reason", "what it means", "what helps", "tokens", "of prompts", "of computed")
SESSION_HEADS = ("session", "most of it", "requests", "prompt tokens", "computed", "computed again")


def draw_explained(told: Sequence[Explained], *, worst: int) -> str:
    """The page."""
    return page("stepwell explain", "".join(chain(*(_trace(each, worst) for each in told))))


def reason_rows(verdict: Verdict) -> list[tuple[str, ...]]:
    """The reasons and what they mean, with their tokens and shares; the last row is the sum."""
    rows = [
        (reason.value, MEANING[reason], ADVICE[reason], *_shares(tokens, verdict)) for reason, tokens in verdict.tokens.items()
    ]
    return [*rows, ("all computed", "", "", *_shares(verdict.computed_tokens, verdict))]


def session_rows(told: Explained, *, worst: int) -> list[tuple[str, ...]]:
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
        for name, verdict in told.worst(worst)
    ]


def _main_reason(verdict: Verdict) -> Reason:
    return max((reason for reason in Reason if reason is not Reason.FIRST_USE), key=verdict.tokens.__getitem__)


def _shares(tokens: int, verdict: Verdict) -> tuple[str, str, str]:
    return f"{tokens:,}", f"{tokens / max(verdict.prompt_tokens, 1):.2%}", f"{tokens / max(verdict.computed_tokens, 1):.1%}"


def _trace(told: Explained, worst: int) -> Iterator[str]:
    total = told.total
    about = f"{told.spec}, policy {told.policy}, pages of {told.page_tokens} tokens"
    sums = (
        f"{total.requests:,} requests with {total.prompt_tokens:,} prompt tokens computed {total.computed_tokens:,}, "
        f"of which {total.again_tokens:,} had been seen before."
    )
    yield f"<h1>Why tokens were computed: {escape(told.trace)}</h1><p>{escape(about)}. {sums}</p>"
    bars = "".join("".join(_bar(reason, tokens, total, at * ROW)) for at, (reason, tokens) in enumerate(total.tokens.items()))
    yield f'<svg viewBox="0 0 {LEFT + BAR + RIGHT} {ROW * len(Reason)}" role="img">{bars}</svg>'
    yield table(REASON_HEADS, reason_rows(total), words=3)
    if told.sessions:
        yield f"<h2>The worst of {len(told.sessions):,} sessions</h2>"
        yield table(SESSION_HEADS, session_rows(told, worst=worst), words=2)
    yield (
        '<p class="small">A token has the first reason that stops it: pages are asked for before checkpoints, and what any tier '
        "holds counts as there. One request at a time; answers are not cached.</p>"
    )


def _bar(reason: Reason, tokens: int, total: Verdict, y: int) -> Iterator[str]:
    width = tokens / max(total.computed_tokens, 1) * BAR
    yield f'<text x="0" y="{y + 15}">{escape(reason.value)}</text>'
    yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 7}" fill="#555"/>'
    count, _, share = _shares(tokens, total)
    yield f'<text x="{LEFT + width + 8:.1f}" y="{y + 15}">{count} ({share})</text>'
