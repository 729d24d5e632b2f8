"""A comparison of replays as one page: for each trace a bar and a row for each of its replays. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from stepwell.sim.page import SOURCES, cut_bar, drawing, glossary, key, page, prose, table
from stepwell.sim.plan_chart import said_sizes
from stepwell.sim.plan_page import said_machine
from stepwell.sim.policies import DEFAULT
from stepwell.sim.report import Report

LEFT, BAR, RIGHT, ROW, TOP, BOTTOM = 150, 640, 110, 28, 28, 26
HEADS = ("policy", "hit rate", *SOURCES, "TTFT p50 / p95")

ABOUT = (
    "Recorded requests, replayed through a cache that keeps what a language model computed for earlier prompts. "
    "It shows which share of the prompts the cache would have served, and from which memory."
)


def draw(reports: Sequence[Report]) -> str:
    """The page. Replays of one trace are shown together, in their order."""
    sections = "".join("".join(_section(group)) for group in _by_trace(reports))
    assumed = (
        "Every replay begins with an empty cache and serves one request at a time; answers are not cached. "
        f"The policy that is used unless another is named is {DEFAULT}. {said_machine(reports[0].hardware)}"
    )
    words = glossary(*SOURCES, "hit rate", "endless memory", "policy", "TTFT")
    title = "<h1>Where the prompts came from</h1>"
    return page("stepwell replay", ABOUT, f'{title}{key()}{sections}<p class="small">{prose(assumed)}</p>{words}')


def _by_trace(reports: Sequence[Report]) -> list[list[Report]]:
    """Neighbours of one trace; a policy that comes again is another trace of the same name."""
    groups: list[list[Report]] = []
    for report in reports:
        if not groups or groups[-1][0].trace != report.trace or report.policy in (each.policy for each in groups[-1]):
            groups.append([])
        groups[-1].append(report)
    return groups


def _section(reports: Sequence[Report]) -> Iterator[str]:
    first = reports[0]
    sizes = {tier: figures.size_bytes for tier, figures in first.tiers.items()}
    counts = f"{first.requests:,} requests with {first.prompt_tokens:,} prompt tokens"
    yield f"<h2>{escape(first.trace)}</h2>"
    yield f"<p>{escape(f'{first.spec}, {said_sizes(sizes)}, pages of {first.page_tokens} tokens. {counts}.')}</p>"
    rows = "".join("".join(_bar(report, TOP + at * ROW)) for at, report in enumerate(reports))
    height = TOP + ROW * len(reports) + BOTTOM
    label = f"where the prompt tokens of {first.trace} came from"
    yield drawing(LEFT + BAR + RIGHT, height, "".join(_frame(height)) + rows, label=label)
    yield table(HEADS, (_cells(report) for report in reports))


def _frame(height: int) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="16">share of all prompt tokens; the thick line is what endless memory would serve</text>'
    yield f'<text x="{LEFT + BAR + 12}" y="16">hit rate</text>'
    for percent in (0, 25, 50, 75, 100):
        x = LEFT + BAR * percent / 100
        yield f'<line x1="{x:g}" x2="{x:g}" y1="{TOP - 4}" y2="{height - BOTTOM}" stroke="var(--line)"/>'
        yield f'<text x="{x:g}" y="{height - 8}" text-anchor="middle">{percent}%</text>'


def _bar(report: Report, y: int) -> Iterator[str]:
    yield f'<text x="0" y="{y + 14}">{escape(report.policy)}</text>'
    yield from cut_bar(_tokens(report), x=LEFT, y=y, height=ROW - 9, token_width=BAR / max(report.prompt_tokens, 1))
    line = LEFT + report.ceiling * BAR
    yield f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{y - 3}" y2="{y + ROW - 6}" stroke="var(--ink)" stroke-width="3"/>'
    yield f'<text x="{LEFT + BAR + 12}" y="{y + 14}">{report.hit_rate:.1%}</text>'


def _tokens(report: Report) -> dict[str, int]:
    counts = (report.device_tokens, report.host_tokens, report.store_tokens, report.computed_tokens)
    return dict(zip(SOURCES, counts, strict=True))


def _cells(report: Report) -> tuple[str, ...]:
    shares = (f"{count / max(report.prompt_tokens, 1):.1%}" for count in _tokens(report).values())
    return report.policy, f"{report.hit_rate:.1%}", *shares, f"{report.ttft_p50_s:.2f} / {report.ttft_p95_s:.2f} s"
